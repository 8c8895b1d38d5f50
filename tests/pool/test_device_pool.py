"""The pool in its daily work: order, streams, transport, devices, jobs, and what it refuses."""

import gc
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import warm
from tests.command_line import python, within
from tests.pool import pool_workers as workers
from trainer.errors import PredictionError, RecipeError
from trainer.pool import DevicePool, ItemError, current_device
from trainer.pool.device_pool import count_threads
from trainer.pool.worker import _receive_ahead

CPUS = ["cpu"] * 3


@pytest.fixture(scope="module")
def pools():
    """Share one pool among all tests that only use it, because starting a pool takes longer than a
    test.
    """
    created = {}

    def get(worker, **options):
        key = worker, *options.items()
        if key not in created:
            created[key] = DevicePool(["cpu", "cpu"], worker, **options)
        return created[key]

    yield get
    for pool in created.values():
        pool.close()


def done(pool):
    return sum(figure["items"] for figure in pool.figures())


# --- order and streams
# --------------------------------------------------------------------------------------------------


def test_unordered_and_ordered():
    with DevicePool(CPUS, workers.sleepy_square) as pool:
        assert list(pool.map(range(100))) == [i * i for i in range(100)], (
            "in order, although workers sleep"
        )
        assert sum(pool.map(range(1000), ordered=False)) == 332833500
        assert done(pool) == 1100


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 7}, {"assign": "round_robin"}], ids=["free", "fixed", "turn"]
)
def test_any_number_of_items(options, pools):
    pool = pools(workers.square, **options)
    for count in (0, 1, 2, 7, 8, 300):
        assert list(pool.map(range(count))) == [i * i for i in range(count)]
        assert sorted(pool.map(iter(range(count)), ordered=False)) == [i * i for i in range(count)]


def test_an_endless_generator(pools):
    """Results stream while items are still made, and few are on their way."""
    drawn = []

    def numbers():
        for i in itertools.count():
            drawn.append(i)
            yield i

    results = pools(workers.square, batch_size=4).map(numbers())
    for i in range(500):
        assert next(results) == i * i
        assert len(drawn) - i <= 4 * 2 * 4 + 4
    results.close()


def test_one_slow_item_holds_a_bounded_number_of_others(pools):
    pool = pools(workers.slow_first, batch_size=2)
    drawn = []
    results = pool.map(drawn.append(i) or i for i in itertools.count())
    begin = time.monotonic()
    assert next(results) == 0
    assert time.monotonic() - begin > 0.4 and len(drawn) <= 2 * 4 * 2 + 2
    assert list(itertools.islice(results, 100)) == list(range(1, 101))


def test_a_slow_source_is_not_waited_for(pools):
    """A single item is computed at once, because the next one is not needed for its result."""
    pool = pools(workers.square)
    list(pool.map(range(2000)))  # batches have grown
    before = done(pool)

    def slowly():
        yield 3
        assert within(5, lambda: done(pool) > before)
        yield 4

    assert list(pool.map(slowly())) == [9, 16]


def test_left_iterators_do_no_harm(pools):
    pool = pools(workers.square, batch_size=3)
    first = pool.map(itertools.count())
    second = pool.map(range(100, 200))  # while the first goes on
    assert [next(first), next(second), next(first)] == [0, 10_000, 1]
    first.close()
    never = pool.map(itertools.count(5))
    assert next(never) == 25
    del never
    gc.collect()
    assert list(second) == [i * i for i in range(101, 200)]
    assert [list(pool.map([x, x])) for x in pool.map(range(3))] == [[0, 0], [1, 1], [16, 16]], (
        "maps within a map"
    )


def test_errors_of_the_iterable_are_its_own(pools):
    def late():
        yield from range(7)
        raise KeyError("mine")

    for ordered in (True, False):
        results = pools(workers.square).map(late(), ordered=ordered)
        got = []
        with pytest.raises(KeyError, match="mine"):
            for result in results:
                got.append(result)
        assert sorted(got) == [i * i for i in range(7)], "first what was given, then the error"
    assert list(pools(workers.square).map([2])) == [4]


