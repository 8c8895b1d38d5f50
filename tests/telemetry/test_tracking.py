"""Plain lines, what a folder holds after a resume, and the null twin."""

import inspect
import shutil

import pytest

from tests.command_line import steps
from tests.telemetry.event_values import written
from trainer.errors import FolderInUseError, SetupError
from trainer.recipe import load
from trainer.saving.checkpoint import Position, State, commit
from trainer.saving.files import without_nan
from trainer.saving.run_folder import RunFolder
from trainer.telemetry.tracking import NullTracker, Tracker


def test_a_resumed_run_has_its_page_once(tmp_path):
    recipe = load("digits", f"output={tmp_path / 'run'}", "resume=auto")
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)  # what is saved is continued
    for position in (Position(0, 0, 0), Position(5, 0, 5), Position(10, 1, 0)):
        tracker = Tracker(recipe, RunFolder(recipe))
        tracker.start(position, 10, "top1")
        tracker.text("run", "what runs", 0)
        tracker.text("run", "how it went", 10)
        tracker.close()
    texts = [place for place in written(tmp_path / "run") if "text_summary" in place[0]]
    assert texts == [("run/text_summary", 0), ("run/text_summary", 10)]


def test_a_folder_that_was_removed_is_one_error_and_is_not_made_again(tmp_path):
    recipe = load("digits", f"output={tmp_path / 'run'}")
    tracker = Tracker(recipe, RunFolder(recipe))
    tracker.start(Position(0, 0, 0), 10, "top1")
    shutil.rmtree(tmp_path / "run")
    tracker.scalars({"train/loss": 1.0}, 1)
    with pytest.raises(SetupError, match="run was removed"):
        tracker.result({"status": "running"})
    with pytest.raises(SetupError, match=r"run .*No such file"):
        commit(tmp_path / "run", State(Position(1, 0, 1), {}, {}), 2)
    tracker.close()
    assert not (tmp_path / "run").exists()


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
    tracker.start(Position(0, 0, 0), 10, "top1")
    row = {"step": 5, "epoch": 1, "seconds": 1.0, "train_loss": 0.25, "lr": 0.1, "samples_per_sec": 1234.5}
    tracker.step(row)
    tracker.progress(5, 1)
    tracker.scalars({"train/loss": 0.25}, 5)
    tracker.result({"status": "running"})
    tracker._spoke = 0.0
    tracker.progress(6, 1)
    tracker.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 5/10, epoch 1/30, loss 0.2500, 1,234 images/s", "the first one waited for the start"
    assert second.startswith("step 6/10, epoch 1/30") and second.endswith(" left")
    names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
    assert {"recipe", "steps", "result", "events"} <= names
    assert (tmp_path / "run" / "steps.csv").read_text().splitlines()[1] == "5,1,1.0,0.25,0.1,1234.5"


@pytest.mark.parametrize(
    ("value", "expected"), [(float("nan"), None), ([1, float("inf")], [1, None]), ({"a": 0.5}, {"a": 0.5}), ("x", "x")]
)
def test_json_knows_no_nan(value, expected):
    assert without_nan(value) == expected


def test_a_run_whose_folder_another_one_has_by_now_adds_no_row(tmp_path):
    recipe = load("digits", f"output={tmp_path / 'run'}")
    tracker = Tracker(recipe, RunFolder(recipe))
    tracker.start(Position(0, 0, 0), 10, "top1")
    row = {"step": 1, "epoch": 1, "seconds": 1.0, "train_loss": 1.0, "lr": 0.1, "samples_per_sec": ""}
    tracker.step(row)
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").write_text("another run's name")
    with pytest.raises(FolderInUseError):
        tracker.step({**row, "step": 2})
    tracker.close()
    assert [line["step"] for line in steps(tmp_path / "run")] == ["1"]
