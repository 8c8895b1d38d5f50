"""Plain lines, the contents of a folder after a resume, and the null tracker."""

import errno
import inspect
import os
import pty
import re
import shutil
import sys
import termios
from contextlib import suppress

import pytest

from tests import warm
from tests.command_line import BARE, environment, steps
from tests.saving.states import commit
from trainer.errors import FolderInUseError, SetupError
from trainer.recipe import load
from trainer.saving.checkpoint import Position, State
from trainer.saving.journal import OTHER
from trainer.saving.run_folder import RunFolder
from trainer.telemetry import tracking
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.tracking import NullTracker, Tracker


@pytest.fixture
def tracker(tmp_path):
    """Return a tracker of a run of 30 epochs in the folder `run`, which is not started."""
    recipe = load("digits", f"output={tmp_path / 'run'}")
    return Tracker(recipe, RunFolder(recipe), Ledger(OTHER))


def test_a_folder_that_was_removed_is_one_error_and_is_not_made_again(tmp_path, tracker):
    tracker.start(Position(0, 0, 0), 10, "top1")
    shutil.rmtree(tmp_path / "run")
    tracker.scalars({"train/loss": 1.0}, 1)
    with pytest.raises(SetupError, match=rf"{tmp_path / 'run'} .*removed.*resume=auto"):
        tracker.result({"status": "running"})
    with pytest.raises(SetupError, match=f"run .*{os.strerror(errno.ENOENT)}"):
        commit(
            tmp_path / "run",
            State(Position(1, 0, 1), {}, {}),
            2,
        )
    tracker.close()
    assert not (tmp_path / "run").exists()


def test_the_null_tracker_answers_everything_a_tracker_does():
    public = {
        name
        for name, _ in inspect.getmembers(Tracker, inspect.isfunction)
        if not name.startswith("_")
    }
    null = {
        name
        for name, _ in inspect.getmembers(NullTracker, inspect.isfunction)
        if not name.startswith("_")
    }
    assert public == null
    for name in public:
        ours = inspect.signature(getattr(Tracker, name))
        reference = inspect.signature(getattr(NullTracker, name))
        assert list(ours.parameters) == list(reference.parameters), name


@pytest.fixture
def clock(monkeypatch):
    """Set the clock before the tracker is created."""
    now = [100.0]
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: now[0])
    return now


def test_plain_lines_and_files(tmp_path, capsys, clock, tracker):
    """A line per minute is printed without a terminal, with the values of that time."""
    tracker.start(Position(0, 0, 0), 1000, "top1")
    row = {"step": 5, "epoch": 1, "seconds": 1.0, "train_loss": 0.25, "lr": 0.1}
    tracker.step({**row, "samples_per_sec": 1234.5, "skipped": 0})
    for step in range(1, 131):
        clock[0] += 1.0
        tracker.progress(step, 1, 1 / step, 10.0 * step)
    clock[0] += 60.0
    tracker.evaluating(3, 8, 4321.0)
    tracker.scalars({"train/loss": 0.25}, 5)
    tracker.result({"status": "running"})
    tracker.close()
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["epoch 1/30", "step 60/1000", "loss 0.0167", "600 images/s", "15:40 left"],
        ["epoch 1/30", "step 120/1000", "loss 0.0083", "1,200 images/s", "14:40 left"],
        ["epoch 1/30", "evaluating 3/8", "4,321 images/s"],
    ]
    names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
    assert {"recipe", "steps", "result", "events"} <= names
    assert (tmp_path / "run" / "steps.csv").read_text().splitlines()[
        1
    ] == "5,1,1.0,0.25,0.1,1234.5,0"


GPU_ROW = {
    "epoch": "10/100",
    "train loss": "0.1234",
    "val loss": "0.1234",
    "top-1": "76.54%",
    "top-5": "98.76%",
    "lr": " 9.8e-05",
    "images/s": "12,345",
    "seconds": "1,234.5",
    "GPU GiB": "12.34",
}


