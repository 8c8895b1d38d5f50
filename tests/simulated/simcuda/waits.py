"""When the host waits for a device, by the line of the project that makes it, and clocks that it
reads too early.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import trainer

HOME = str(Path(trainer.__file__).parent) + "/"


class Wait(NamedTuple):
    """A reason (synchronize, item, D2H, H2D) and who caused it."""

    kind: str
    file: str  # Path below trainer/.
    function: str
    line: int
    callers: frozenset[str]  # functions of the project further up: "training.loop.train_epoch"


class Waits:
    """Waits of a simulation.

    Attributes:
        measuring: functions that read `time.perf_counter` to time a device, which must be idle
            then.
    """

    def __init__(self) -> None:
        self.seen: Counter[Wait] = Counter()
        self.measuring: frozenset[str] = frozenset()

    def note(self, kind: str) -> None:
        frames = project_frames(sys._getframe(1))
        if frames:
            first = frames[0]
            file = first.f_code.co_filename.removeprefix(HOME)
            callers = frozenset(named(frame) for frame in frames)
            self.seen[
                Wait(
                    kind,
                    file,
                    first.f_code.co_qualname,
                    first.f_lineno,
                    callers,
                )
            ] += 1

    def inside(
        self,
        function: str,
        *without: str,
    ) -> Counter[tuple[str, str]]:
        """How often, by (kind, "file function"), below a function and not below some others."""
        actual: Counter[tuple[str, str]] = Counter()
        for wait, count in self.seen.items():
            if function in wait.callers and not wait.callers.intersection(without):
                actual[wait.kind, f"{wait.file} {wait.function}"] += count
        return actual


def named(frame: FrameType) -> str:
    """Return a name like "training.loop.train_epoch"."""
    name = frame.f_code.co_filename.removeprefix(HOME).removesuffix(".py").replace("/", ".")
    return f"{name}.{frame.f_code.co_qualname}"


def project_frames(frame: FrameType | None) -> list[FrameType]:
    """The project's frames of a stack, innermost first."""
    collected = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(HOME):
            collected.append(frame)
        frame = frame.f_back
    return collected
