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
trainer.train("digits", mode="single", model="mlp", on_epoch=look, epochs=1, output="run")
"""


def spoken(known, capsys, name="r"):
    """The banner's lines."""
    tracker = object.__new__(Tracker)
    tracker._bar = None
    facts = {"mode": "ddp, 2 ranks, 1 thread each", "model": "m", "computes": "fp32", "data": "d", "steps": "s"}
    facts |= {"folder": "x", **known}
    world = SimpleNamespace(devices=("cpu:0", "cpu:1"))
    tracker.path = "my run"
    observer, recipe = SimpleNamespace(facts=facts), SimpleNamespace(name=name, mode="ddp")
    banner.say(SimpleNamespace(tracker=tracker, observer=observer, world=world, recipe=recipe))
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
    assert lines[0].endswith("ddp on 2 x cpu, fp32") and lines[4].split() == ["balance", "urgent"]
    assert lines[-1].endswith("python -m trainer runs show 'my run'")


LONG = {
    "model": "timm/vit_base_patch14_reg4_dinov2.lvd142m on 3 x 518 x 518, 86,580,480 parameters",
    "computes": "bf16, channels_last, compile, sync_bn, ema 0.9999",
    "data": "photos_of_all_the_birds_and_bats_of_2019: 1,281,167 training images, 50,000 held out, 1000 classes",
    "steps": "90 epochs x 5004 steps, 400000 in all at most, of 256 images, 8 x 32 a device, in 2 pieces of 16",
}  # fmt: skip


@pytest.mark.parametrize("wide", [100, 80, 60, 40])
@pytest.mark.parametrize("name", ["resnet50", "the_one_with_a_longer_warmup_and_without_mixup_2"])
def test_long_names_are_cut_and_no_facts(wide, name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(wide))
    lines = spoken({**LONG, "balance": "urgent"}, capsys, name)
    assert all(len(line) <= wide for line in lines[:-1]) and (wide < 80 or len(lines) <= LINES), lines
    text = " ".join(" ".join(lines).split())
    whole = [LONG["computes"], LONG["steps"], "balance urgent", "ddp on 2 x cpu", *LONG["model"].split(" on ")[1:]]
    assert [part for part in [*whole, LONG["data"].split(": ")[1]] if part not in text] == []
    assert "timm" in text and ("resnet50" in text or "the_" in text)


def test_what_it_computes_in_is_told_by_a_run_of_a_long_name(tmp_path):
    name = "the_one_with_a_longer_warmup_and_without_mixup_of_the_second_week"
    (tmp_path / f"{name}.yaml").write_text("extends: digits\nprecision: bf16\n")
    words = [f"recipe={name}.yaml", "mode=single", "max_steps=1", "epochs=1", *QUIET, "output=run"]
    head, *_ = ok(*words, cwd=tmp_path).stdout.splitlines()
    assert head.endswith("bf16, channels_last") and len(head) <= COLUMNS and "the_one" in head
    assert result(tmp_path / "run")["facts"]["computes"] == "bf16, channels_last"


def test_it_is_in_the_folder_from_the_first_step_on(tmp_path):
    done = run([sys.executable, "-c", LIVE], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "seen mlp on 1 x 8 x 8, " in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