# --- devices and batches
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_model_gives_on_many_devices_what_it_gives_on_one(count):
    """Byte for byte with a batch size: batches are cut from the stream, not by workers. Weights are
    sent, not drawn.
    """
    model = workers.Numbers().eval()
    inputs = torch.randn(100, 10)
    with torch.inference_mode():
        expected = torch.cat([model(part) for part in inputs.split(16)])
    with DevicePool(
        ["cpu"] * count,
        workers.Classifier,
        arguments=(model,),
        batch_size=16,
    ) as pool:
        assert torch.equal(torch.stack(list(pool.map(inputs))), expected)
    with DevicePool(
        ["cpu"] * count, workers.Classifier, arguments=(model,), assign="round_robin"
    ) as pool:
        torch.testing.assert_close(
            torch.stack(list(pool.map(inputs))), expected, rtol=1e-5, atol=1e-6
        )


def test_round_robin_deals_items_in_turn():
    with DevicePool(CPUS, workers.who, assign="round_robin") as pool:
        ids = list(pool.map(range(30)))
        assert len(set(ids[:3])) == 3 and ids == ids[:3] * 10
        jobs = [pool.submit(workers.who, 0) for _ in range(9)]
        assert [job.result() for job in jobs] == ids[:9]
    with DevicePool(CPUS, workers.who, assign="round_robin", batch_size=4) as pool:
        ids = list(pool.map(range(36)))
        assert len(set(ids[::4])) == 3
        assert ids == [worker for worker in ids[::4] for _ in range(4)]
        assert ids[::4] == ids[:12:4] * 3


@pytest.mark.slow
def test_a_much_slower_device_is_not_waited_for(tmp_path):
    """Idle workers repeat the items that a slow one still has, and its late answers are ignored."""
    with DevicePool(["cpu"] * 2, workers.Slow, arguments=(tmp_path, 3.0)) as pool:
        # Devices of one kind wait for each other.
        pool._engine.scheduler.batching.kinds = [
            "cuda",
            "cpu",
        ]
        begin = time.monotonic()
        for k in range(3):
            assert list(pool.map(range(k, 200))) == [i * i for i in range(k, 200)]
        assert time.monotonic() - begin < 3
        time.sleep(max(0.0, begin + 3.5 - time.monotonic()))
        assert list(pool.map(range(200))) == [i * i for i in range(200)]
        assert done(pool) == 200 + 199 + 198 + 200


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_threads_of_the_parent_hang_no_worker(method, full):
    """OpenMP and BLAS in the parent, then in the workers: what hangs after a fork."""
    if method == "spawn" and not full:
        pytest.skip("under --all")
    expected = [workers.mathematics(i) for i in range(8)]
    for _ in range(20 if full else 2):
        cpus = ["cpu"] * (4 if full else 2)
        with DevicePool(cpus, workers.mathematics, start_method=method, item_timeout=30) as pool:
            assert list(pool.map(range(8))) == pytest.approx(expected)
            assert not any(figure["replaced"] for figure in pool.figures())


def test_workers_have_the_environment_of_today(monkeypatch):
    """Although the fork server is older; and random numbers of their own, and their part of the
    cores.
    """
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [count_threads(1), count_threads(cores), count_threads(100)] == [cores, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("POOL_TEST", "1")
    monkeypatch.delenv("PATH")
    with DevicePool(["cpu"] * 2, os.getenv) as pool:
        assert list(pool.map(["POOL_TEST", "PATH"])) == ["1", None]
        assert len({job.result() for job in [pool.submit(workers.draw, 0) for _ in range(4)]}) == 4
        assert pool.submit(torch.get_num_threads).result() == 3


# --- what travels
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 3])
def test_results_own_their_memory(batch_size, pools):
    """Results stay the same after hundreds of batches, even if a worker returns its input."""
    # The item is larger than a slot.
    items = [torch.full((1 + 100_000 * (i == 200),), float(i)) for i in range(400)]
    results = list(pools(workers.same, batch_size=batch_size).map(items))
    assert all(torch.equal(one, two) for one, two in zip(items, results, strict=True))
    results[0].zero_()
    assert results[1].unique().tolist() == [1]
    doubled = list(pools(workers.doubled).map(items))
    assert [x[0].item() for x in doubled] == [2 * i for i in range(400)]
    assert items[5][0] == 5


