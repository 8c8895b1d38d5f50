"""What a check answers, and what a check is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainer.commands.prove.trip import Trip

Part = Literal["right", "fast"]
Status = Literal["right", "wrong", "measured", "not here", "left out"]


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
        status: "right" and "wrong" of what was checked, "measured" of a figure without a bound, "not here" of what
            this machine or this torch cannot do, "left out" for want of time.
        line: for people.
        todo: what to type where something is wrong.
        figures: for scripts, as `proof.json` has them.
    """

    status: Status
    line: str
    todo: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: by which its outcome is kept.
        title: for people.
        seconds: that it takes, about, on a machine that nothing else uses.
        run: does it.
        rank: what is kept when time is short: 0 before 1 before 2.
    """

    name: str
    part: Part
    title: str
    seconds: float
    run: Callable[[Trip], Outcome]
    rank: int = 0


def right(line: str, **figures: Any) -> Outcome:
    return Outcome("right", line, figures=figures)


def wrong(line: str, todo: str, **figures: Any) -> Outcome:
    return Outcome("wrong", line, todo, figures)


def measured(line: str, **figures: Any) -> Outcome:
    return Outcome("measured", line, figures=figures)
