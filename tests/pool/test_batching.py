"""The policy of batches, played with simulated devices: no clock, no process."""

import heapq
import time
from concurrent.futures import Future

import pytest

from trainer.pool.batching import (
    MAX_BATCH_BYTES,
    MAX_BATCH_SECONDS,
    MIN_BATCH_SECONDS,
    Batching,
    WorkerSpeed,
)
from trainer.pool.scheduler import LINGER_SECONDS, Job, PoolWorker, Scheduler
from trainer.pool.stream import Stream


def device(overhead, per_item, best=1 << 30):
    """Seconds of a batch: linear, and twice as much an item beyond what fits."""
    return lambda count: overhead + per_item * (min(count, best) + 2 * max(0, count - best))


TICK = 0.02
FAST = device(0.002, 0.0005)  # 64: 34 ms
SLOW = device(0.0, 0.1)
SLOWEST = device(0.0, 3.0)


def play(costs, kinds, items, batch_size=None, depth=2, endless=False):
    """Run the policy over a stream like the engine does.

    Returns:
        Seconds until all are done; items done first by each device; how long the oldest item was
        ever waited for.
    """
    policy = Batching(kinds, batch_size)
    queues = [[] for _ in costs]  # (first, count, began or None)
    finished = set()
    counts = [0] * len(costs)
    events = []
    now = 0.0
    read = 0
    oldest = 0
    since = 0.0
    longest = 0.0
    pending = []

    def begin(worker):
        first, count, _ = queues[worker][0]
        queues[worker][0] = (first, count, now)
        heapq.heappush(events, (now + costs[worker](count), worker))

    def give(worker, first, count):
        queues[worker].append((first, count, None))
        if len(queues[worker]) == 1:
            begin(worker)

    while oldest < items:
        order = sorted(range(len(costs)), key=lambda worker: -policy.speeds[worker].rate)
        fed = True
        while fed:
            fed = False
            while read < items and read - oldest < policy.window:
                pending.append(read)
                read += 1
            for level in range(depth):
                for worker in order:
                    while len(queues[worker]) == level:
                        kept = {
                            other: sum(b[1] for b in queues[other]) for other in range(len(costs))
                        }
                        size = policy.size(worker)
                        enough = pending and (
                            not batch_size or len(pending) >= size or read == items
                        )
                        count = policy.take(worker, kept, len(pending)) if enough else 0
                        if count:
                            give(worker, pending[0], count)
                            del pending[:count]
                            fed = True
                            continue
                        again = [
                            batch[:2]
                            for other in range(len(costs))
                            for batch in queues[other]
                            if other != worker
                            and not level
                            and batch[0] not in finished
                            and all(batch[0] != own[0] for own in queues[worker])
                            and policy.again(
                                worker,
                                other,
                                batch[1],
                                now - batch[2] if batch[2] is not None else 0.0,
                            )
                        ]
                        if not again:
                            break
                        give(worker, *again[0])
                        fed = True
        if not events:
            raise AssertionError(f"all devices are idle, and {items - oldest} items wait")
        if events[0][0] > now + TICK:  # the engine looks again
            now += TICK
            continue
        now, worker = heapq.heappop(events)
        first, count, began = queues[worker].pop(0)
        policy.speeds[worker].observe(count, now - began)
        if queues[worker]:
            begin(worker)
        if first not in finished:
            counts[worker] += count
        finished.update(range(first, first + count))
        before = oldest
        while oldest in finished:
            oldest += 1
        if oldest > before:
            since = now
        longest = max(longest, now - since)
    return now, counts, longest


@pytest.mark.parametrize("batch_size", [None, 8, 64])
@pytest.mark.parametrize("items", [1, 5, 50, 5000])
@pytest.mark.parametrize(
    "second", [FAST, device(0.004, 0.001), SLOW, SLOWEST], ids=["same", "half", "slow", "slowest"]
)
def test_a_second_device_never_slows_down(second, items, batch_size):
    """Devices `cuda:0,cpu` finish no later than `cuda:0` alone, for every speed of the CPU and
    every number of items, except for one batch that is repeated.
    """
    alone, _, _ = play([FAST], ["cuda"], items, batch_size)
    both, counts, longest = play([FAST, second], ["cuda", "cpu"], items, batch_size)
    batch = FAST(batch_size or 256)
    assert both <= 1.02 * alone + 2 * batch
    assert sum(counts) == items
    assert longest <= 6 * batch + 0.3, "no slow device holds the others up"


