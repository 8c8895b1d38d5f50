"""TensorBoard files after a resume, plain lines, and the null twin."""

import inspect

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils.tensorboard import SummaryWriter

from trainer.checkpoint import Position
from trainer.recipe import load
from trainer.run_folder import RunFolder
from trainer.tracking import NullTracker, Tracker, trim_events, without_nan


def written(folder):
    events = []
    for path in folder.glob("*tfevents*"):
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
