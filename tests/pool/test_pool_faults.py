"""The pool under fire: workers that are killed, stopped, hang or fail; parents that are killed,
interrupted or end.
"""

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.command_line import alive, blocks, environment, orphaned_blocks, within
from tests.pool import pool_workers as workers
from trainer.errors import PredictionError, RecipeError, explain
from trainer.pool import DevicePool, ItemError


def pids(pool):
    found = []
    for worker in pool._engine.workers:
        with suppress(ValueError, AttributeError):  # it is being replaced
            found.append(worker.handle.process.pid)
    return found


# --- what fails
# --------------------------------------------------------------------------------------------------


def test_an_exception_names_its_item():
    with DevicePool(["cpu"] * 2, workers.fail_at_three) as pool:
        results = pool.map(range(10))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ItemError) as caught:
            next(results)
        error = caught.value
        assert str(error) == "item 3: ValueError: no threes"
        assert "\nValueError: no threes" in error.__notes__[0]
        assert error.index == 3 and 'raise ValueError("no threes")' in error.traceback
        assert isinstance(error, PredictionError)
        assert explain(error) == (
            "item 3: ValueError: no threes",
            9,
        )
        assert list(results) == []
        assert list(pool.map(range(3))) == [0, 1, 2], "and the pool goes on"


@pytest.mark.parametrize("batch_size", [None, 4])
def test_skipped_items_leave_their_error_in_their_place(batch_size):
    with DevicePool(
        ["cpu"] * 2, workers.fail_at_three, on_error="skip", batch_size=batch_size
    ) as pool:
        results = list(pool.map(range(10)))
        assert results.pop(3).index == 3
        assert results == [0, 1, 2, *range(4, 10)]
        assert sorted(error.index for error in pool.map([3] * 6, ordered=False)) == list(range(6))


def test_a_failed_batch_is_done_again_item_by_item(tmp_path):
    with DevicePool(
        ["cpu"], workers.Logged, arguments=(tmp_path / "log",), batch_size=4, on_error="skip"
    ) as pool:
        results = list(pool.map(range(8)))
    assert results[:5] + results[6:] == [0, 1, 2, 3, 4, 6, 7]
    assert results[5].index == 5
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert calls[:2] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert sorted(calls[2:]) == [
        ["4"],
        ["5"],
        ["5"],
        ["6"],
        ["7"],
    ], "an item three times in all, the others once more"


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        (workers.TooFew, r"item 0: ValueError: batch\(\) .*\b0 results .*\b1 item"),
        (workers.Whole, r"dict\b.*\(1, "),
    ],
)
def test_wrong_results_of_a_batch(worker, says):
    with DevicePool(["cpu"], worker, batch_size=3) as pool, pytest.raises(ItemError, match=says):
        list(pool.map(range(3)))


def test_batches_that_do_not_fit_in_memory_are_split():
    with DevicePool(["cpu"], workers.OutOfMemory) as pool:
        sizes = list(pool.map(range(200)))
        assert len(sizes) == 200 and max(sizes) == 2 and sizes.count(2) > 100
        assert pool.figures()[0]["batch_size"] == 2


@pytest.mark.parametrize("how", workers.ENDS)
def test_an_object_that_exits_when_pickled_or_rebuilt_fails_alone(how):
    """An item, a result or a job, in a worker as in this process."""
    poisoned = [workers.Quits(how, "pickling"), workers.Quits(how, "unpickling", os.getpid())]
    for stage in ("pickling", "unpickling"):
        if (how, stage) == ("KeyboardInterrupt", "unpickling"):
            continue  # An exception in this thread is the user's own.
        with DevicePool(
            ["cpu"], workers.QuitsAtThree, arguments=(how, stage), batch_size=4, on_error="skip"
        ) as pool:
            for ordered in (True, False):
                results = list(pool.map(range(8), ordered=ordered))
                [error] = [result for result in results if isinstance(result, ItemError)]
                results.remove(error)
                assert error.index == 3
                assert sorted(results) == [0, 1, 2, 4, 5, 6, 7]
            assert pool.figures()[0]["replaced"] == 0
            with pytest.raises(Exception) as caught:
                pool.submit(workers.quits_at_three, 3, how, stage).result(timeout=60)
            assert isinstance(caught.value, Exception)
            assert pool.submit(workers.same, 4).result(timeout=60) == 4
    with DevicePool(["cpu"], workers.same, batch_size=3, on_error="skip") as pool:
        results = list(pool.map([1, *poisoned, 2, 3]))
        assert [results[0], *results[3:]] == [1, 2, 3]
        assert [error.index for error in results[1:3]] == [1, 2]
        # The items end in the same way, but the first one never reaches a worker.
        assert results[1].message.endswith(f" worker: {results[2].message}")
        assert pool.figures()[0]["replaced"] == 0


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing", FileNotFoundError),
        ("coded", workers.Coded),
        ("stop", StopIteration),
        ("picky", None),
        ("exit", SystemExit),
    ],
)
def test_an_items_error_has_the_workers_as_its_cause(name, cause):
    with DevicePool(["cpu"], workers.throw, retries=1) as pool:
        with pytest.raises(ItemError) as caught:
            list(pool.map([0, name]))
        error = caught.value
        assert error.index == 1 and error.code == 9 and str(error).startswith("item 1: ")
        assert type(error.__cause__) is (cause or type(None))
        if name == "coded":
            assert (error.__cause__.code, error.__cause__.detail) == (3, "more")
        again = pickle.loads(pickle.dumps(error))
        assert vars(again) == vars(error) and str(again) == str(error)
        assert list(pool.map([0, 1])) == [0, 1]


