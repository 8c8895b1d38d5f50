"""Callbacks of the program that called `train`, after epochs and at logged steps.

Each may end the run, log values and change the learning rate.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from trainer.errors import RecipeError, TrainerError
from trainer.launch import hosted
from trainer.processes.world import World


@dataclass(frozen=True)
class CallbackAnswer:
    """What a callback asks for: whether training goes on, values to log, and a factor of the learning rate."""

    go_on: bool = True
    logged: dict[str, float] = field(default_factory=dict)
    lr_factor: float = 1.0


@dataclass(frozen=True)
class CallbackReport:
    """What a callback is called with. In a run of several ranks it is called once, with the figures of all of them."""

    _answer: CallbackAnswer | None = field(default_factory=CallbackAnswer, init=False, repr=False, compare=False)

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
        answer = self._unanswered()
        self._set(replace(answer, logged={**answer.logged, name: number}))

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate by this from the next step on, for the rest of the run.

        The schedule goes on; several factors multiply. A checkpoint keeps them, so a continued run goes on with them.

        Args:
            factor: above 0; 0.1 is a tenth.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise RecipeError(f"scale_lr({factor}): a factor is a number above 0")
        answer = self._unanswered()
        self._set(replace(answer, lr_factor=answer.lr_factor * float(factor)))

    def take_answer(self, go_on: bool) -> CallbackAnswer:
        """What was asked for; nothing can be afterwards."""
        answer = replace(self._unanswered(), go_on=go_on)
        self._set(None)
        return answer

    def _unanswered(self) -> CallbackAnswer:
        if self._answer is None:
            raise RecipeError("a report takes log() and scale_lr() while its callback runs, not later")
        return self._answer

    def _set(self, answer: CallbackAnswer | None) -> None:
        object.__setattr__(self, "_answer", answer)


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
    """A program's functions, of which `wanted` has the names. Rank 0 calls them and broadcasts what they ask for."""

    def __init__(self, on_epoch: OnEpoch | None = None, on_step: OnStep | None = None) -> None:
        self.on_epoch, self.on_step = on_epoch, on_step
        functions = {"on_epoch": on_epoch, "on_step": on_step}
        self.wanted = ",".join(name for name, function in functions.items() if function is not None)

    def connect(self, world: World) -> None:
        """Let every rank know which functions rank 0's program has. Collective."""
        self.wanted = world.broadcast_object(self.wanted)

    def has(self, name: str) -> bool:
        """Whether rank 0 has an "on_epoch" or "on_step"."""
        return name in self.wanted.split(",")

    def report(self, world: World, report: EpochReport | StepReport) -> CallbackAnswer:
        """Call rank 0's function for this report, if it has one; what it asks for, on all ranks. Collective."""
        if not self.has(_name(report)):
            return CallbackAnswer()
        answer: CallbackAnswer | str = CallbackAnswer()
        raised: BaseException | None = None
        if world.is_main:
            try:
                answer = self.call(report)
            except Exception as error:
                raised, answer = error, f"{_name(report)} raised {type(error).__name__}: {error}"
        shared: CallbackAnswer | str = world.broadcast_object(answer)
        if raised is not None:
            raise raised
        if isinstance(shared, str):
            raise TrainerError(shared)
        return shared

    def close(self) -> None:
        """No more calls follow."""

    def call(self, report: EpochReport | StepReport) -> CallbackAnswer:
        """Call the function: whatever it returns but False means to go on."""
        function: Any = self.on_epoch if isinstance(report, EpochReport) else self.on_step
        returned = function(report)
        return report.take_answer(not isinstance(returned, bool | np.bool_) or bool(returned))

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a message of `Remote` in a rank's process."""
        figures = dict(message)
        kind = EpochReport if figures.pop("called") == "on_epoch" else StepReport
        return asdict(self.call(kind(**figures)))


class Remote(Callbacks):
    """Functions of the program that started these ranks: rank 0 calls them over a socket, and waits for the answer."""

    def __init__(self, address: str, wanted: str) -> None:
        super().__init__()
        self.wanted, self._address = wanted, address
        self._socket: Any = None

    def call(self, report: EpochReport | StepReport) -> CallbackAnswer:
        figures = {name.name: getattr(report, name.name) for name in fields(report) if name.init}
        try:
            if self._socket is None:
                self._socket = hosted.connect(self._address).makefile("rwb")
            self._socket.write(json.dumps({"called": _name(report), **figures}).encode() + b"\n")
            self._socket.flush()
            line = self._socket.readline()
        except OSError:
            line = b""
        if not line:  # the program is leaving, and says so by a signal
            return CallbackAnswer()
        reply: dict[str, Any] = json.loads(line)
        if "raised" in reply:
            raise TrainerError(f"{_name(report)} raised {reply['raised']}")
        return CallbackAnswer(**reply)

    def close(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()


def _name(report: EpochReport | StepReport) -> str:
    return "on_epoch" if isinstance(report, EpochReport) else "on_step"


def from_environment() -> Callbacks:
    """Those of the program that started this rank; none elsewhere."""
    address = os.environ.get(hosted.CALLER)
    return Remote(address, os.environ.get(hosted.WANTED, "")) if address else Callbacks()
