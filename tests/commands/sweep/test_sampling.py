"""Ranges: the samples of Optuna, and resuming a stopped sweep, with a stand-in for the runs."""

import json
import re
from pathlib import Path

import pytest

from trainer.commands import sweep
from trainer.commands.sweep.space import RANDOM
from trainer.errors import Interrupted

pytest.importorskip("optuna", reason="pip install optuna")

WORDS = ["recipe=digits", "optimizer.lr=0.001..1", "output=out", "epochs=4"]


def swept(*words):
    assert sweep.command([*WORDS, *words]) == 0
    return json.loads(Path("out/sweep.json").read_text())


def rates(report):
    return [
        float(row["values"]["optimizer.lr"])
        for row in sorted(report["trials"], key=lambda row: row["trial"])
    ]


def test_sampling_of_a_range_finds_good_values(machine, capsys):
    report = swept("trials=30", "threads=2")
    measured_rates = rates(report)
    assert len({*measured_rates}) == 30 and all(0.001 <= rate <= 1 for rate in measured_rates)
    assert sum(rate < 0.03 for rate in measured_rates[:RANDOM]) >= 2, (
        "on a linear scale 3 % are that small"
    )
    late = measured_rates[RANDOM:]
    assert sum(0.03 < rate < 0.3 for rate in late) > len(late) / 2, "the best is 0.1"
    out = capsys.readouterr().out
    best = report["trials"][0]["values"]["optimizer.lr"]
    assert re.search(r"\b0\.001 to 1 .*\blog scale\b", out) and out.splitlines()[-1].endswith(
        f"={best}"
    )


def test_whole_numbers_and_lists_are_combined_with_a_range(machine):
    report = swept("batch_size=16..64", "model.name=[cnn,mlp]", "trials=8")
    sizes = {row["values"]["batch_size"] for row in report["trials"]}
    assert all(size.isdigit() and 16 <= int(size) <= 64 for size in sizes)
    assert len(sizes) > 3
    assert {row["values"]["model.name"] for row in report["trials"]} == {"cnn", "mlp"}


def test_a_stopped_sweep_goes_on_with_the_same_values(machine):
    machine.faults["004"] = KeyboardInterrupt()
    with pytest.raises(Interrupted):
        swept("trials=6", "threads=2")
    begun = machine.ran.copy()
    machine.faults.clear()
    machine.ran.clear()
    report = swept("trials=6", "threads=2")
    assert machine.ran[0] == begun[-1] and len(machine.ran) == 3
    assert len({*rates(report)}) == 6 and report["status"] == "completed"
    machine.ran.clear()
    assert rates(swept("trials=8", "threads=2"))[:6] == rates(report)
    assert len(machine.ran) == 2
    assert len(swept("trials=3", "threads=2")["trials"]) == 8, "what is done stays"