@pytest.mark.parametrize("batch_size", [None, 32])
def test_equal_devices_share_equally(batch_size):
    for count in (2, 3, 4):
        alone, _, _ = play([FAST], ["cpu"], 20_000, batch_size)
        together, counts, _ = play([FAST] * count, ["cpu"] * count, 20_000, batch_size)
        assert together <= 1.05 * alone / count
        assert max(counts) <= 1.1 * min(counts)


@pytest.mark.parametrize(
    ("cost", "share"), [(device(0.004, 0.001), 0.333), (device(0.02, 0.005), 0.091)]
)
def test_a_slower_device_helps_with_what_it_can(cost, share):
    alone, _, _ = play([FAST], ["cuda"], 20_000)
    both, counts, _ = play([FAST, cost], ["cuda", "cpu"], 20_000)
    assert counts[1] / 20_000 == pytest.approx(share, rel=0.25)
    assert both <= alone * (1 - 0.7 * share)


def paced(cost, batches=60):
    pace = WorkerSpeed()
    for _ in range(batches):
        pace.observe(pace.size, cost(pace.size))
    return pace


@pytest.mark.parametrize(
    ("cost", "least", "most"),
    [
        (device(0.0, 1.0), 1, 1),  # an item takes too long for two
        (device(0.0, 0.01), 1, 2),  # no gain from more, and long enough
        (device(0.0001, 1e-6), 2048, 8192),  # tiny: as many as take some milliseconds
        (device(0.004, 0.0005), 64, 256),  # while the overhead shows
        (device(0.004, 0.0005, best=32), 32, 32),  # beyond 32 it gets slower
    ],
)
def test_batches_grow_to_what_pays(cost, least, most):
    pace = paced(cost)
    assert least <= pace.size <= most
    assert cost(pace.size) <= MAX_BATCH_SECONDS or pace.size == 1
    best = max(
        count / cost(count)
        for count in (1 << k for k in range(14))
        if cost(count) <= MAX_BATCH_SECONDS or count == 1
    )
    assert pace.size / cost(pace.size) >= 0.75 * best or cost(pace.size) >= MIN_BATCH_SECONDS


def test_batches_follow_the_speed():
    pace = paced(device(0.002, 0.0005))
    grown = pace.size
    for _ in range(20):
        pace.observe(pace.size, 0.05 * pace.size)
    assert 0.05 * pace.size <= 2 * MAX_BATCH_SECONDS and pace.size < grown
    for _ in range(60):
        pace.observe(pace.size, 0.002 + 0.0005 * pace.size)
    assert pace.size >= grown / 2
    assert pace.rate == pytest.approx(pace.size / (0.002 + 0.0005 * pace.size), rel=0.05)


def test_batches_are_bounded_by_memory():
    pace = WorkerSpeed()
    for _ in range(40):
        pace.observe(pace.size, 1e-6, size=pace.size * (MAX_BATCH_BYTES // 10))
    assert pace.size == 8
    pace.observe(1, 1e-6, size=2 * MAX_BATCH_BYTES)
    assert pace.size == 1


class Taken:
    """A stand-in for a worker."""

    def __init__(self):
        self.batches = []

    def send(self, kind, packed):
        self.batches.append(packed.open())


def scheduled(*workers):
    """A scheduler of workers of these (size, rate), and a stream."""
    policy = Batching(["cpu"] * len(workers), None)
    for pace, (size, rate) in zip(policy.speeds, workers, strict=True):
        pace.size = size
        pace.rate = rate
    scheduler = Scheduler(
        [PoolWorker(n, "cpu", Taken(), ready=True) for n in range(len(workers))],
        policy,
        False,
        retries=3,
    )
    stream = Stream(True, scheduler.lanes(), lambda: None, policy.window, None)
    scheduler.streams.append(stream)
    return scheduler, stream, [worker.handle.batches for worker in scheduler.workers]


def test_a_lone_item_is_not_forgotten():
    """The fast worker waits a little for more, the slow one leaves it to the fast: it must be
    looked at again.
    """
    scheduler, stream, (fast, slow) = scheduled((1024, 1e6), (1, 1e4))
    stream.put(0, "alone")
    scheduler.hand_out()
    assert stream.due is not None and not fast and not slow
    time.sleep(LINGER_SECONDS)
    scheduler.hand_out()
    assert fast == [["alone"]] and stream.due is None


def test_a_worker_with_a_job_is_not_waited_for():
    scheduler, stream, (fast, slow) = scheduled((1, 100.1), (1, 100.0))
    scheduler.workers[0].queue.append(Job(Future(), None, 0))
    stream.put(0, "item")
    stream.waiting = True
    scheduler.hand_out()
    assert slow == [["item"]] and not fast
