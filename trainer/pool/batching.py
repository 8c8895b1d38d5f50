"""How many items a device gets at a time: a pure function of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LONGEST = 0.15  # seconds that a batch should take at most: what a lost one costs, and what others may have to wait
SHORTEST = 0.005  # seconds under which the way to and fro costs too much
BYTES = 1 << 25  # of a batch, items and results together
PAYS = 1.05  # how much faster per item a batch of twice the size must be
WINDOW = 4  # times all workers' batches: the items that may be on their way
FAR = 4.0  # times faster: then a device does again what a slow one of another kind still holds


class Pace:
    """One worker's speed, and the size of its batches, which doubles while that pays."""

    def __init__(self) -> None:
        self.size = 1
        self.rate = 0.0  # items a second, smoothed; 0: not measured
        self._cap = 1 << 30
        self._trials: list[float] = []  # rates at this size, until it is judged
        self._before = 0.0  # rate at half the size
        self._settled = 0.0  # rate at which the size was found best

    def observe(self, items: int, seconds: float, size: int = 0) -> None:
        """A batch was done: so many items, in seconds, of `size` bytes."""
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
            if not self._settled / 1.5 < rate < self._settled * 1.5:  # it has become another: try again
                self._settled, self._before, self._trials = 0.0, 0.0, []
            return
        self._trials.append(rate)
        if len(self._trials) < 2:  # the first batch of a size may have been slow for being the first
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
        """A batch of so many items did not fit in memory."""
        self._cap = max(1, min(self._cap, items // 2))
        self._settle(min(self.size, self._cap), self.rate or 1.0)


class Batching:
    """Which worker gets how many items next.

    Args:
        kinds: each worker's kind of device ("cuda", "cpu").
        batch_size: of all batches; None lets them grow.
    """

    def __init__(self, kinds: Sequence[str], batch_size: int | None) -> None:
        self.kinds, self.fixed = kinds, batch_size
        self.paces = [Pace() for _ in kinds]

    def size(self, worker: int) -> int:
        """Items of the worker's batches at present."""
        return self.fixed or self.paces[worker].size

    @property
    def window(self) -> int:
        """Items that may be on their way at once, from the caller's iterable to the caller."""
        return WINDOW * sum(self.size(worker) for worker in range(len(self.paces)))

    def observe(self, worker: int, items: int, seconds: float, size: int = 0) -> None:
        self.paces[worker].observe(items, seconds, size)

    def shrink(self, worker: int, items: int) -> None:
        self.paces[worker].shrink(items)

    def expected(self, worker: int, items: int) -> float | None:
        """Seconds that so many items should take, or None before a measurement of it or of another of its kind."""
        alike = [pace.rate for pace, kind in zip(self.paces, self.kinds, strict=True) if kind == self.kinds[worker]]
        rate = self.paces[worker].rate or min(filter(None, alike), default=0.0)
        return items / rate if rate else None

    def take(self, worker: int, held: Mapping[int, int], pending: int) -> int:
        """How many of the pending items a worker should take now; 0: the others are done with them sooner.

        Args:
            held: items that each worker at work holds already.
            pending: items that wait. More may come; what is taken must pay even if none does.
        """
        wanted, mine = min(self.size(worker), pending), held[worker]
        rate = self.paces[worker].rate
        if not rate:
            return 0 if mine and len(self.paces) > 1 else wanted  # one batch, to learn, unless nobody else is there
        rates = {other: self.paces[other].rate for other in held if other != worker and self.paces[other].rate}
        if not rates:
            return wanted
        total, ahead = sum(rates.values()), pending + sum(held[other] for other in rates)
        if not self.fixed:  # all end at the same time
            wanted = min(wanted, max(1, int((rate * ahead - total * mine) / (rate + total))))
        pays = (mine + wanted) * total <= rate * ahead
        return wanted if pays or (not mine and rate >= max(rates.values())) else 0

    def again(self, idle: int, holder: int, items: int, elapsed: float) -> bool:
        """Whether an idle worker should do again what another has held for some seconds: the first answer counts.

        Never between devices of one kind, where it would be work for nothing.
        """
        fast, slow = self.expected(idle, items), self.expected(holder, items)
        if fast is None or self.kinds[idle] == self.kinds[holder]:
            return False
        if slow is None:
            return elapsed > 2 * fast
        return slow > FAR * fast and abs(slow - elapsed) > 2 * fast
