"""Who holds a folder, and who waits for it."""

import os
import threading

import pytest

from trainer.errors import FolderInUseError, SetupError
from trainer.saving import locks


def test_one_holds_it_until_it_lets_go(tmp_path):
    folder = tmp_path / "runs" / "first"
    lock = locks.hold(folder, "run")
    with pytest.raises(FolderInUseError, match=r"\bfirst .*in use .*output="):
        locks.hold(folder, "run")
    os.close(locks.hold(folder, "run", ".lock-0001"))  # another rank's
    os.close(lock)
    os.close(locks.hold(folder, "run"))


def test_what_cannot_be_written_and_links(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SetupError, match=r"file cannot be written .*File exists.*output="):
        locks.hold(tmp_path / "file", "run")
    (tmp_path / ".lock").symlink_to(tmp_path / "file")
    with pytest.raises(SetupError, match=r"cannot be written"):
        locks.hold(tmp_path, "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_next_comes_when_the_first_has_done(tmp_path):
    seen = []

    def next_one():
        with locks.in_turn(tmp_path / "sets", ".mnist.lock"):
            seen.append("next")

    with locks.in_turn(tmp_path / "sets", ".mnist.lock"):
        waits = threading.Thread(target=next_one)
        waits.start()
        waits.join(0.2)
        seen.append("first")
    waits.join(60)
    assert seen == ["first", "next"]


def test_a_disk_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    entered = []
    with locks.in_turn(tmp_path, ".lock"):
        entered.append(True)
    assert entered


def test_who_only_looks_changes_nothing(tmp_path):
    assert not locks.is_held(tmp_path / "nowhere") and not locks.is_held(tmp_path)
    lock = locks.hold(tmp_path, "run")
    assert locks.is_held(tmp_path)
    os.close(lock)
    assert not locks.is_held(tmp_path)


def test_a_look_at_that_moment_does_not_keep_a_run_from_starting(tmp_path):
    (tmp_path / ".lock").write_text("")
    with (tmp_path / ".lock").open() as file:
        locks.fcntl.flock(file, locks.fcntl.LOCK_SH)  # as is_held has it, for a moment
        threading.Timer(0.01, file.close).start()
        lock = locks.hold(tmp_path, "run")
    assert locks.is_held(tmp_path)
    os.close(lock)