@pytest.mark.parametrize("use", ["map", "submit"])
def test_a_broken_setup_is_an_error_at_once(use):
    with DevicePool(["cpu"] * 2, workers.BrokenSetup) as pool:
        with pytest.raises(
            PredictionError, match=r"setup .*\d on cpu .*FileNotFoundError: no weights"
        ) as e:
            list(pool.map([1])) if use == "map" else pool.submit(workers.square, 1).result(
                timeout=60
            )
        assert 'raise FileNotFoundError("no weights")' in e.value.__notes__[0]
        with pytest.raises(PredictionError, match="no weights"):
            list(pool.map([1]))


def test_a_setup_that_refuses_its_arguments_says_what_to_type():
    with DevicePool(["cpu"], workers.RefusedSetup) as pool:
        for _ in range(2):
            with pytest.raises(RecipeError, match=r"^type devices=\[cpu\]$"):
                list(pool.map([1]))


def test_a_setup_that_kills_is_not_tried_for_ever():
    with (
        DevicePool(["cpu"], workers.DeadSetup) as pool,
        pytest.raises(PredictionError, match=r"\b10 times\b.*SIGKILL"),
    ):
        list(pool.map([1]))


# --- what dies and hangs
# ----------------------------------------------------------------------------------------------


def test_an_item_that_kills_its_worker_is_reported():
    with DevicePool(["cpu"] * 2, workers.kill_at_three, batch_size=2, on_error="skip") as pool:
        results = list(pool.map(range(8)))
        assert results[3].index == 3 and "SIGKILL" in results[3].message
        assert results[:3] + results[4:] == [0, 1, 2, 4, 5, 6, 7]
        assert sum(figure["replaced"] for figure in pool.figures()) == 3 + 1, (
            "with its neighbour, and alone"
        )
        assert list(pool.map(range(3))) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2])
def test_an_item_that_kills_when_inspected_is_the_only_failed_one(size):
    """Although its worker has not done the batch before, which is taken for the reason at first."""
    with DevicePool(["cpu"], workers.Foresight, batch_size=size, on_error="skip") as pool:
        results = list(pool.map([0, 1, 2, 3, 4, 5, 6, 3, 8]))
    assert [place for place, result in enumerate(results) if isinstance(result, ItemError)] == [
        3,
        7,
    ]
    assert "SIGKILL" in results[3].message and results[8] == -8


def test_a_job_whose_worker_is_lost_is_done_again(tmp_path):
    with DevicePool(["cpu"], workers.square) as pool:
        assert pool.submit(workers.mark_and_die_once, tmp_path).result() == "done"
        with pytest.raises(PredictionError, match=r"\b3 times\b.*SIGKILL"):
            pool.submit(workers.kill_myself, 0).result()
        assert pool.submit(workers.square, 3).result() == 9


def test_a_hanging_item_is_reported_and_the_rest_goes_on():
    with DevicePool(
        ["cpu"] * 2,
        workers.sleep,
        item_timeout=0.3,
        retries=2,
        on_error="skip",
        batch_size=2,
    ) as pool:
        results = list(pool.map([0, 0, 0, 1000, 0, 0.01]))
        assert results[3].index == 3 and "item_timeout=0.3 s" in results[3].message
        assert results[:3] + results[4:] == [0, 0, 0, 0, 0.01]
        job = pool.submit(workers.sleep, 0.8)
        assert job.result() == 0.8, "jobs have no limit"


