"""Callbacks of the program that called `train`: after epochs and at logged steps, each may end the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trainer.errors import TrainerError
from trainer.launch import hosted
from trainer.processes.world import World


@dataclass(frozen=True)
class StepReport:
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
class EpochReport:
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
    """A program's functions. Rank 0 calls them and broadcasts whether the run goes on."""

    def __init__(self, on_epoch: OnEpoch | None = None, on_step: OnStep | None = None) -> None:
        self.on_epoch, self.on_step = on_epoch, on_step
        self._wanted = self.wanted()

    def connect(self, world: World) -> None:
        """Let every rank know which functions rank 0's program has. Collective."""
        self._wanted = world.broadcast_object(self._wanted)

    def has(self, name: str) -> bool:
        """Whether rank 0 has an "on_epoch" or "on_step"."""
        return name in self._wanted.split(",")

    def report(self, world: World, report: EpochReport | StepReport) -> bool:
        """Call rank 0's function for this report, if it has one; whether training goes on. Collective."""
        if not self.has(_name(report)):
            return True
        raised: BaseException | None = None
        answer: bool | str = True
        if world.is_main:
            try:
                answer = self.call(report)
            except Exception as error:
                raised, answer = error, f"{_name(report)} raised {type(error).__name__}: {error}"
        answer = world.broadcast_object(answer)
        if raised is not None:
            raise raised
        if isinstance(answer, str):
            raise TrainerError(answer)
        return answer

    def close(self) -> None:
        """No more calls follow."""

    def call(self, report: EpochReport | StepReport) -> bool:
        """Call the function: any answer but False means to go on."""
        function: Any = self.on_epoch if isinstance(report, EpochReport) else self.on_step
        answer = function(report)
        return not isinstance(answer, bool | np.bool_) or bool(answer)

    def wanted(self) -> str:
        """Names of the functions that there are."""
        return ",".join(name for name in ("on_epoch", "on_step") if getattr(self, name) is not None)

    def answer(self, message: Mapping[str, Any]) -> bool:
        """Answer a message of `Remote` in a rank's process."""
        fields = dict(message)
        kind = EpochReport if fields.pop("called") == "on_epoch" else StepReport
        return self.call(kind(**fields))


class Remote(Callbacks):
    """Functions of the program that started these ranks: rank 0 calls them over a socket, and waits for the answer."""

    def __init__(self, address: str, wanted: str) -> None:
        def never(report: object) -> None:
            raise AssertionError(report)

        super().__init__(*(never if name in wanted.split(",") else None for name in ("on_epoch", "on_step")))
        self._address = address
        self._socket: Any = None

    def call(self, report: EpochReport | StepReport) -> bool:
        try:
            if self._socket is None:
                self._socket = hosted.connect(self._address).makefile("rwb")
            self._socket.write(json.dumps({"called": _name(report), **asdict(report)}).encode() + b"\n")
            self._socket.flush()
            line = self._socket.readline()
        except OSError:
            line = b""
        if not line:  # the program is leaving, and says so by a signal
            return True
        reply: dict[str, Any] = json.loads(line)
        if "raised" in reply:
            raise TrainerError(f"{_name(report)} raised {reply['raised']}")
        return bool(reply["go_on"])

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
