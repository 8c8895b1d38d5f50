"""The journal of a run: the sums of its lines, and damage that it survives."""

import errno
import os
import random

import pytest

from trainer.errors import DiskFullError, FolderInUseError
from trainer.recipe import load
from trainer.saving import journal
from trainer.saving.journal import JOURNAL, Attempt, Journal, compute_goodput, read_journal
from trainer.saving.run_folder import RunFolder


def attempt(
    began,
    now,
    end=None,
    resumed=0,
    step=100,
    boot="boot",
    time=None,
    **seconds,
):
    """An attempt that spent the remaining time on steps."""
    steps = now - began - sum(seconds.values())
    return Attempt(
        host="here",
        boot=boot,
        began=began,
        now=now,
        time=1e9 + now if time is None else time,
        resumed=resumed,
        step=step,
        seconds={**seconds, "steps": steps},
        end=end,
    )


def open_journal(folder, seconds=lambda: {"steps": 1.0}, check=lambda: None):
    return Journal(folder, check, seconds, ours=False)


def test_redone_steps_and_gaps_are_taken_from_the_time_of_steps_that_count():
    killed = attempt(0, 100, step=100, evaluation=20.0)
    stopped = attempt(130, 150, end="SIGTERM", resumed=75, step=95, saving=10.0)
    goodput = compute_goodput(
        [killed, stopped, attempt(200, 210, resumed=95, step=115)], over=False
    )
    seconds = {
        "redone steps": 20,
        "waiting to be restarted": 80,
        "steps": 80,
        "evaluation": 20,
        "saving": 10,
    }
    assert goodput.seconds == pytest.approx(seconds)
    assert goodput.wall_s == 210
    assert goodput.fraction == pytest.approx(80 / 210)
    assert goodput.attempts == 3
    assert [(end["step"], end["cause"]) for end in goodput.ends] == [
        (100, "killed"),
        (95, "SIGTERM"),
    ]


def test_going_back_behind_an_attempt_undoes_those_before_it_too():
    attempts = [
        attempt(0, 100),
        attempt(100, 150, resumed=100, step=150),
        attempt(150, 160, resumed=60, step=70),
    ]
    assert compute_goodput(attempts).seconds == {"redone steps": 90, "steps": 70}
    undone = [
        attempt(0, 100),
        attempt(100, 110, resumed=None, step=0),
        attempt(110, 120, resumed=50, step=60),
    ]
    goodput = compute_goodput(undone)
    assert goodput.seconds == {"steps": 60, "redone steps": 50, "unfinished steps": 10}
    assert len(goodput.ends) == 3


def test_unaccounted_seconds_of_an_attempt_are_other():
    asleep = attempt(0, 100).model_copy(update={"now": 160.0})
    assert compute_goodput([asleep]).seconds == {"steps": 100, "other": 60}
    assert compute_goodput([]) is None


@pytest.mark.parametrize(
    ("then", "gap", "told"),
    [(1e9 + 500, 400, False), (1e9 + 20, 0, True)],
    ids=["clock", "clock set back"],
)
def test_after_another_boot_the_wall_clock_counts(then, gap, told):
    goodput = compute_goodput(
        [
            attempt(0, 100),
            attempt(
                5,
                15,
                boot="later",
                time=then + 10,
                resumed=100,
                step=110,
            ),
        ]
    )
    assert goodput.seconds.get("waiting to be restarted", 0) == gap and goodput.wall_s == 110 + gap
    assert bool(goodput.notes) == told


def test_a_run_that_was_done_waits_for_nobody():
    goodput = compute_goodput(
        [
            attempt(0, 100, end="completed"),
            attempt(
                1e6,
                1e6 + 10,
                resumed=100,
                step=110,
            ),
        ]
    )
    assert goodput.wall_s == 110 and "left out" in goodput.notes[0]


