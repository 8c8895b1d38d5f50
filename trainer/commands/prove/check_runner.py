"""What checks are, what they answer, and how they run: training and measuring in fresh processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.commands.trials.engine import TrialEngine, TrialRun, drop_weights

TIMEOUT = 300.0  # seconds after which a run or a measurement is killed: it hangs
GRACE = 60.0  # seconds before that at which a run stops by itself, to say why
QUIET = ["logging.progress=false", f"timeout={TIMEOUT - GRACE:g}"]


@dataclass(frozen=True)
class Outcome:
    """What one check answers."""

    # "right" and "wrong" of what was checked, "measured" of a figure without a bound, "not here" of what this machine
    # or this torch cannot do, "left out" for want of time
    status: Literal["right", "wrong", "measured", "not here", "left out"]
    line: str  # for people
    todo: str = ""  # what to type where something is wrong
    figures: Mapping[str, Any] = field(default_factory=dict)  # for scripts, as `proof.json` has them
    seconds: float = field(default=0.0, compare=False)  # that the check took


def right(line: str, **figures: Any) -> Outcome:
    return Outcome("right", line, figures=figures)


def wrong(line: str, todo: str, **figures: Any) -> Outcome:
    return Outcome("wrong", line, todo, figures)


def measured(line: str, **figures: Any) -> Outcome:
    return Outcome("measured", line, figures=figures)


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str  # by which its outcome is kept
    part: Literal["right", "fast"]
    title: str  # for people
    seconds: float  # that it takes, about, on a machine that nothing else uses
    run: Callable[[CheckRunner], Outcome]  # does it
    priority: int = 0  # when time is short: 0 before 1 before 2


@dataclass(frozen=True)
class Devices:
    """What is checked: GPUs, or processes on the CPU in their place."""

    names: tuple[str, ...]  # as recipes write them, one each
    kind: str  # "cuda" or "cpu"
    models: tuple[str, ...]  # what the GPUs are called; of the CPU its name
    threads: int | None = None  # of each CPU process; None on GPUs

    @property
    def count(self) -> int:
        return len(self.names)

    def called(self, count: int) -> str:
        what = "GPU" if self.kind == "cuda" else "CPU process"
        return f"{count} {what}{'' if count == 1 else 's' if what == 'GPU' else 'es'}"

    def first(self) -> list[str]:
        """Words of a run on the first device."""
        return [f"devices=[{self.names[0]}]", *self._threads()]

    def in_ranks(self, count: int) -> list[str]:
        """Words of a run with a process on each of the first `count`."""
        names = ",".join(self.names[:count]) if self.kind == "cuda" else "cpu"
        return [f"devices=[{names}]", f"nproc={count}", *self._threads()]

    def in_one_process(self, count: int) -> list[str]:
        """Words of a run in one process that drives `count`; a single device stands for several."""
        names = [self.names[n % self.count] for n in range(count)]
        return [f"devices=[{','.join(names)}]", *self._threads()]

    def _threads(self) -> list[str]:
        return [f"threads={self.threads}"] if self.threads else []


@dataclass
class CheckRunner:
    """What checks run on: the proof's folder, its devices, and the outcomes so far by the checks' names."""

    folder: Path
    devices: Devices
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def figures(self, name: str) -> Mapping[str, Any]:
        """Of an earlier check; empty where it was not done."""
        return self.outcomes[name].figures if name in self.outcomes else {}

    def train(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        timed: bool = False,
        resumes: bool = False,
    ) -> dict[str, Any]:
        """result.json of a run with these words, which is started unless it was completed before, or is `timed`: what
        is measured in turn with something else is measured anew. Its weights are not kept. Raises TrialFailed.
        """
        variables = {"NNODES": "1", **(environment or {})}  # whatever cluster this is a part of
        trial = TrialRun(f"runs/{name}", [*QUIET, *words], environment=variables, resumes=resumes)
        engine = TrialEngine(self.folder, timeout=TIMEOUT)
        if timed:
            shutil.rmtree(engine.path(trial), ignore_errors=True)
        result: dict[str, Any] = engine.value(trial)
        if timed:
            drop_weights(engine.path(trial))
        return result

    def measure(self, what: str, count: int = 1, **task: Any) -> list[dict[str, Any]]:
        """What `count` processes answer that run this function of `prove_probe` at once. Raises PeerError."""
        from trainer.commands.prove import prove_probe  # with torch
        from trainer.commands.trials.measuring import answers

        devices, folder = self.devices.names[:count], self.folder / "measured" / what
        return answers(getattr(prove_probe, what), devices, self.devices.threads, folder, TIMEOUT, **task)

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name
