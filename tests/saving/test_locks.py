"""Locks on a folder: the owner, and processes that wait."""

import errno
import os
import threading

import pytest

from trainer.errors import FolderInUseError, SetupError
from trainer.saving import locks


def test_one_holds_it_until_it_lets_go(tmp_path):
    folder = tmp_path / "runs" / "first"
    lock = locks.lock_folder(folder, "run")
    with pytest.raises(FolderInUseError, match=r"\bfirst .*in use .*output="):
        locks.lock_folder(folder, "run")
    os.close(lock)
    os.close(locks.lock_folder(folder, "run"))


def test_unwritable_folders_and_links_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SetupError, match=rf"file .*\({os.strerror(errno.EEXIST)}\).*output="):
        locks.lock_folder(tmp_path / "file", "run")
    (tmp_path / ".lock").symlink_to(tmp_path / "file")
    with pytest.raises(SetupError, match=rf"{tmp_path} .*\({os.strerror(errno.ELOOP)}\)"):
        locks.lock_folder(tmp_path, "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_next_comes_when_the_first_has_done(tmp_path):
    seen = []

    def next_one():
        with locks.wait_for_lock(tmp_path / "sets", ".mnist.lock"):
            seen.append("next")

    with locks.wait_for_lock(tmp_path / "sets", ".mnist.lock"):
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
    with locks.wait_for_lock(tmp_path, ".lock"):
        entered.append(True)
    assert entered


def test_who_only_looks_changes_nothing(tmp_path):
    assert not locks.is_locked(tmp_path / "nowhere") and not locks.is_locked(tmp_path)
    lock = locks.lock_folder(tmp_path, "run")
    assert locks.is_locked(tmp_path)
    os.close(lock)
    assert not locks.is_locked(tmp_path)


def test_a_look_at_that_moment_does_not_keep_a_run_from_starting(tmp_path):
    (tmp_path / ".lock").write_text("")
    with (tmp_path / ".lock").open() as file:
        # The function is_held locks the file for a moment, too.
        locks.fcntl.flock(file, locks.fcntl.LOCK_SH)
        threading.Timer(0.01, file.close).start()
        lock = locks.lock_folder(tmp_path, "run")
    assert locks.is_locked(tmp_path)
    os.close(lock)
