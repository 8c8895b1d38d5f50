"""How many items a worker gets at a time: a pure function of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LONGEST = 0.15  # seconds of a batch, at most: a lost one costs as much, and others may have to wait for it
SHORTEST = 0.005  # seconds of a batch, below which sending it costs too much
BYTES = 1 << 25  # of a batch, items and results together
PAYS = 1.05  # how much faster per item a batch of twice the size must be
WINDOW = 4  # times all workers' batches: the items that may be in flight
FAR = 4.0  # times faster: a device then repeats what a slow one of another kind still holds


class WorkerSpeed:
    """One worker's speed, and the size of its batches, which doubles while that makes it faster."""

    def __init__(self) -> None:
        self.size = 1
        self.rate = 0.0  # items a second, smoothed; 0: not measured
        self._cap = 1 << 30
        self._trials: list[float] = []  # rates at this size, until it is judged
        self._before = 0.0  # rate at half the size
        self._settled = 0.0  # rate at which the size was found best

    def observe(self, items: int, seconds: float, size: int = 0) -> None:
        """Count a batch of so many items and `size` bytes, which took seconds."""
        rate = items / max(seconds, 1e-6)
        self.rate = (self.rate + rate) / 2 if self.rate else rate
        if size:
            self._cap = min(self._cap, max(1, BYTES * items // size))
        if (seconds > 2 * LONGEST and items > 1) or self.size > self._cap:
            self._settle(min(self._cap, max(1, items // 2)), rate)
        elif items == self.size:
            self._judge(rate)

    def _judge(self, rate: float) -> None:
        if self._settled:
            if not self._settled / 1.5 < rate < self._settled * 1.5:  # its speed has changed: try sizes again
                self._settled, self._before, self._trials = 0.0, 0.0, []
            return
        self._trials.append(rate)
        if len(self._trials) < 2:  # the first batch of a size may be slow
            return
        rate = max(self._trials)
        seconds = self.size / rate
        if seconds > SHORTEST and rate < PAYS * self._before:
            self._settle(self.size // 2, self._before)
        elif 2 * seconds > LONGEST or 2 * self.size > self._cap:
            self._settle(self.size, rate)
        else:
            self.size, self._before, self._trials = 2 * self.size, rate, []

    def _settle(self, size: int, rate: float) -> None:
        self.size, self._settled, self._trials = max(1, size), rate, []

    def shrink(self, items: int) -> None:
        """Halve the size: a batch of so many items ran out of memory."""
        self._cap = max(1, min(self._cap, items // 2))
        self._settle(min(self.size, self._cap), self.rate or 1.0)


class Batching:
    """Which worker gets how many items next, by the workers' kinds of device; `batch_size` None lets batches grow."""

    def __init__(self, kinds: Sequence[str], batch_size: int | None) -> None:
        self.kinds, self.fixed = kinds, batch_size
        self.speeds = [WorkerSpeed() for _ in kinds]

    def size(self, worker: int) -> int:
        """Items of the worker's batches at present."""
        return self.fixed or self.speeds[worker].size

    @property
    def window(self) -> int:
        """Items that may be in flight, from the caller's iterable to the caller."""
        return WINDOW * sum(self.size(worker) for worker in range(len(self.speeds)))

    def expected(self, worker: int, items: int) -> float | None:
        """Seconds that so many items should take, or None before a measurement of it or of another of its kind."""
        alike = [speed.rate for speed, kind in zip(self.speeds, self.kinds, strict=True) if kind == self.kinds[worker]]
        rate = self.speeds[worker].rate or min(filter(None, alike), default=0.0)
        return items / rate if rate else None

    def take(self, worker: int, held: Mapping[int, int], pending: int) -> int:
        """How many of the pending items a worker should take now; 0: the others finish them sooner.

        `held` are the items that each busy worker already has. More may come, but none are counted on.
        """
        wanted, mine = min(self.size(worker), pending), held[worker]
        rate = self.speeds[worker].rate
        if not rate:
            return 0 if mine and len(self.speeds) > 1 else wanted  # one batch, to learn, unless nobody else is there
        rates = {other: self.speeds[other].rate for other in held if other != worker and self.speeds[other].rate}
        if not rates:
            return wanted
        total, ahead = sum(rates.values()), pending + sum(held[other] for other in rates)
        if not self.fixed:  # all end at the same time
            wanted = min(wanted, max(1, int((rate * ahead - total * mine) / (rate + total))))
        pays = (mine + wanted) * total <= rate * ahead
        return wanted if pays or (not mine and rate >= max(rates.values())) else 0

    def again(self, idle: int, holder: int, items: int, elapsed: float) -> bool:
        """Whether an idle worker should repeat what another has held for some seconds: the first answer counts.

        Never between devices of one kind, which are as fast.
        """
        fast, slow = self.expected(idle, items), self.expected(holder, items)
        if fast is None or self.kinds[idle] == self.kinds[holder]:
            return False
        if slow is None:
            return elapsed > 2 * fast
        return slow > FAR * fast and abs(slow - elapsed) > 2 * fast
