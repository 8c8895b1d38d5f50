"""Time of a run over attempts that end in different ways."""

import os
import signal
import time

import pytest

from tests import warm
from tests.command_line import QUIET, environment, ok, result, trainer, wait_for
from trainer.commands import runs
from trainer.data.folders.layout import NOTHING_BEFORE
from trainer.recipe import load
from trainer.saving.journal import JOURNAL, read_journal
from trainer.saving.run_folder import RunFolder
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.tracking import Tracker
from trainer.training.setup import Claim

RUN = [
    "recipe=digits",
    "mode=single",
    "threads=1",
    "model.name=mlp",
    "batch_size=96",
    "save.every_steps=5",
]


@pytest.mark.slow
def test_every_end_has_its_cause_and_the_parts_add_up(tmp_path):
    """The run ended in several ways before it was completed; its seconds are compared with those
    measured outside.
    """
    folder = tmp_path / "run"
    words = [*RUN, *QUIET, "epochs=4", f"output={folder}", "resume=auto"]
    trainer("version")  # The process that starts processes is warm.
    begun = time.monotonic()
    for fault in ("kill@0:3", "oom@0:8", "nan@0:12", "full@0:18"):
        trainer(*words, env={"TRAINER_FAULT": fault})
    ok(*words)
    outside = time.monotonic() - begun
    actual = result(folder)["goodput"]
    causes = ["killed", "out of memory", "not finite", "disk full", "completed"]
    assert [end["cause"] for end in actual["ends"]] == causes and actual["attempts"] == 5
    assert [line.resumed for line in read_journal(folder / JOURNAL)[0]] == [0, 0, 5, 10, 15]
    parts = actual["seconds"]
    wall = actual["wall_s"]
    assert sum(parts.values()) == pytest.approx(wall)
    assert all(seconds >= 0 for seconds in parts.values())
    assert parts["steps"] == pytest.approx(actual["fraction"] * wall)
    assert 0.5 * outside < wall < outside
    assert {
        "redone steps",
        "evaluation",
        "saving",
        "start-up: imports",
        "start-up: model",
    } <= parts.keys()
    assert parts.get("other", 0) < 0.3 * wall and not actual["notes"]


def test_a_signal_in_the_start_up_and_one_in_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, *QUIET, "epochs=2000", f"output={tmp_path / 'run'}", "resume=auto"]
    command = [os.sys.executable, "-m", "trainer", *words]
    path = tmp_path / "run" / JOURNAL
    for number, begun in enumerate((lambda line: True, lambda line: line.step > 20)):
        with warm.Popen(command, env=environment()) as running:
            wait_for(lambda n=number, begun=begun: any(map(begun, read_journal(path)[0][n:])))
            if number:
                assert runs.command(["show", "run"]).count("  step ") == 1
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 143
    assert [line.end for line in read_journal(path)[0]] == ["SIGTERM", "SIGTERM"]
    assert runs.command(["show", "run"]).count("  step ") == 2


def test_an_error_in_the_start_up_is_an_end(tmp_path):
    recipe = load("digits", "mode=single", f"output={tmp_path / 'run'}")
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    completed = trainer("recipe=digits", "mode=single", f"output={tmp_path / 'run'}", "resume=auto")
    assert completed.returncode == 4, completed.stderr
    [line], _ = read_journal(tmp_path / "run" / JOURNAL)
    assert (line.end, line.resumed) == ("checkpoint", None) and "start-up: resuming" in line.seconds


def test_a_part_of_the_start_up_is_written_as_it_ends(tmp_path):
    recipe = load("digits", f"output={tmp_path / 'run'}")
    ledger = Ledger("start-up: ranks")
    tracker = Tracker(recipe, RunFolder(recipe), ledger)
    with Claim(None, tracker, {}, NOTHING_BEFORE, None, ledger).part("data"):
        pass
    [line], _ = read_journal(tmp_path / "run" / JOURNAL)
    assert [*line.seconds] == ["start-up: ranks", "start-up: data"]
    tracker.close()


SLOW_START = """
import time
import torch
from trainer import register_dataset


class Images(torch.utils.data.Dataset):
    read = 0

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read += 1
        time.sleep(0.05 if self.read <= 80 else 0.002)
        return torch.zeros(3, 8, 8), index % 2


@register_dataset("slow_start")
def slow_start(data):
    return Images(256), Images(8), ("a", "b")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("more", "counted"), [("logging.warmup_steps=4", 28), ("max_steps=9", 8)])
def test_the_shown_wait_for_data_equals_that_of_the_verdict(tmp_path, more, counted):
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    words = [
        "plugin=slow_start",
        "data.name=slow_start",
        "mode=single",
        "model.name=mlp",
        "batch_size=8",
        "epochs=1",
    ]
    ok(*words, more, "data.workers=1", "threads=1", f"output={tmp_path / 'run'}", cwd=tmp_path)
    run_result = result(tmp_path / "run")
    share = run_result["verdict"]["step"]["data"]
    assert share == pytest.approx(run_result["data_wait_fraction"]) and share > 0.1
    waited = counted * share * run_result["step_time_s"]["mean"]
    assert run_result["goodput"]["seconds"]["waiting for data"] == pytest.approx(waited, rel=0.01)
