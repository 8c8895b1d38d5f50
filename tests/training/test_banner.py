"""What is said before the first step: little, what matters first, and all of it in `runs show`."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from tests.command_line import QUIET, environment, ok, result
from tests.data.photo_folders import coloured
from tests.warm import run
from trainer.telemetry.tracking import Tracker
from trainer.training import banner

LINES, COLUMNS = 8, 80
LIVE = """
import json, trainer
def look(report):
    print("seen", json.load(open("run/result.json"))["facts"]["model"])
    return False
trainer.train("digits", mode="single", model="mlp", on_step=look, **{"logging.every_steps": 1, "output": "run"})
"""


def spoken(known, capsys):
    """The banner's lines."""
    tracker = object.__new__(Tracker)
    tracker._bar = None
    facts = {"mode": "ddp, 2 ranks, 1 thread each", "model": "m", "data": "d", "steps": "s", "folder": "x", **known}
    world = SimpleNamespace(devices=("cpu:0", "cpu:1"))
    tracker.path = "my run"
    banner.say(SimpleNamespace(tracker=tracker, facts=facts, world=world, recipe=SimpleNamespace(name="r", mode="ddp")))
    return capsys.readouterr().out.splitlines()


def test_photos_with_much_to_say_of_them(tmp_path):
    root = tmp_path / "photos"
    for number in range(40):
        coloured(root / ("ant" if number % 10 else "bee") / f"{number}.png", (4 * number, 50, 90), (16, 16))
    for name in ("1.heic", "._2.jpg", "3.xyz", "4.psd"):
        (root / "ant" / name).write_bytes(b"x")
    words = ["recipe=finetune", "model.weights=null", "model.name=cnn", "data.root=photos", "batch_size=8", "epochs=1"]
    words += ["schedule.warmup_epochs=0"]
    said = ok(*words, "mode=ddp", "nproc=2", *QUIET, "output=run", cwd=tmp_path).stdout.splitlines()
    [end] = (place for place, line in enumerate(said) if line.startswith("  details "))
    assert end < LINES and all(len(line) <= COLUMNS for line in said), said
    assert [line.split()[0] for line in said[4:end]] == ["batchnorm", "ignored", "balance"]
    command = shlex.split(said[end])[1:]
    assert command[:3] == ["python", "-m", "trainer"]
    shown = " ".join(ok(*command[3:], cwd=tmp_path).stdout.split())
    for title, text in result(tmp_path / "run")["facts"].items():
        assert title == "folder" or f"{title} {text}" in shown, title


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_few_lines_however_much_there_is_to_say(count, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    known = {f"note{n}": f"{n} " + "words that go on " * 40 for n in range(count)}
    lines = spoken({**known, "balance": "urgent"}, capsys)
    assert len(lines) <= LINES and all(len(line) <= COLUMNS for line in lines)
    assert lines[0].endswith("ddp on 2 x cpu") and lines[4].split() == ["balance", "urgent"]
    assert lines[-1].endswith("python -m trainer runs show 'my run'")


def test_a_single_note_may_take_what_room_there_is(capsys):
    lines = spoken({"note": "one two three four five six seven " * 5}, capsys)
    assert len(lines) == LINES and " ".join(" ".join(lines[4:7]).split()).count("seven") == 5


@pytest.mark.parametrize(
    ("devices", "words"),
    [(["cpu"], "cpu"), (["cuda:0"], "cuda:0"), (["cuda:0", "cuda:1"], "2 x cuda"), (["cuda:0", "cpu"], "cuda:0, cpu")],
)
def test_devices(devices, words):
    assert banner.few_names(devices) == words


def test_it_is_in_the_folder_from_the_first_step_on(tmp_path):
    done = run([sys.executable, "-c", LIVE], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "seen mlp on 1 x 8 x 8, " in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
