"""The callback of the program that called `train`, which runs after each epoch in rank 0's process.

A callback may end the run and log values.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trainer.distributed.world import World
from trainer.errors import RecipeError, TrainerError


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
class EpochReport:
    """Report of an epoch that was trained and evaluated. Loss and metrics cover all ranks.

    Attributes:
        epoch: Number of epochs done, from 1.
        epochs: Number of epochs of the whole run.
        step: Number of steps done.
        train_loss: Mean training loss of the epoch.
        metrics: Metrics of the validation split, such as
            `{"loss": 0.31, "top1": 0.92, "top5": 0.99}`.
        best: Whether this is the best epoch so far.
        seconds: Seconds of the run so far.
    """

    epoch: int
    epochs: int
    step: int
    train_loss: float
    metrics: dict[str, float]
    best: bool
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

    def answer(self, go_on: bool) -> CallbackAnswer:
        """Close the report and return the callback's requests."""
        self._answer.go_on = go_on
        self._answer.given = True
        return self._answer


OnEpoch = Callable[[EpochReport], object]


class Callbacks:
    """Callback of a program. Rank 0 calls the function and broadcasts its requests."""

    def __init__(self, on_epoch: OnEpoch | None = None) -> None:
        self.on_epoch = on_epoch
        self.wanted = on_epoch is not None

    def connect(self, world: World) -> None:
        """Broadcast whether rank 0's program has a callback. Collective."""
        self.wanted = world.broadcast_object(self.wanted)

    def report(self, world: World, report: EpochReport) -> CallbackAnswer:
        """Call rank 0's function, if any, and return its requests on all ranks. Collective."""
        if not self.wanted:
            return CallbackAnswer()
        answer: CallbackAnswer | str = ""
        raised: Exception | None = None
        if world.is_main:
            assert self.on_epoch is not None
            try:
                returned = self.on_epoch(report)
                # Any returned value except False means that training continues.
                is_stop = isinstance(returned, bool | np.bool_) and not returned
                answer = report.answer(not is_stop)
            except Exception as error:
                raised = error
                answer = f"on_epoch raised {type(error).__name__}: {error}"
        # The callback may run for longer than `timeout`, after which a silent rank counts as lost.
        # So the ranks exchange the requests with `wait_for`, which has a longer timeout.
        shared: CallbackAnswer | str = world.wait_for(answer)[0]
        if raised is not None:
            raise raised
        if isinstance(shared, str):
            raise TrainerError(shared)
        return shared


# Callback of the program that started this rank. Without such a program, `on_epoch` is None.
received = Callbacks()
