"""What a run tells the program that called it, epoch by epoch and at logged steps, and whether it is to go on."""

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
    """A program's functions. Rank 0 calls them; all ranks hear whether the run goes on."""

    def __init__(self, on_epoch: OnEpoch | None = None, on_step: OnStep | None = None) -> None:
        self.on_epoch, self.on_step = on_epoch, on_step
        self._told = self.wanted()

    def connect(self, world: World) -> None:
        """All ranks take part in what rank 0's program wants to hear, whatever theirs wants. Collective."""
        self._told = world.broadcast_object(self._told)

    def tells(self, name: str) -> bool:
        """Whether there is an "on_epoch" or "on_step" to tell."""
        return name in self._told.split(",")

    def epoch(self, world: World, report: EpochReport) -> bool:
        """Whether training goes on after this epoch. Collective."""
        return not self.tells("on_epoch") or self._agreed(world, report)

    def step(self, world: World, report: StepReport) -> bool:
        """Whether training goes on after this logged step. Collective."""
        return not self.tells("on_step") or self._agreed(world, report)

    def close(self) -> None:
        """There is nothing more to tell."""

    def _agreed(self, world: World, report: EpochReport | StepReport) -> bool:
        raised: BaseException | None = None
        heard: bool | str = True
        if world.is_main:
            try:
                heard = self.heard(report)
            except Exception as error:
                raised, heard = error, f"{_called(report)} raised {type(error).__name__}: {error}"
        heard = world.broadcast_object(heard)
        if raised is not None:
            raise raised
        if isinstance(heard, str):
            raise TrainerError(heard)
        return heard

    def heard(self, report: EpochReport | StepReport) -> bool:
        """Call the function: any answer but False means to go on."""
        function: Any = self.on_epoch if isinstance(report, EpochReport) else self.on_step
        answer = function(report)
        return not isinstance(answer, bool | np.bool_) or bool(answer)

    def wanted(self) -> str:
        """The kinds of reports that there are functions for."""
        return ",".join(name for name in ("on_epoch", "on_step") if getattr(self, name) is not None)

    def answer(self, message: Mapping[str, Any]) -> bool:
        """What a rank of another process told (see `Remote`), answered."""
        fields = dict(message)
        kind = EpochReport if fields.pop("called") == "on_epoch" else StepReport
        return self.heard(kind(**fields))


class Remote(Callbacks):
    """Functions of the program that started these ranks: rank 0 asks over a socket, and waits for the answer."""

    def __init__(self, address: str, wanted: str) -> None:
        def never(report: object) -> None:
            raise AssertionError(report)

        super().__init__(*(never if name in wanted.split(",") else None for name in ("on_epoch", "on_step")))
        self._address = address
        self._wire: Any = None

    def heard(self, report: EpochReport | StepReport) -> bool:
        try:
            if self._wire is None:
                self._wire = hosted.connect(self._address).makefile("rwb")
            self._wire.write(json.dumps({"called": _called(report), **asdict(report)}).encode() + b"\n")
            self._wire.flush()
            line = self._wire.readline()
        except OSError:
            line = b""
        if not line:  # the program is leaving, and says so by a signal
            return True
        reply: dict[str, Any] = json.loads(line)
        if "raised" in reply:
            raise TrainerError(f"{_called(report)} raised {reply['raised']}")
        return bool(reply["go_on"])

    def close(self) -> None:
        if self._wire is not None:
            with suppress(OSError):
                self._wire.close()


def _called(report: EpochReport | StepReport) -> str:
    return "on_epoch" if isinstance(report, EpochReport) else "on_step"


def from_environment() -> Callbacks:
    """Those of the program that started this rank; none elsewhere."""
    address = os.environ.get(hosted.CALLER)
    return Remote(address, os.environ.get(hosted.WANTED, "")) if address else Callbacks()