@pytest.mark.slow
def test_memory_stays_flat(full):
    """Memory is compared after 10,000 and 1,000,000 streamed items, in the parent and in the
    workers.
    """

    def resident(pids):
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    with DevicePool(["cpu", "cpu"], workers.Sums, batch_size=500) as pool:
        pids = {os.getpid()}
        while len(pids) < 3:
            # With two jobs at a time, a worker that starts later gets one.
            jobs = [pool.submit(workers.who, pause=0.05) for _ in range(2)]
            pids |= {job.result() for job in jobs}
        items = (torch.full((20,), float(i % 100)) for i in range(1_000_000 if full else 60_000))
        for i, result in enumerate(pool.map(items)):
            if i % 5000 == 4999:
                assert result.item() == 20 * (i % 100)
                sizes.append(resident(pids))
    assert max(sizes[2:]) <= 1.05 * sizes[1]


def test_sparse_tensors_are_refused(pools):
    for worker, item in ((workers.same, torch.eye(2).to_sparse()), (workers.sparse, 1)):
        with pytest.raises(
            ItemError, match=r"item 1: .*\.to_dense\(\)" if worker is workers.same else r"to_dense"
        ):
            list(pools(worker).map([1, item]))
    with pytest.raises(RecipeError, match=r"\.to_dense\(\)"):
        DevicePool(
            ["cpu"],
            workers.Classifier,
            arguments=(torch.eye(2).to_sparse(),),
        )


def test_arguments_are_in_memory_once_and_each_workers_own():
    weights = torch.zeros(1000)
    with DevicePool(
        ["cpu", "cpu"], workers.Changing, arguments=(weights,), assign="round_robin"
    ) as pool:
        assert list(pool.map(range(6))) == [1000, 1000, 2000, 2000, 3000, 3000]
    assert weights.sum() == 0


# --- jobs
# --------------------------------------------------------------------------------------------------


def test_jobs(pools):
    pool = pools(workers.square)
    assert [pool.submit(workers.square, i).result() for i in range(5)] == [0, 1, 4, 9, 16]
    assert pool.submit(
        dict,
        [("a", 1)],
        b=torch.ones(2),
    ).result()["b"].tolist() == [1, 1]
    assert pool.submit(workers.where).result() == ("cpu", True)
    results = pool.map(range(200))
    assert next(results) == 0
    job = pool.submit(workers.square, 7)  # The submit comes in the middle of a map.
    assert job.result() == 49
    assert list(results) == [i * i for i in range(1, 200)]
    with pytest.raises(ValueError, match="no threes") as caught:
        pool.submit(workers.fail_at_three, 3).result()
    assert 'raise ValueError("no threes")' in caught.value.__notes__[0]


def test_jobs_that_cannot_travel(pools):
    pool = pools(workers.square)
    with pytest.raises(RecipeError, match=r"^current_device\(\) .*\bDevicePool\b"):
        current_device()
    with pytest.raises(RecipeError, match=r"lambda.*\bmodule\b"):
        pool.submit(lambda: 1)
    with pytest.raises(Exception, match="1 and 2") as caught:
        pool.submit(workers.throw, "picky").result()
    assert isinstance(caught.value, PredictionError)
    assert "raise Picky(1, 2)" in caught.value.__notes__[0]
    with pytest.raises(Exception, match="pickle"):
        pool.submit(workers.unpicklable, 1).result()
    running = [pool.submit(workers.sleep, 0.3) for _ in range(2)]
    waiting = pool.submit(workers.square, 2)
    assert waiting.cancel() and [job.result() for job in running] == [0.3, 0.3]


