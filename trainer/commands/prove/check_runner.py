"""Checks, their outcomes, and the runner that trains and measures for checks in fresh processes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.commands.trials.engine import TrialEngine, TrialRun, drop_weights, merge_arguments
from trainer.saving.files import Json
from trainer.telemetry.readable import format_count

# Seconds after which a run or a measurement is considered to hang and is killed.
TIMEOUT = 300.0
# The `timeout` of a run is this number of seconds shorter than TIMEOUT, so that a run that hangs
# early stops by itself and reports the reason.
GRACE = 60.0
QUIET = ["logging.progress=false", f"timeout={TIMEOUT - GRACE:g}"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check.

    Attributes:
        status: "right" or "wrong" for a check against a bound; "measured" for a measurement in
            which nothing is wrong; "not here" if this machine or this version of torch lacks the
            feature; "left out" if there was no time, or if other processes made a measurement
            meaningless.
        line: the outcome in one line.
        todo: what to do if something is wrong; otherwise empty.
        figures: measured values, by their keys in proof.json.
        seconds: duration of the check in seconds.
    """

    status: Literal["right", "wrong", "measured", "not here", "left out"]
    line: str
    todo: str = ""
    figures: Json = field(default_factory=dict)
    seconds: float = 0.0


def right(line: str, **figures: Any) -> Outcome:
    return Outcome("right", line, figures=figures)


def wrong(line: str, todo: str, **figures: Any) -> Outcome:
    return Outcome("wrong", line, todo, figures)


def measured(line: str, **figures: Any) -> Outcome:
    return Outcome("measured", line, figures=figures)


@dataclass(frozen=True)
class Devices:
    """Devices to check: GPUs, or CPU processes instead of them.

    Attributes:
        names: name of each device, as recipes write it.
        kind: "cuda" or "cpu".
        models: product name of each GPU, or "CPU".
        threads: threads of each CPU process; None on GPUs.
    """

    names: tuple[str, ...]
    kind: str
    models: tuple[str, ...]
    threads: int | None = None

    @property
    def count(self) -> int:
        return len(self.names)

    def called(self, count: int) -> str:
        if self.kind == "cuda":
            return format_count(count, "GPU")
        if count == 1:
            return "1 CPU process"
        return f"{count} CPU processes"

    def in_ranks(self, count: int) -> list[str]:
        """Return the arguments of a run with one process on each of the first `count` devices."""
        names = "cpu"
        if self.kind == "cuda":
            names = ",".join(self.names[:count])
        return [f"devices=[{names}]", f"nproc={count}"]

    def in_one_process(self, count: int = 1) -> list[str]:
        """Return the arguments of a run in one process with `count` local devices.

        If there are fewer than `count` devices, a device is used several times.
        """
        names = [self.names[n % self.count] for n in range(count)]
        return [f"devices=[{','.join(names)}]"]


@dataclass
class CheckRunner:
    """Runner of the training runs and measurements that checks need.

    Attributes:
        folder: folder of the proof.
        devices: devices to check.
        outcomes: outcomes so far, by the names of the checks.
    """

    folder: Path
    devices: Devices
    outcomes: dict[str, Outcome]

    def figures(self, name: str) -> Json:
        """Return the measured values of the check `name`; empty if it was not done."""
        if name in self.outcomes:
            return self.outcomes[name].figures
        return {}

    def train(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        timed: bool = False,
        resumes: bool = False,
    ) -> Json:
        """Train through the command line and return the content of result.json.

        A run that completed before is not run again, unless it is timed.

        Args:
            name: folder of the run below runs/.
            words: arguments of the run.
            environment: additional environment variables.
            timed: whether the speed of the run is compared with another speed, which must be
                measured at about the same time. Such a run always starts from scratch, and its
                weights are deleted.
            resumes: whether a run that was stopped is resumed.

        Raises:
            TrialFailed: the run failed.
        """
        # Only this node is checked, even if this process is part of a job on several nodes.
        variables = {"NNODES": "1", **(environment or {})}
        defaults = list(QUIET)
        if self.devices.threads:
            defaults.append(f"threads={self.devices.threads}")
        words = merge_arguments(defaults, words)
        trial = TrialRun(f"runs/{name}", words, environment=variables, resumes=resumes)
        engine = TrialEngine(self.folder, timeout=TIMEOUT)
        if timed:
            shutil.rmtree(engine.path(trial), ignore_errors=True)
        result: Json = engine.value(trial)
        if timed:
            drop_weights(engine.path(trial))
        return result

    def measure(self, what: str, count: int = 1, **task: Any) -> list[Json]:
        """Call the function `what` of `prove_probe` in `count` processes, one on each device.

        The keyword arguments `task` are passed to the function.

        Returns:
            The result of each process.

        Raises:
            PeerError: a process failed.
        """
        # Imported here because these modules import torch.
        from trainer.commands.prove import prove_probe
        from trainer.commands.trials.measuring import measure_on_all

        function = getattr(prove_probe, what)
        names = self.devices.names[:count]
        folder = self.folder / "measured" / what
        return measure_on_all(function, names, self.devices.threads, folder, TIMEOUT, **task)

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name


@dataclass(frozen=True)
class Check:
    """Check of correctness, or measurement of speed.

    Attributes:
        name: name of the check, under which its outcome is stored.
        title: phrase that says what is checked, for printed lines and proof.md.
        seconds: approximate duration in seconds on a machine that nothing else uses.
        run: function that performs the check.
        priority: 0 to 2; checks with a higher number are left out first if time is short.
        part: "right" for a check of correctness, "fast" for a measurement of speed.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[CheckRunner], Outcome]
    priority: int = 0
    part: Literal["right", "fast"] = "right"
