"""Ranges: what Optuna samples, and how a stopped sweep goes on. With a stand-in for the runs."""

import json
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
    return [float(row["values"]["optimizer.lr"]) for row in sorted(report["trials"], key=lambda row: row["trial"])]


def test_a_range_is_sampled_and_what_is_good_is_found(machine, capsys):
    report = swept("trials=30", "threads=2")
    found = rates(report)
    assert len({*found}) == 30 and all(0.001 <= rate <= 1 for rate in found)
    assert sum(rate < 0.03 for rate in found[:RANDOM]) >= 2, "on a linear scale 3 % are that small"
    late = found[RANDOM:]
    assert sum(0.03 < rate < 0.3 for rate in late) > len(late) / 2, "the best is 0.1"
    out, best = capsys.readouterr().out, report["trials"][0]["values"]["optimizer.lr"]
    assert "from 0.001 to 1 on a log scale" in out and out.splitlines()[-1].endswith(f"={best}")


def test_whole_numbers_and_lists_beside_a_range(machine):
    report = swept("batch_size=16..64", "model.name=[cnn,mlp]", "trials=8")
    sizes = {row["values"]["batch_size"] for row in report["trials"]}
    assert all(size.isdigit() and 16 <= int(size) <= 64 for size in sizes) and len(sizes) > 3
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
    assert rates(swept("trials=8", "threads=2"))[:6] == rates(report) and len(machine.ran) == 2
    assert len(swept("trials=3", "threads=2")["trials"]) == 8, "what is done stays"
