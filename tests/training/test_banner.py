"""Lines before the first step: few, the most important first. `runs show` prints all."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import environment
from tests.warm import run
from trainer.telemetry.tracking import Tracker
from trainer.training import banner

LINES = 8
COLUMNS = 80
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
    tracker._bar = None
    tracker.path = Path("my run")
    facts = {
        "mode": "ddp, 2 ranks, 1 thread each",
        "model": "m",
        "computes": "fp32",
        "data": "d",
        "steps": "s",
    }
    notes = {f"note{n}": f"{n} " + "words that go on " * 40 for n in range(count)}
    lines = {**facts, "folder": "x", **notes, "balance": "urgent"}
    recipe = SimpleNamespace(name="r", mode="ddp")
    banner.print_banner(recipe, ("cpu:0", "cpu:1"), lines, tracker)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES and all(len(line) <= COLUMNS for line in lines)
    assert lines[0].endswith("ddp on 2 x cpu, fp32")
    assert lines[4].split() == ["balance", "urgent"]
    command = shlex.split(lines[-1])[-6:]
    assert command == ["python", "-m", "trainer", "runs", "show", "my run"]


@pytest.mark.parametrize(
    "title", ["teacher", "start", "balance", "alike", "test", "pixels", "skipped"]
)
@pytest.mark.parametrize("width", ["40", "80"])
def test_lines_that_change_the_users_actions_are_never_cut(title, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    tracker = object.__new__(Tracker)
    tracker._bar = None
    tracker.path = Path("run")
    facts = {
        "mode": "single",
        "model": "m",
        "computes": "fp32",
        "data": "d",
        "steps": "s",
        "folder": "x",
    }
    notes = {f"note{n}": "words " * 99 for n in range(9)}
    text = "words that go on " * 30 + "to the end"
    lines = {**facts, **notes, title: text, "batchnorm": text}
    recipe = SimpleNamespace(name="r", mode="single")
    banner.print_banner(recipe, ("cpu",), lines, tracker)
    message = capsys.readouterr().out
    assert " ".join(message.split()).count(text) == 2
    assert all(len(line) <= int(width) for line in message.splitlines()[:-1])


def test_the_banner_is_in_the_folder_from_the_first_step_on(tmp_path):
    completed = run(
        [sys.executable, "-c", LIVE],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output
    assert re.search(r"seen mlp .*\b1 x 8 x 8\b", completed.stdout), output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