# --- what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, r"^devices=\[\] .*'cuda:0', 'cpu'"),
        ({"devices": ["cpu", "cuda:9"]}, r"\bcuda:9 .*\bdevices=\["),
        ({"devices": ["tpu:0:1"]}, r"\btpu:0:1 .*\bcpu, cuda:0\b"),
        ({"start_method": "fork"}, r"^start_method='fork' .*'forkserver'.*'spawn'"),
        ({"assign": "any"}, r"^assign='any' .*'free'.*'round_robin'"),
        ({"batch_size": 0}, r"^batch_size, .*\bDevicePool\b"),
        ({"item_timeout": 0}, r"\bitem_timeout .*\bDevicePool\b"),
        ({"worker": workers.Picky}, r"\bPicky .*__call__\(self, item\)"),
        ({"arguments": (1,)}, r"\bsquare .*functools\.partial"),
        ({"worker": lambda item: item}, r"<lambda> .*\bmodule\b"),
        (
            {"worker": workers.Classifier, "arguments": (lambda: 1,)},
            r"^Classifier .*<lambda>.*\bmodule\b",
        ),
    ],
)
def test_refused_before_anything_starts(options, message, monkeypatch):
    monkeypatch.setattr("trainer.pool.device_pool.Engine", None)
    with pytest.raises(RecipeError, match=message) as caught:
        DevicePool(**{"devices": ["cpu"], "worker": workers.square, **options})
    assert "\n" not in str(caught.value)


def test_a_closed_pool():
    pool = DevicePool(["cpu"], workers.square)
    results = pool.map(itertools.count())
    job = pool.submit(workers.sleep, 100)
    pool.close()
    pool.close()
    with pytest.raises(PredictionError, match="closed"):
        job.result(timeout=5)
    for use in (
        lambda: next(results),
        lambda: pool.map([1]),
        lambda: pool.submit(workers.square, 1),
    ):
        with pytest.raises(PredictionError, match="closed"):
            use()


def test_a_forked_copy_has_no_workers(pools):
    pool = pools(workers.square)
    child = os.fork()
    if not child:
        try:
            list(pool.map([1]))
        except RecipeError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# --- scripts
# --------------------------------------------------------------------------------------------------

SCRIPT = """
from trainer import DevicePool

class Square:
    def __call__(self, item):
        return item * item

def cube(item):
    return item ** 3

{guard}
    for method in ("forkserver", "spawn"):
        with DevicePool(["cpu"], Square, start_method=method) as pool:
            print(list(pool.map(range(4))), pool.submit(cube, 3).result())
"""


@pytest.mark.full(cases=["False"])
@pytest.mark.parametrize(
    "guarded", [pytest.param(guarded, marks=pytest.mark.slow) for guarded in (True, False)]
)
def test_workers_of_a_script(guarded, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(guard='if __name__ == "__main__":' if guarded else "if True:"))
    completed = python(path, start=warm.run)
    if guarded:
        assert completed.stdout == "[0, 1, 4, 9] 27\n" * 2 and completed.stderr == ""
    else:
        assert (
            completed.returncode == 1 and completed.stdout == "" and "__main__" in completed.stderr
        )
        last_line = completed.stderr.splitlines()[-1]
        assert last_line.startswith("trainer.errors.PredictionError: ") and "worker 0" in last_line


# --- CUDA
# --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_outputs_leave_the_gpu():
    model = workers.Numbers().eval()
    inputs = torch.randn(100, 10)
    with torch.inference_mode():
        expected = model(inputs)
    with DevicePool(["cuda:0", "cpu"], workers.Classifier, arguments=(model,)) as pool:
        results = list(pool.map(inputs))
        assert {result.device.type for result in results} == {"cpu"}
        torch.testing.assert_close(torch.stack(results), expected, rtol=1e-3, atol=1e-3)
    with DevicePool(["cuda:0", "cuda:0"], workers.square, assign="round_robin") as pool:
        assert pool.submit(workers.where).result() == ("cuda:0", True)
        assert pool.submit(torch.cuda.current_device).result() == 0
        result = pool.submit(workers.on_device, (3,)).result()
        assert result["a"].device.type == "cpu"
        assert result["a"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_can_no_longer_listen_ends():
    """The parent replaces the worker. If the worker waited instead, nobody would notice."""

    def arrived():
        yield "a batch"
        raise OSError("no memory to map it")

    caller = SimpleNamespace(device=torch.device("cpu"))
    assert list(_receive_ahead(arrived(), caller)) == ["a batch"]
