"""What is said before the first step: little, what matters first, and all of it in `runs show`."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.command_line import environment
from tests.warm import run
from trainer.telemetry.tracking import Tracker
from trainer.training import banner

LINES, COLUMNS = 8, 80
LIVE = """
import json, trainer
def look(report):
    print("seen", json.load(open("run/result.json"))["facts"]["model"])
    return False
trainer.train("digits", mode="single", model="mlp", on_epoch=look, epochs=1, output="run")
"""


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_few_lines_however_much_there_is_to_say(count, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    tracker = object.__new__(Tracker)
    tracker._bar, tracker.path = None, "my run"
    facts = {"mode": "ddp, 2 ranks, 1 thread each", "model": "m", "computes": "fp32", "data": "d", "steps": "s"}
    notes = {f"note{n}": f"{n} " + "words that go on " * 40 for n in range(count)}
    observer = SimpleNamespace(banner_lines={**facts, "folder": "x", **notes, "balance": "urgent"})
    world, recipe = SimpleNamespace(devices=("cpu:0", "cpu:1")), SimpleNamespace(name="r", mode="ddp")
    banner.say(SimpleNamespace(tracker=tracker, observer=observer, world=world, recipe=recipe))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES and all(len(line) <= COLUMNS for line in lines)
    assert lines[0].endswith("ddp on 2 x cpu, fp32") and lines[4].split() == ["balance", "urgent"]
    assert lines[-1].endswith("python -m trainer runs show 'my run'")


def test_it_is_in_the_folder_from_the_first_step_on(tmp_path):
    done = run([sys.executable, "-c", LIVE], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "seen mlp on 1 x 8 x 8, " in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
