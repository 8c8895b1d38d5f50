"""Timing of eager steps and CUDA graph replays, from which graphs=auto chooses the faster kind."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from trainer.devices import cuda_graphs

# Number of steps of each kind that are timed.
TIMED_STEPS = 12
# Steps are replayed only if replays are faster than eager steps by at least this factor. With less
# gain, the memory of the graphs is not worth it, and steps stay eager.
MIN_SPEEDUP = 1.03


class StepSeconds(NamedTuple):
    """Measured times of both kinds of steps.

    Attributes:
        eager: Median seconds of an eager step.
        replayed: Median seconds of a replayed step.
    """

    eager: float
    replayed: float


class StepTuner:
    """Timer of eager steps and of replayed steps in the same run."""

    def __init__(self) -> None:
        # Events at the ends of eager steps and of replayed steps.
        self._eager_ends: list[Any] = []
        self._replay_ends: list[Any] = []

    def add(self, end: Any, is_replay: bool) -> StepSeconds | None:
        """Note the end of a step.

        Args:
            end: Event from `StepRecorder.record_event`.
            is_replay: Whether the step was replayed.

        Returns:
            The median seconds of both kinds of steps, or None until enough replays are timed. If
            there are enough, the host waits for the device.
        """
        ends = self._replay_ends if is_replay else self._eager_ends
        ends.append(end)
        if not is_replay or len(ends) <= TIMED_STEPS + 1:
            return None
        return StepSeconds(_median_seconds(self._eager_ends), _median_seconds(self._replay_ends))


def _median_seconds(ends: Sequence[Any]) -> float:
    """Return the median seconds of the last TIMED_STEPS steps, from the events at their ends."""
    recent = pairwise(ends[-TIMED_STEPS - 1 :])
    return median(cuda_graphs.seconds_between(start, end) for start, end in recent)