def test_idle_and_starting_workers_are_replaced():
    with DevicePool(["cpu"] * 2, workers.square) as pool:
        assert list(pool.map(range(5))) == [0, 1, 4, 9, 16]
        for pid in pids(pool):
            os.kill(pid, signal.SIGKILL)
        while any(worker.replaced < 1 for worker in pool._engine.workers):
            time.sleep(0.001)
        for pid in pids(pool):  # not ready yet
            os.kill(pid, signal.SIGKILL)
        assert list(pool.map(range(5))) == [0, 1, 4, 9, 16]


def test_a_lost_fork_server_is_replaced():
    from multiprocessing.forkserver import _forkserver

    with DevicePool(["cpu"], workers.square) as pool:
        assert list(pool.map([2])) == [4]
        os.kill(_forkserver._forkserver_pid, signal.SIGKILL)
        assert list(pool.map(range(50))) == [i * i for i in range(50)]


class Attacker:
    """A thread that hits workers after a number of results, none of them twice."""

    def __init__(self, pool, numbers, every):
        self.pool = pool
        self.numbers = numbers
        self.every = every
        self.hit = []

    def after(self, count):
        if count >= self.every * (len(self.hit) + 1) and len(self.hit) < len(self.numbers):
            alive = [pid for pid in pids(self.pool) if pid not in self.hit]
            if alive:
                pid = alive[len(self.hit) % len(alive)]
                with suppress(ProcessLookupError):
                    os.kill(pid, self.numbers[len(self.hit)])
                    self.hit.append(pid)


