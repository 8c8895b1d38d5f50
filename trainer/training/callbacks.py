"""Callbacks of the program that called `train`, after epochs and at logged steps; they run in rank 0's process.

Each may end the run, log values and change the learning rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trainer.errors import RecipeError, TrainerError
from trainer.processes.world import World


@dataclass
class CallbackAnswer:
    """What a callback asks for: whether training goes on, values to log, and a factor of the learning rate."""

    go_on: bool = True
    logged: dict[str, float] = field(default_factory=dict)
    lr_factor: float = 1.0
    given: bool = False  # then nothing more can be asked for


@dataclass(frozen=True)
class CallbackReport:
    """What a callback is called with. In a run of several ranks it is called once, with the figures of all of them."""

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
        self._unanswered().logged[name] = number

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate by this from the next step on, for the rest of the run.

        The schedule goes on; several factors multiply. A checkpoint keeps them, so a continued run goes on with them.

        Args:
            factor: above 0; 0.1 is a tenth.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise RecipeError(f"scale_lr({factor}): a factor is a number above 0")
        self._unanswered().lr_factor *= float(factor)

    def answer(self, go_on: bool) -> CallbackAnswer:
        """What was asked for; nothing can be afterwards."""
        self._answer.go_on, self._answer.given = go_on, True
        return self._answer

    def _unanswered(self) -> CallbackAnswer:
        if self._answer.given:
            raise RecipeError("a report takes log() and scale_lr() while its callback runs, not later")
        return self._answer


@dataclass(frozen=True)
class StepReport(CallbackReport):
    """A logged step.

    Attributes:
        step: steps done; total_steps: of the whole run.
        epoch: the one that it belongs to, from 1.
        loss: mean training loss since the last logged step.
        lr: learning rate.
        samples_per_sec: images a second over all devices since then; None while the run warms up.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    lr: float
    samples_per_sec: float | None


@dataclass(frozen=True)
class EpochReport(CallbackReport):
    """An epoch that is over and evaluated.

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


OnEpoch = Callable[[EpochReport], object]
OnStep = Callable[[StepReport], object]


class Callbacks:
    """A program's functions. Rank 0 calls them and broadcasts what they ask for."""

    def __init__(self, on_epoch: OnEpoch | None = None, on_step: OnStep | None = None) -> None:
        self.functions = {"on_epoch": on_epoch, "on_step": on_step}
        self.wanted = [name for name, function in self.functions.items() if function is not None]

    def connect(self, world: World) -> None:
        """Let every rank know which functions rank 0's program has. Collective."""
        self.wanted = world.broadcast_object(self.wanted)

    def report(self, world: World, report: EpochReport | StepReport) -> CallbackAnswer:
        """Call rank 0's function for this report, if it has one; what it asks for, on all ranks. Collective."""
        name = "on_epoch" if isinstance(report, EpochReport) else "on_step"
        if name not in self.wanted:
            return CallbackAnswer()
        answer: CallbackAnswer | str = ""
        raised: Exception | None = None
        if world.is_main:
            try:
                function: Callable[..., object] | None = self.functions[name]
                assert function is not None
                returned = function(report)  # whatever it returns but False means to go on
                answer = report.answer(not isinstance(returned, bool | np.bool_) or bool(returned))
            except Exception as error:
                raised, answer = error, f"{name} raised {type(error).__name__}: {error}"
        shared: CallbackAnswer | str = world.broadcast_object(answer)
        if raised is not None:
            raise raised
        if isinstance(shared, str):
            raise TrainerError(shared)
        return shared


received = Callbacks()  # in a rank: those of the program that started it


def of_caller() -> Callbacks:
    """Those of the program that started this rank; none elsewhere."""
    return received
