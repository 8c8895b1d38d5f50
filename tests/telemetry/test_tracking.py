"""TensorBoard files after a resume, plain lines, and the null twin."""

import inspect
import os
import random
import shutil
import unittest.mock
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.summary.writer.record_writer import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

from trainer.errors import SetupError
from trainer.recipe import load
from trainer.saving.checkpoint import Position, State, commit
from trainer.saving.run_folder import RunFolder
from trainer.telemetry.events import trim_events
from trainer.telemetry.tracking import NullTracker, Tracker, without_nan


def written(folder):
    events = []
    for path in filter(Path.is_file, folder.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            events += [(value.tag, event.step) for value in event.summary.value]
    return sorted(events)


def test_events_after_the_checkpoint_are_dropped(tmp_path):
    for first in (1, 3):  # two starts, each its own file
        writer = SummaryWriter(str(tmp_path))
        for step in range(first, first + 3):
            writer.add_scalar("train/loss", 1.0 / step, step)
        writer.close()
    trim_events(tmp_path, Position(2, 1, 0))
    assert written(tmp_path) == [("train/loss", 1), ("train/loss", 2)]
    assert len(list(tmp_path.iterdir())) == 1


def test_killed_while_the_files_are_put_together_nothing_is_lost(tmp_path, monkeypatch):
    for first in (1, 3):
        writer = SummaryWriter(str(tmp_path))
        for step in range(first, first + 2):
            writer.add_scalar("train/loss", 1.0 / step, step)
        writer.close()
    everything = [("train/loss", step) for step in range(1, 5)]
    for at in ("replace", "unlink"):
        kill = unittest.mock.Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch:
            patch.setattr(os if at == "replace" else Path, at, kill)
            with pytest.raises(KeyboardInterrupt):
                trim_events(tmp_path, Position(4, 1, 0))
        assert set(written(tmp_path)) == set(everything), at
    trim_events(tmp_path, Position(4, 1, 0))
    assert written(tmp_path) == everything


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _instead(make):
    def act(path):
        path.unlink()
        make(path)

    return act


def _huge(path):
    length = (2**62).to_bytes(8, "little")
    path.write_bytes(length + masked_crc32c(length).to_bytes(4, "little") + b"x" * 99)


DAMAGES = {
    "flip": _flip,
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "empty": lambda path: path.write_bytes(b""),
    "folder": _instead(Path.mkdir),
    "dangling": _instead(lambda path: path.symlink_to("nowhere")),
    "loop": _instead(lambda path: path.symlink_to(path.name)),
    "endless": _instead(lambda path: path.symlink_to("/dev/zero")),
    "pipe": _instead(os.mkfifo),
    "huge record": _huge,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_events_file_is_left_out_with_a_sentence(tmp_path, damage):
    recipe = load("digits", f"output={tmp_path}")
    for step in (1, 2):
        writer = SummaryWriter(str(tmp_path))
        for tag in "abcdefgh":
            writer.add_scalar(tag, 1.0, step)
        writer.close()
    DAMAGES[damage](sorted(tmp_path.glob("events*"))[0])
    said = []
    assert trim_events(tmp_path, Position(3, 0, 3), said.append) >= 8
    assert {(tag, 2) for tag in "abcdefgh"} <= set(written(tmp_path))
    assert len(said) == (damage not in ("empty", "huge record")) and all("is left out" in line for line in said)
    assert len(list(tmp_path.glob("events*"))) == 1
    tracker = Tracker(recipe, RunFolder(recipe))
    tracker.start(Position(3, 0, 3), 10)
    tracker.close()


def test_a_resumed_run_has_its_verdict_once(tmp_path):
    recipe = load("digits", f"output={tmp_path / 'run'}", "resume=auto")
    for position in (Position(0, 0, 0), Position(5, 0, 5), Position(5, 0, 5)):
        tracker = Tracker(recipe, RunFolder(recipe))
        tracker.start(position, 10)
        tracker.text("verdict", "it computes", 10)
        tracker.close()
    texts = [place for place in written(tmp_path / "run") if "text_summary" in place[0]]
    assert texts == [("recipe/text_summary", 0), ("verdict/text_summary", 10)]


def test_a_folder_that_was_removed_is_one_error_and_is_not_made_again(tmp_path):
    recipe = load("digits", f"output={tmp_path / 'run'}")
    tracker = Tracker(recipe, RunFolder(recipe))
    tracker.start(Position(0, 0, 0), 10)
    shutil.rmtree(tmp_path / "run")
    tracker.scalars({"train/loss": 1.0}, 1)
    with pytest.raises(SetupError, match=r"run cannot be written .No such file"):
        tracker.result({"status": "running"})
    with pytest.raises(SetupError, match=r"run cannot be written .No such file"):
        commit(tmp_path / "run", State(Position(1, 0, 1), {}, {}), 2)
    tracker.close()
    assert not (tmp_path / "run").exists()


def test_before_an_epochs_evaluation_its_values_are_still_to_come(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for tag in ("train/loss", "val/top1", "memory/peak_gib/cpu"):
        writer.add_scalar(tag, 1.0, 2)
    writer.close()
    trim_events(tmp_path, Position(2, 0, 2))
    assert written(tmp_path) == [("train/loss", 2)]
    trim_events(tmp_path, Position(0, 0, 0))
    assert written(tmp_path) == [], "nothing was saved: everything starts anew"


def test_a_file_cut_in_mid_record_is_read_up_to_there(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for step in range(1, 6):
        writer.add_scalar("a", 0.0, step)
    writer.close()
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    trim_events(tmp_path, Position(10, 1, 0))
    assert written(tmp_path) == [("a", step) for step in range(1, 5)]


def test_the_null_tracker_answers_everything_a_tracker_does():
    public = {name for name, _ in inspect.getmembers(Tracker, inspect.isfunction) if not name.startswith("_")}
    null = {name for name, _ in inspect.getmembers(NullTracker, inspect.isfunction) if not name.startswith("_")}
    assert public == null
    for name in public:
        ours, theirs = inspect.signature(getattr(Tracker, name)), inspect.signature(getattr(NullTracker, name))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_plain_lines_and_files(tmp_path, capsys):
    recipe = load("digits", f"output={tmp_path / 'run'}")
    tracker = Tracker(recipe, RunFolder(recipe))
    tracker.start(Position(0, 0, 0), 10)
    row = {"step": 5, "epoch": 0, "seconds": 1.0, "train_loss": 0.25, "lr": 0.1, "samples_per_sec": 1234.5}
    tracker.step(row)
    tracker.progress(5, 0)
    tracker.scalars({"train/loss": 0.25}, 5)
    tracker.result({"status": "running"})
    tracker.close()
    assert "step 5/10, epoch 0, loss 0.2500, 1,234 images/s" in capsys.readouterr().out
    names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
    assert {"recipe", "steps", "result", "events"} <= names
    assert (tmp_path / "run" / "steps.csv").read_text().splitlines()[1] == "5,0,1.0,0.25,0.1,1234.5"


@pytest.mark.parametrize(
    ("value", "expected"), [(float("nan"), None), ([1, float("inf")], [1, None]), ({"a": 0.5}, {"a": 0.5}), ("x", "x")]
)
def test_json_knows_no_nan(value, expected):
    assert without_nan(value) == expected
