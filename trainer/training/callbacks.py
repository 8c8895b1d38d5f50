"""Callbacks of the program that called `train`: after steps, evaluations and epochs.

They run in rank 0's process. A callback may end the run and log values.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.distributed.world import World
from trainer.errors import RecipeError, TrainerError, describe


@dataclass
class CallbackAnswer:
    """The requests of a callback: whether training continues, and values to log.

    Attributes:
        go_on: Whether training continues.
        logged: Logged values by name.
        given: Whether the callback has returned. If so, `EpochReport.log` raises an error.
    """

    go_on: bool = True
    logged: dict[str, float] = field(default_factory=dict)
    given: bool = False


@dataclass(frozen=True)
class ProgramReport:
    """Report to a callback, which may log values with it. Losses and metrics cover all ranks.

    Attributes:
        epoch: Number of the epoch, from 1.
        step: Number of steps done.
        seconds: Seconds of the run so far.
    """

    epoch: int
    step: int
    seconds: float
    _answer: CallbackAnswer = field(
        default_factory=CallbackAnswer, init=False, repr=False, compare=False
    )

    def log(self, name: str, value: float) -> None:
        """Log a value of your own.

        The value is written as `logged/<name>` at this step to those of TensorBoard, W&B and
        MLflow that the recipe enables. The last value is stored as `logged[name]` in `result.json`.

        Args:
            name: A name of letters, digits and _ . - /
            value: A number, or a tensor or array with one element.

        Raises:
            RecipeError: The name or value is invalid, or the callback has returned already.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[\w.\-/]+", name):
            raise RecipeError(f"log({name!r}, ...): a name consists of letters, digits and _ . - /")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise RecipeError(
                f"log({name!r}, ...): a value is one number, not {type(value).__name__}"
            ) from None
        if self._answer.given:
            raise RecipeError("a report accepts log() while its callback runs, not later")
        self._answer.logged[name] = number


@dataclass(frozen=True)
class StepReport(ProgramReport):
    """Report of a logged step: every `logging.every_steps`-th one, and the last of each epoch.

    Attributes:
        loss: Mean training loss of the steps since the last logged step.
        lr: Learning rate of the step.
        samples_per_sec: Images per second of all devices; None during warm-up.
    """

    loss: float
    lr: float
    samples_per_sec: float | None


@dataclass(frozen=True)
class EvaluationReport(ProgramReport):
    """Report of an evaluation, at the end of an epoch or after `evaluate.every_steps` steps.

    Attributes:
        metrics: Metrics of the validation split, such as
            `{"loss": 0.31, "top1": 0.92, "top5": 0.99}`.
        best: Whether this is the best evaluation so far.
    """

    metrics: dict[str, float]
    best: bool


@dataclass(frozen=True)
class EpochReport(EvaluationReport):
    """Report of an epoch that was trained and evaluated.

    Attributes:
        epochs: Number of epochs of the whole run.
        train_loss: Mean training loss of the epoch.
    """

    epochs: int
    train_loss: float


# Type of the report to each callback.
REPORTS: dict[str, type[ProgramReport]] = {
    "on_step": StepReport,
    "on_evaluation": EvaluationReport,
    "on_epoch": EpochReport,
}
OnEpoch = Callable[[EpochReport], object]
OnStep = Callable[[StepReport], object]
OnEvaluation = Callable[[EvaluationReport], object]


class Callbacks:
    """Callbacks of a program. Rank 0 calls the functions and broadcasts their requests."""

    def __init__(self, **functions: Callable[[Any], object] | None) -> None:
        """Store the functions `on_epoch`, `on_step` and `on_evaluation`; None for no function."""
        self.functions = {}
        for name, function in functions.items():
            if function is not None:
                self.functions[name] = function
        self.wanted = tuple(self.functions)

    def connect(self, world: World) -> None:
        """Broadcast which callbacks rank 0's program has. Collective."""
        self.wanted = world.broadcast_object(self.wanted)

    def report(self, world: World, name: str, report: ProgramReport) -> CallbackAnswer:
        """Call rank 0's function `name`, if any. Return its requests on all ranks. Collective."""
        if name not in self.wanted:
            return CallbackAnswer()
        answer: CallbackAnswer | str = ""
        raised: Exception | None = None
        if world.is_main:
            try:
                returned = self.functions[name](report)
                # Any returned value except False means that training continues.
                is_stop = isinstance(returned, bool | np.bool_) and not returned
                answer = report._answer
                answer.go_on = not is_stop
                answer.given = True
            except Exception as error:
                raised = error
                answer = f"{name} raised {describe(error)}"
        # The callback may run for longer than `timeout`, after which a silent rank counts as lost.
        # So the ranks exchange the requests with `wait_for`, which has a longer timeout.
        shared: CallbackAnswer | str = world.wait_for(answer)[0]
        if raised is not None:
            raise raised
        if isinstance(shared, str):
            raise TrainerError(shared)
        return shared


# Callbacks of the program that started this rank; none without such a program.
received = Callbacks()