@pytest.mark.parametrize(("columns", "missing"), [(60, {"top-5", "seconds"}), (80, set())])
def test_a_row_fits_into_the_terminal_with_the_time_left(
    columns, missing, capsys, clock, tracker, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    tracker.start(Position(0, 0, 0), 1000, "top1")
    tracker.progress(10, 1, 1.0, None)
    clock[0] += 90
    tracker.row(GPU_ROW, best=True, step=100)
    tracker.row(GPU_ROW, best=False, step=100)
    tracker.close()
    *titles, first, second = capsys.readouterr().out.splitlines()
    assert first == second and {len(line) for line in titles} == {len(first)}
    assert len(first) <= columns
    shown = {title: cell for title, cell in GPU_ROW.items() if title not in missing}
    assert first.split() == [cell.strip() for cell in shown.values()] + ["15:00"]
    words = " ".join(titles).split()
    assert sorted(words) == sorted(" ".join([*shown, "left"]).split())


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ([], "15:00 left"),
        (["stop.patience=3"], "15:00 left at most"),
        (["max_time=5m"], "03:30 left"),
    ],
)
def test_the_time_left_is_that_of_the_whole_run(words, left, tmp_path, clock, capsys):
    recipe = load("digits", f"output={tmp_path / 'run'}", *words)
    tracker = Tracker(recipe, RunFolder(recipe), Ledger(OTHER))
    tracker.start(Position(0, 0, 0), 1000, "top1")
    tracker.progress(10, 1, 1.0, None)
    clock[0] += 90
    tracker.progress(100, 1, 1.0, None)
    tracker.close()
    assert capsys.readouterr().out.rstrip().endswith(f"  {left}")


RUN = [
    "recipe=digits",
    "model.name=mlp",
    "epochs=4",
    "optimizer.lr=0.5",
    "logging.every_steps=1",
    *BARE,
]


@pytest.mark.slow
def test_on_a_terminal_one_line_lives_and_the_best_epoch_is_bold(tmp_path):
    """And every rank but the first is silent."""
    columns = 60
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (50, columns))
    plain = {
        name: value
        for name, value in environment().items()
        if name not in ("NO_COLOR", "COLUMNS", "TERM")
    }
    command = [
        sys.executable,
        "-m",
        "trainer",
        *RUN,
        "mode=ddp",
        "nproc=2",
        f"output={tmp_path / 'run'}",
    ]
    child = warm.Popen(
        command, env={**plain, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    written = b""
    with suppress(OSError):  # The other end is closed.
        while chunk := os.read(master, 65536):
            written += chunk
    os.close(master)
    assert child.wait() == 0, written
    text = written.decode()
    lines = text.replace("\r\n", "\n").split("\n")
    states = [
        re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", state) for line in lines for state in line.split("\r")
    ]
    live = [state for state in states if state.startswith("epoch ") and "/4  " in state]
    assert live and all(len(state) <= columns for state in live)
    bars = [re.search("━*─*$", state)[0] for state in live if "step" in state]
    assert all(len(bar) >= 10 for bar in bars) and any("━─" in bar for bar in bars)
    last = [
        re.sub(
            r"\x1b\[[0-9;]*[A-Za-z]",
            "",
            line.split("\r")[-1],
        )
        for line in lines
    ]
    assert all(len(line) <= columns for line in last if "/run" not in line), (
        "all but commands and paths"
    )
    assert [line.split() for line in last if "epoch" in line and "lr" in line] == [
        ["epoch", "loss", "loss", "top-1", "lr", "images/s", "seconds", "left"]
    ]
    assert any("details " in line for line in last)
    rows = [line.split("\r")[-1] for line in lines if re.search(r"\b[1-4]/4 +[\d.]+ ", line)]
    assert len(rows) == 4
    values = [float(re.search(r"([\d.]+)%", row)[1]) for row in rows]
    best = [value > max(values[:place], default=-1.0) for place, value in enumerate(values)]
    assert len({*best}) == 2, "some are not the best so far"
    assert [row.startswith("\033[1m") and row.endswith("\033[0m") for row in rows] == best


def test_a_run_whose_folder_another_one_has_by_now_adds_no_row(tmp_path, tracker):
    tracker.start(Position(0, 0, 0), 10, "top1")
    row = {
        "step": 1,
        "epoch": 1,
        "seconds": 1.0,
        "train_loss": 1.0,
        "lr": 0.1,
        "samples_per_sec": "",
    }
    tracker.step(row)
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").write_text("another run's name")
    with pytest.raises(FolderInUseError):
        tracker.step({**row, "step": 2})
    tracker.close()
    assert [line["step"] for line in steps(tmp_path / "run")] == ["1"]
