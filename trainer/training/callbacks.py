"""The callback of the program that called `train`, after each epoch, in rank 0's process.

It may end the run and log values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trainer.errors import RecipeError, TrainerError
from trainer.processes.world import World


@dataclass
class CallbackAnswer:
    """What a callback asks for: whether training goes on, and values to log."""

    go_on: bool = True
    logged: dict[str, float] = field(default_factory=dict)
    given: bool = False  # then nothing more can be asked for


@dataclass(frozen=True)
class EpochReport:
    """An epoch that is over and evaluated. In a run of several ranks it has the figures of all of them.

    Attributes:
        epoch: epochs done, from 1; epochs: of the whole run.
        step: steps done.
        train_loss: mean over the epoch.
        metrics: of the held-out samples, as in {"loss": 0.31, "top1": 0.92, "top5": 0.99}.
        best: whether no epoch before was better.
        seconds: of the run so far.
    """

    epoch: int
    epochs: int
    step: int
    train_loss: float
    metrics: dict[str, float]
    best: bool
    seconds: float
    _answer: CallbackAnswer = field(default_factory=CallbackAnswer, init=False, repr=False, compare=False)

    def log(self, name: str, value: float) -> None:
        """Log a figure of your own.

        It goes to TensorBoard, and to W&B and MLflow where they are asked for, as `logged/<name>` at this step. Its
        last value is `logged[name]` of `result.json`.

        Args:
            name: of letters, digits and _ . - /
            value: a number, or a tensor or array of one.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[\w.\-/]+", name):
            raise RecipeError(f"log({name!r}, ...): a name consists of letters, digits and _ . - /")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise RecipeError(f"log({name!r}, ...): a value is one number, not {type(value).__name__}") from None
        if self._answer.given:
            raise RecipeError("a report takes log() while its callback runs, not later")
        self._answer.logged[name] = number

    def answer(self, go_on: bool) -> CallbackAnswer:
        """What was asked for; nothing can be afterwards."""
        self._answer.go_on, self._answer.given = go_on, True
        return self._answer


OnEpoch = Callable[[EpochReport], object]


class Callbacks:
    """A program's function. Rank 0 calls it and broadcasts what it asks for."""

    def __init__(self, on_epoch: OnEpoch | None = None) -> None:
        self.on_epoch, self.wanted = on_epoch, on_epoch is not None

    def connect(self, world: World) -> None:
        """Let every rank know whether rank 0's program has one. Collective."""
        self.wanted = world.broadcast_object(self.wanted)

    def report(self, world: World, report: EpochReport) -> CallbackAnswer:
        """Call rank 0's function, if it has one; what it asks for, on all ranks. Collective."""
        if not self.wanted:
            return CallbackAnswer()
        answer: CallbackAnswer | str = ""
        raised: Exception | None = None
        if world.is_main:
            assert self.on_epoch is not None
            try:
                returned = self.on_epoch(report)  # whatever it returns but False means to go on
                answer = report.answer(not isinstance(returned, bool | np.bool_) or bool(returned))
            except Exception as error:
                raised, answer = error, f"on_epoch raised {type(error).__name__}: {error}"
        shared: CallbackAnswer | str = world.broadcast_object(answer)
        if raised is not None:
            raise raised
        if isinstance(shared, str):
            raise TrainerError(shared)
        return shared


received = Callbacks()  # in a rank: that of the program that started it; elsewhere none
