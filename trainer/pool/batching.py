"""Batch sizes of a pool's workers, and the choice of how many items a worker accepts next.

The functions depend on measured speeds only: they use no clock and no process, so tests can run the
policy with simulated devices.
"""

from collections.abc import Mapping, Sequence

# Batches grow up to this number of seconds, and the batch size is halved after a batch that took
# more than twice as long. The time of a batch is lost if the batch has to be repeated, and at the
# end of a stream the other workers may wait that long for the last batch.
MAX_BATCH_SECONDS = 0.15
# Minimum seconds of a batch. Shorter batches grow even if larger ones are not faster per item,
# because sending many short batches costs too much.
MIN_BATCH_SECONDS = 0.005
# Maximum size of a batch in bytes, items and results together.
MAX_BATCH_BYTES = 1 << 25
# Minimum speedup, in items per second, that justifies a batch of twice the size.
MIN_GAIN = 1.05
# Maximum number of items in flight, as a multiple of the items in one batch of each worker.
WINDOW_BATCHES = 4
# Minimum ratio of speeds at which a fast device repeats a batch of a slow device of another kind.
REPEAT_RATIO = 4.0


class WorkerSpeed:
    """Measured speed of one worker, and the batch size that suits it.

    The batch size doubles until larger batches are not faster per item, or take too much time or
    memory.

    Attributes:
        size: number of items of the next batch.
        rate: items per second, smoothed; 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.size = 1
        self.rate = 0.0
        self._max_size = 1 << 30
        # Rates that were measured with the present size and are not judged yet.
        self._trials: list[float] = []
        # Rate with half the present size.
        self._rate_of_half = 0.0
        # Rate at which the present size was found to be the best; 0 while sizes are tried.
        self._settled_rate = 0.0

    def observe(self, items: int, seconds: float, size: int = 0) -> None:
        """Update the speed and the batch size with the measurement of one batch.

        Args:
            items: number of items of the batch.
            seconds: time that the batch took.
            size: size of items and results in bytes; 0 if unknown.
        """
        rate = items / max(seconds, 1e-6)
        self.rate = (self.rate + rate) / 2 if self.rate else rate
        if size:
            self._max_size = min(self._max_size, max(1, MAX_BATCH_BYTES * items // size))
        is_too_slow = seconds > 2 * MAX_BATCH_SECONDS and items > 1
        if is_too_slow or self.size > self._max_size:
            self._settle(min(self._max_size, items // 2), rate)
        elif items == self.size:
            self._judge(rate)

    def _judge(self, rate: float) -> None:
        """Decide whether to keep, double or halve the batch size, after a batch of that size."""
        if self._settled_rate:
            # The speed has changed, so that another size may be better: try sizes again.
            if not self._settled_rate / 1.5 < rate < self._settled_rate * 1.5:
                self._settled_rate = 0.0
                self._rate_of_half = 0.0
            return
        self._trials.append(rate)
        # The first batch of a size can be slow, because memory is allocated or kernels are chosen.
        if len(self._trials) < 2:
            return
        rate = max(self._trials)
        seconds = self.size / rate
        if seconds > MIN_BATCH_SECONDS and rate < MIN_GAIN * self._rate_of_half:
            self._settle(self.size // 2, self._rate_of_half)
        elif 2 * seconds > MAX_BATCH_SECONDS or 2 * self.size > self._max_size:
            self._settle(self.size, rate)
        else:
            self.size = 2 * self.size
            self._rate_of_half = rate
            self._trials = []

    def _settle(self, size: int, rate: float) -> None:
        self.size = max(1, size)
        self._settled_rate = rate
        self._trials = []

    def shrink(self, items: int) -> None:
        """Limit the batch size to half of `items` after a batch of `items` ran out of memory."""
        self._max_size = max(1, min(self._max_size, items // 2))
        self._settle(min(self.size, self._max_size), self.rate or 1.0)


class Batching:
    """Policy that computes how many items each worker receives next.

    Attributes:
        kinds: type of each worker's device, such as "cuda".
        fixed: number of items of every batch; None lets batches grow.
        speeds: measured speed of each worker.
    """

    def __init__(self, kinds: Sequence[str], batch_size: int | None) -> None:
        self.kinds = kinds
        self.fixed = batch_size
        self.speeds = [WorkerSpeed() for _ in kinds]

    def size(self, worker: int) -> int:
        """Return the present batch size of a worker."""
        return self.fixed or self.speeds[worker].size

    @property
    def window(self) -> int:
        """Maximum number of items in flight, from the caller's iterable to the caller's results."""
        return WINDOW_BATCHES * sum(map(self.size, range(len(self.speeds))))

    def expected(self, worker: int, items: int) -> float | None:
        """Predict the seconds that a worker needs for `items` items.

        A worker without a measurement is expected to be as fast as the slowest measured worker of
        the same kind of device. Returns None if no worker of that kind has been measured.
        """
        rates = [
            speed.rate
            for speed, kind in zip(self.speeds, self.kinds, strict=True)
            if kind == self.kinds[worker] and speed.rate
        ]
        rate = self.speeds[worker].rate or min(rates, default=0.0)
        return items / rate if rate else None

    def take(self, worker: int, queued: Mapping[int, int], pending: int) -> int:
        """Return how many of the pending items a worker should accept now.

        The number is chosen so that all workers finish at about the same time, if no further items
        arrive.

        Args:
            worker: index of the worker.
            queued: number of items in the queue of each worker that has no job.
            pending: number of items that no worker has.

        Returns:
            A number of items. 0 if the other workers finish the items sooner without this worker,
            or if this worker is one of several and has items but no measurement yet.
        """
        count = min(self.size(worker), pending)
        own_items = queued[worker]
        rate = self.speeds[worker].rate
        if not rate:
            # A worker without a measurement receives one batch only, unless it is the only worker.
            return 0 if own_items and len(self.speeds) > 1 else count
        rates = {
            other: self.speeds[other].rate
            for other in queued
            if other != worker and self.speeds[other].rate
        }
        if not rates:
            return count
        rate_of_others = sum(rates.values())
        remaining = pending + sum(map(queued.__getitem__, rates))
        # Choose the size with which this worker and the others finish at the same time.
        if not self.fixed:
            excess = rate * remaining - rate_of_others * own_items
            count = min(count, max(1, int(excess / (rate + rate_of_others))))
        finishes_first = (own_items + count) * rate_of_others <= rate * remaining
        if finishes_first or (not own_items and rate >= max(rates.values())):
            return count
        return 0

    def again(self, idle: int, holder: int, items: int, elapsed: float) -> bool:
        """Return whether an idle worker should repeat a batch that another worker still has.

        The pool uses the result that arrives first. Devices of one kind count as equally fast, and
        never repeat each other's batches.

        Args:
            idle: index of the idle worker.
            holder: index of the worker that has the batch.
            items: number of items of the batch.
            elapsed: seconds since `holder` started the batch; 0 if it has not.
        """
        fast = self.expected(idle, items)
        slow = self.expected(holder, items)
        if fast is None or self.kinds[idle] == self.kinds[holder]:
            return False
        if slow is None:
            return elapsed > 2 * fast
        return slow > REPEAT_RATIO * fast and abs(slow - elapsed) > 2 * fast