def test_a_line_is_replaced_without_moving_others(tmp_path):
    spent = {"steps": 123456.789, "start-up: data": 98765.4321}
    open_journal(tmp_path).close()
    first = open_journal(tmp_path, lambda: spent)
    assert read_journal(tmp_path / JOURNAL)[0][1].seconds == {
        "steps": 123456.789,
        "start-up: data": 98765.4321,
    }
    del spent["start-up: data"]
    first.resumed(5)
    first.mark(6)  # The mark is within the second attempt.
    first.end("lost rank")
    first.close()
    (before, line), notes = read_journal(tmp_path / JOURNAL)
    assert (line.seconds, line.resumed, line.step, line.end) == (
        {"steps": 123456.789},
        5,
        6,
        "lost rank",
    )
    assert before.end is None
    assert not notes
    assert (tmp_path / JOURNAL).read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("torn", [b'{"host":"here","bo', b"\0" * 300, b"\n\n{}"])
def test_a_torn_line_takes_no_other_along(tmp_path, torn):
    open_journal(tmp_path).close()
    whole = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(whole + torn)
    open_journal(tmp_path).close()
    attempts, notes = read_journal(tmp_path / JOURNAL)
    assert len(attempts) == 2 and notes[0].endswith(" damaged: 1")
    assert (tmp_path / JOURNAL).read_bytes().startswith(whole)
    assert compute_goodput(attempts, notes).notes == notes


def test_a_damaged_line_is_left_out_and_counted(tmp_path):
    for end in ("first", "second"):
        line = open_journal(tmp_path)
        line.end(end)
        line.close()
    whole = (tmp_path / JOURNAL).read_bytes()
    dice = random.Random(1)
    middle = whole.index(b"\n")
    for place in range(0, middle, 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << dice.randrange(8)
        (tmp_path / JOURNAL).write_bytes(damaged)
        attempts, notes = read_journal(tmp_path / JOURNAL)
        assert [line.end for line in attempts] == ["second"] and len(notes) == 1, place


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_folder_instead_of_the_file_is_moved_away(tmp_path, put):
    put(tmp_path / JOURNAL)
    read_journal(tmp_path / JOURNAL)  # waits for no pipe
    open_journal(tmp_path).close()
    assert len(read_journal(tmp_path / JOURNAL)[0]) == 1


def test_a_full_disk_is_reported_unless_another_error_is(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    line = open_journal(tmp_path)
    monkeypatch.setattr(journal.os, "pwrite", full)
    with pytest.raises(DiskFullError):
        line.mark(now=True)
    line.end("disk full")
    line.close()


def test_a_folder_that_another_run_has_is_left_alone(tmp_path):
    accepted = []

    def check():
        if accepted:
            raise FolderInUseError("another run's")

    line = open_journal(tmp_path, check=check)
    before = (tmp_path / JOURNAL).read_bytes()
    accepted.append(1)
    with pytest.raises(FolderInUseError):
        line.mark(5, now=True)
    line.end("folder in use")
    line.close()
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_imports_count_where_the_process_is_the_runs_own(tmp_path):
    Journal(tmp_path, lambda: None, lambda: {"steps": 0.0}, ours=True).close()
    [line], _ = read_journal(tmp_path / JOURNAL)
    assert line.seconds["start-up: imports"] > 0
    assert line.now - line.began == pytest.approx(sum(line.seconds.values()), abs=0.1)


@pytest.mark.parametrize(("words", "attempts"), [((), 1), (("resume=auto",), 2)])
def test_a_run_that_saved_nothing_is_an_attempt_of_the_next_where_that_is_to_go_on(
    tmp_path, words, attempts
):
    def folder(*words):
        return RunFolder(load("digits", f"output={tmp_path / 'run'}", *words))

    first = folder()
    open_journal(first.path).close()
    first.close()
    again = folder(*words)
    open_journal(again.path).close()
    assert len(read_journal(again.path / JOURNAL)[0]) == attempts
    again.close()