@pytest.mark.slow
def test_no_item_is_lost_or_repeated(full, tmp_path):
    """Killed, stopped and hanging workers and poisoned items: all other results are one worker's,
    byte for byte.
    """
    count, kills, stops, hangs = (10_000, 20, 3, 2) if full else (1200, 5, 1, 1)
    torch.manual_seed(0)
    inputs = torch.randn(count, 10)
    inputs[:, 1] = torch.arange(count)
    poisoned = [count // 5 + 1, count // 2, count - 1]
    hanging = [count // 3 + k * count // 4 for k in range(hangs)]
    inputs[poisoned] = float("nan")
    inputs[hanging, 0] = float("inf")
    model = workers.Numbers().eval()
    options = {"batch_size": 16, "item_timeout": 1.0, "on_error": "skip"}
    (tmp_path / "never").mkdir()
    for k in hanging:
        (tmp_path / "never" / f"hung-{k}").touch()
    with DevicePool(
        ["cpu"], workers.Hanging, arguments=(model, tmp_path / "never"), **options
    ) as pool:
        expected = list(pool.map(inputs))
    numbers = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    random.Random(0).shuffle(numbers)
    with DevicePool(
        ["cpu"] * 2,
        workers.Hanging,
        arguments=(model, tmp_path),
        **options,
    ) as pool:
        attacker = Attacker(pool, numbers, every=count // (len(numbers) + 3))
        results = []
        for result in pool.map(iter(inputs)):
            results.append(result)
            attacker.after(len(results))
        assert len(attacker.hit) == len(numbers)
        assert len(list(tmp_path.glob("hung-*"))) == hangs
        assert sum(figure["replaced"] for figure in pool.figures()) >= len(numbers)
    assert len(results) == count
    failed = [result for result in results if isinstance(result, ItemError)]
    assert [error.index for error in failed] == poisoned
    assert {error.message for error in failed} == {"ValueError: poisoned"}
    good = [k for k in range(count) if k not in poisoned]
    assert torch.equal(
        torch.stack([results[k] for k in good]), torch.stack([expected[k] for k in good])
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_growing_batches_lose_nothing_either(ordered, full):
    """Batches of any size arrive in any order, with every item exactly once."""
    count = 20_000 if full else 2000
    with DevicePool(["cpu"] * 3, workers.square, item_timeout=1.0) as pool:
        attacker = Attacker(
            pool,
            [signal.SIGKILL] * 4 + [signal.SIGSTOP],
            every=count // 8,
        )
        seen = []
        for result in pool.map(range(count), ordered=ordered):
            seen.append(result)
            attacker.after(len(seen))
    assert (seen if ordered else sorted(seen)) == [i * i for i in range(count)]


# --- the end
# --------------------------------------------------------------------------------------------------

PROGRAM = """
import itertools, os, signal, sys, time
from tests.pool import pool_workers as workers
from trainer import DevicePool

def main(end, method):
    pool = DevicePool(["cpu"] * 3, workers.same, start_method=method)
    results = pool.map(itertools.count())
    next(results)
    while not all(worker.ready for worker in pool._engine.workers):
        time.sleep(0.01)
    jobs = [pool.submit(workers.sleep, 1000)]
    while not (idle := [w.handle.process.pid for w in pool._engine.workers if not w.queue]):
        time.sleep(0.01)
    stopped = idle[-1]
    if end != "busy":
        os.kill(stopped, signal.SIGSTOP)
    print("ready", flush=True)
    if end == "exception":
        raise ValueError("of the program")
    if end == "with":
        with pool:
            raise SystemExit(7)
    if end == "close":
        pool.close()
        print("closed", flush=True)
        time.sleep(1000)
    if end in ("kill", "interrupt", "busy"):
        for _ in results:
            pass

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def processes(mark):
    """Return all living processes that inherited the mark."""
    collected = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if alive(entry.name) and mark in (entry / "environ").read_bytes():
                collected.append(entry.name)
    return warm.without_nursery(collected)


ENDS = {
    "end": 0,
    "exception": 1,
    "with": 7,
    "interrupt": -signal.SIGINT,
    "kill": -9,
    "busy": -9,
    "close": -9,
}
SAMPLE = {"end forkserver", "interrupt forkserver", "kill spawn"}
LAST = {"exception": "ValueError: of the program", "interrupt": "KeyboardInterrupt"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("end", ENDS)
def test_no_end_leaves_a_process(end, method, tmp_path, full):
    """Workers that work, wait and are stopped exit within 5 s, and print only the program's
    messages.
    """
    if not full and f"{end} {method}" not in SAMPLE:
        pytest.skip("under --all")
    script = tmp_path / "program.py"
    mark = uuid.uuid4().hex
    script.write_text(PROGRAM)
    before = blocks()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, script, end, method]
    program = warm.Popen(command, env=environment(POOL_TEST=mark), start_new_session=True, **pipes)
    assert program.stdout.readline() == "ready\n", program.communicate()
    began = time.monotonic()
    if end == "interrupt":
        os.killpg(program.pid, signal.SIGINT)
    if end in ("kill", "busy"):
        program.kill()
    if end == "close":
        assert program.stdout.readline() == "closed\n" and time.monotonic() - began < 5
        children = processes(f"POOL_TEST={mark}".encode())
        assert len(children) <= 3, "the program, and the servers of multiprocessing"
        program.kill()
    _, errors = program.communicate(timeout=20)
    assert within(5 + began - time.monotonic(), lambda: not processes(f"POOL_TEST={mark}".encode()))
    assert program.returncode == ENDS[end]
    assert not orphaned_blocks(before)
    assert errors.splitlines()[-1] == LAST[end] if end in LAST else errors == "", errors
    assert "Process DevicePool" not in errors


def test_workers_ignore_ctrl_c():
    with DevicePool(["cpu"] * 2, workers.square) as pool:
        assert list(pool.map(range(2))) == [0, 1]
        before = pids(pool)
        for pid in before:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGHUP)
        assert list(pool.map(range(100))) == [i * i for i in range(100)]
        assert pids(pool) == before


def test_a_forgotten_pool_ends():
    pool = DevicePool(["cpu"], workers.square)
    assert list(pool.map([3])) == [9]
    [pid] = pids(pool)
    del pool
    assert within(5, lambda: not alive(pid))


def test_no_file_is_left_open():
    # Starts what stays: multiprocessing's servers.
    with DevicePool(["cpu"] * 2, workers.square) as pool:
        list(pool.map(range(10)))
    del pool
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with DevicePool(["cpu"] * 2, workers.square) as pool:
        list(pool.map(range(10)))
        os.kill(pids(pool)[0], signal.SIGKILL)
        list(pool.map(range(10)))
        assert len(os.listdir("/proc/self/fd")) > before
    del pool
    assert len(os.listdir("/proc/self/fd")) == before and threading.active_count() == threads


def test_a_closed_pool_touches_nothing_that_came_after_it(tmp_path):
    """The file descriptor that wakes the pool's thread may belong to another file later."""
    with DevicePool(["cpu"], workers.square) as pool:
        results = pool.map(range(100))
        next(results)
    files = [os.open(tmp_path / str(k), os.O_CREAT | os.O_RDWR) for k in range(20)]
    results.close(), pool.close()
    with pytest.raises(PredictionError):
        pool.submit(workers.square, 1)
    assert [os.fstat(file).st_size for file in files] == [0] * 20
    for file in files:
        os.close(file)
