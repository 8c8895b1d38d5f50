"""TensorBoard files after a resume and after damage."""

import os
import random
import re
import time
import unittest.mock
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

from tests.command_line import written
from tests.saving.states import flip
from trainer.recipe import load
from trainer.saving.checkpoint import Position
from trainer.saving.journal import OTHER
from trainer.saving.run_folder import RunFolder
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.events import trim_events
from trainer.telemetry.tracking import Tracker


def write(folder, tags, *steps):
    """A file of events: at each step a value of each tag."""
    writer = SummaryWriter(str(folder))
    for step in steps:
        for tag in tags:
            writer.add_scalar(tag, 1.0, step)
    writer.close()


def test_events_after_the_checkpoint_are_dropped(tmp_path):
    write(tmp_path, ["train/loss"], 1, 2, 3)
    write(tmp_path, ["train/loss"], 3, 4, 5)  # another start, its own file
    trim_events(tmp_path, Position(2, 1, 0), True)
    assert written(tmp_path) == [("train/loss", 1), ("train/loss", 2)]
    assert len(list(tmp_path.iterdir())) == 1


def test_killed_while_the_files_are_put_together_nothing_is_lost(tmp_path, monkeypatch):
    write(tmp_path, ["train/loss"], 1, 2)
    write(tmp_path, ["train/loss"], 3, 4)
    everything = [("train/loss", step) for step in range(1, 5)]
    for at in ("replace", "unlink"):
        kill = unittest.mock.Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch:
            patch.setattr(os if at == "replace" else Path, at, kill)
            with pytest.raises(KeyboardInterrupt):
                trim_events(tmp_path, Position(4, 1, 0), True)
        assert set(written(tmp_path)) == set(everything), at
    trim_events(tmp_path, Position(4, 1, 0), True)
    assert written(tmp_path) == everything


def _instead(make):
    def act(path):
        path.unlink()
        make(path)

    return act


def _huge(path):
    length = (2**62).to_bytes(8, "little")
    path.write_bytes(length + masked_crc32c(length).to_bytes(4, "little") + b"x" * 99)


DAMAGES = {
    "flip": lambda path: flip(path, path.stat().st_size // 2, bit=2),
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
        write(tmp_path, "abcdefgh", step)
    damaged = sorted(tmp_path.glob("events*"))[0]
    DAMAGES[damage](damaged)
    messages = []
    trim_events(tmp_path, Position(3, 0, 3), False, messages.append)
    assert {(tag, 2) for tag in "abcdefgh"} <= set(written(tmp_path))
    assert len(messages) == (damage not in ("empty", "huge record"))
    assert all(re.match(rf"{damaged} .*\b\d+ events\b", line) for line in messages)
    assert len(list(tmp_path.glob("events*"))) == 1
    tracker = Tracker(recipe, RunFolder(recipe), Ledger(OTHER))
    tracker.start(Position(3, 0, 3), 10, "top1")
    tracker.close()


def test_before_an_epochs_evaluation_its_values_are_still_to_come(tmp_path):
    write(tmp_path, ["train/loss", "val/top1", "memory/peak_gib/cpu"], 2)
    trim_events(tmp_path, Position(2, 0, 2), False)
    assert written(tmp_path) == [("train/loss", 2)]
    trim_events(tmp_path, Position(0, 0, 0), True)
    assert written(tmp_path) == [], "nothing was saved: everything starts anew"


def test_values_that_callbacks_log_after_an_evaluation_come_again_with_it(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for tag in ("train/loss", "logged/on_step", "val/top1", "logged/on_evaluation"):
        writer.add_scalar(tag, 1.0, 2)
    writer.close()
    trim_events(tmp_path, Position(2, 0, 2), False)
    assert written(tmp_path) == [("logged/on_step", 2), ("train/loss", 2)]


def test_a_file_cut_in_mid_record_is_read_up_to_there(tmp_path):
    write(tmp_path, "a", 1, 2, 3, 4, 5)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    trim_events(tmp_path, Position(10, 1, 0), True)
    assert written(tmp_path) == [("a", step) for step in range(1, 5)]


def test_a_clock_that_was_set_back_leaves_one_clean_set_of_events(tmp_path, monkeypatch):
    """TensorBoard reads them, even if it is open all the time: dropped values are gone and new
    values count.
    """
    recipe = load("digits", f"output={tmp_path}", "resume=auto")
    (tmp_path / "last.safetensors").touch()  # The file marks a run that can be resumed.
    shown = EventAccumulator(str(tmp_path))
    for clock, position, value in (
        (3e9, 0, 1.0),
        (3.1e9, 2, 2.0),
        (2e9, 2, 3.0),
        (1e9, 2, 4.0),
    ):
        monkeypatch.setattr(time, "time", lambda now=clock: now)
        tracker = Tracker(recipe, RunFolder(recipe), Ledger(OTHER))
        tracker.start(Position(position, 1 if position else 0, 0), 10, "top1")
        for step in range(position + 1, 6):
            tracker.scalars({"train/loss": value}, step)
        tracker.close()
        for reader in (shown, EventAccumulator(str(tmp_path))):
            loss = {event.step: event.value for event in reader.Reload().Scalars("train/loss")}
            assert loss == {step: 1.0 if step <= 2 else value for step in range(1, 6)}, clock
