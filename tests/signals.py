"""Signals: which one, to which processes, in which mode, at which moment, under which launcher.

`COMBINATIONS` is the whole table, `chosen(1)` a set in which each value occurs, and `chosen(2)` one
in which each pair of values occurs.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests import warm
from tests.command_line import latest, result, wait_for
from tests.storms import MODES, Job, same, shown, slack

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
TARGETS = ("group", "launcher", "one rank", "group and launcher")
RUNS = {
    "ddp": MODES["ddp"],
    "single": MODES["single"],
    "pipeline": MODES["1f1b"],
    "fsdp": MODES["fsdp"],
    "local_sgd": MODES["local_sgd"],
    "hogwild": MODES["hogwild"],
}
# Lowest step that a run has saved if it gets the signal at this moment, or 0 if it has nothing to
# save. Step 2 is always saved.
MOMENTS = {"training": 3, "evaluation": 5, "saving": 3, "start-up": 0}
LAUNCHERS = ("ours", "torchrun")
APART = 0.3  # seconds between two copies of one signal
LIMIT = 20.0  # seconds that a job may take to end

# A run of two epochs of five steps; every second step is saved, so that a run is held while it
# saves.
WORDS = [
    "recipe=digits",
    "model.name=cnn_gn",
    "batch_size=256",
    "optimizer.lr=0.001",
    "epochs=2",
    "threads=1",
    "logging.every_steps=1",
    "logging.progress=false",
    "logging.tensorboard=false",
    "logging.verdict=false",
]
WORDS += ["resume=auto", "plugin=tests.held_moments"]


class Combination(NamedTuple):
    """A cell of the table."""

    signal: str
    target: str
    mode: str
    moment: str
    launcher: str

    def impossible(self) -> str:
        """Say why this cannot happen, or return ""."""
        if self.mode == "single" and self.launcher == "ours" and self.target == "one rank":
            return "there is one process, which is struck as the launcher"
        return ""

    def code(self) -> set[int]:
        """Return the exit codes that the guide names; torchrun has its own, and dies of SIGUSR1 and
        SIGXCPU.
        """
        if self.launcher == "torchrun":
            return {1, 128 + signal.SIGUSR1, 128 + signal.SIGXCPU}
        return {130 if self.signal == "SIGINT" else 143}


def possible_combinations() -> list[Combination]:
    every = itertools.product(SIGNALS, TARGETS, RUNS, MOMENTS, LAUNCHERS)
    return [each for each in itertools.starmap(Combination, every) if not each.impossible()]


COMBINATIONS = possible_combinations()


def parts(
    combination: Combination,
    size: int,
) -> set[tuple[tuple[str, str], ...]]:
    """List all combinations of `size` of its values."""
    return {*itertools.combinations(zip(combination._fields, combination, strict=True), size)}


@functools.cache
def chosen(size: int) -> list[Combination]:
    """Choose few combinations that contain every possible group of `size` values; the choice is
    always the same.

    Of those that add as many, the one with the most larger combinations that are new is chosen.
    """
    missing = set().union(*(parts(each, size) for each in COMBINATIONS))
    missing_larger = set().union(*(parts(each, size + 1) for each in COMBINATIONS))
    few: list[Combination] = []
    while missing:
        best = max(
            COMBINATIONS,
            key=lambda each: (
                len(parts(each, size) & missing),
                len(parts(each, size + 1) & missing_larger),
            ),
        )
        missing -= parts(best, size)
        missing_larger -= parts(best, size + 1)
        few.append(best)
    return few


@contextmanager
def held_job(
    folder: Path,
    moment: str,
    *words: str,
    torchrun: bool = False,
    start: type[subprocess.Popen[bytes]] = warm.Popen,
    ranks: int = 1,
) -> Iterator[Job]:
    """Start a run, and wait until `ranks` of its ranks are held at a moment."""
    typed = latest(*WORDS, "save.every_steps=2", *words)
    with (
        held(folder, moment, ranks) as wait,
        Job(folder, *typed, start=start, torchrun=torchrun) as job,
    ):
        wait(job)
        yield job


@contextmanager
def held_program(
    folder: Path, command: list[str], moment: str = "training", ranks: int = 1
) -> Iterator[Job]:
    """The same for any command of Python; its run is in `folder`, or below."""

    class Program(warm.Popen):
        def __init__(self, typed: list[str], **options: Any) -> None:
            super().__init__(
                [typed[0], *command, *(typed[-1:] if command[0] != "-m" else [])], **options
            )

    with held(folder, moment, ranks) as wait, Job(folder, start=Program) as job:
        wait(job)
        yield job


@contextmanager
def held(
    folder: Path,
    moment: str,
    ranks: int,
) -> Iterator[Callable[[Job], None]]:
    """Hold processes that are started in this block.

    Yield a function that waits until they are held.
    """
    files = folder.with_name(f"{folder.name}-held")
    variables = {"HELD_MOMENT": moment, "HELD_FILES": str(files)}

    def wait(job: Job) -> None:
        wait_for(
            lambda: len([*files.parent.glob(f"{files.name}-?")]) >= ranks,
            job.main,
            60 * slack(),
        )

    os.environ |= variables
    try:
        yield wait
    finally:
        for name in variables:
            os.environ.pop(name, None)


def let_go(job: Job) -> None:
    job.folder.with_name(f"{job.folder.name}-held-struck").touch()


def send(job: Job, target: str, number: int) -> None:
    """Signal processes of a job."""
    if target.startswith("group"):
        os.killpg(job.main.pid, number)
    if target == "group and launcher":
        time.sleep(APART)
    if target.endswith("launcher"):
        job.main.send_signal(number)
    if target == "one rank":
        os.kill(job.ranks()[max(job.ranks())], number)


def check_ended(job: Job, codes: set[int], moment: str) -> None:
    """Assert that the job ends with one of these exit codes, and leaves a complete checkpoint of
    its last step, or none.
    """
    code, _ = job.end(LIMIT * slack())
    text = job.text()
    assert shown(code) in codes, (code, text)
    names = sorted(path.name for path in (job.folder / "checkpoints").glob("*"))
    assert not [name for name in names if "tmp" in name], (names, text)
    if not MOMENTS[moment]:
        assert not names, (names, text)
        return
    last = (job.folder / "steps.csv").read_text().splitlines()[-1]
    step = int(names[-1].removeprefix("step-"))
    assert step == int(last.partition(",")[0]) >= MOMENTS[moment], (names, last, text)


def strike(folder: Path, whole: Path, combination: Combination) -> None:
    """Signal a run, look at how it ends, and resume it to the end of an undisturbed run, which is
    made if missing.
    """
    words = RUNS[combination.mode]
    several = any(word.startswith("nproc=") for word in words)
    held_ranks = 2 if several and combination.moment != "saving" else 1
    torchrun = combination.launcher == "torchrun"
    with held_job(folder, combination.moment, *words, torchrun=torchrun, ranks=held_ranks) as job:
        send(job, combination.target, signal.Signals[combination.signal])
        let_go(job)
        check_ended(job, combination.code(), combination.moment)
    for path in (folder, whole):
        if not (path / "result.json").exists() or path == folder:
            with Job(path, *WORDS, "save.every_steps=2", *words, start=warm.Popen) as job:
                job.ends(60, 0)
    assert result(folder)["status"] == "completed"
    if combination.mode != "hogwild":
        same(folder, whole)
