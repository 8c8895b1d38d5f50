"""How ranks end: the line that a failing rank writes, which failure caused the others, and who prints it.

A rank writes its line where torchrun looks for it; the launcher passes on that of the first cause, with its exit code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import (
    KINDS,
    Interrupted,
    PeerError,
    Preempted,
    RecipeError,
    SetupError,
    TrainerError,
    explain,
    sentence,
)
from trainer.processes import family, interrupts, stacks
from trainer.processes.rank import place
from trainer.processes.terminal import as_typed
from trainer.processes.watchdog_process import GIVEN_UP

SMALLER = "the next attempt takes more pieces"  # in the line of a run that memory does not end for good
SMALLER_AFTER = 60.0  # seconds that a run trains before it takes smaller pieces once more: else they do not help
KILLED_LATE = 20.0  # seconds after the first failure; torchrun's SIGKILL comes after 30
CAUSES = {  # what may be behind a signal that nobody sent on purpose
    "SIGKILL": " (the system may be short of memory)",
    "SIGABRT": " (NCCL does this if another rank is lost or silent; so does a library that finds an internal error)",
    "SIGSEGV": " (a fault in torch or another library)",
    GIVEN_UP.name: " (its Python did not run after a signal)",
    "SIGBUS": " (/dev/shm or a disk that is mapped may be full)",
}
STOPPED = "it is stopped (SIGSTOP, Ctrl-Z, a debugger)"
NOTICED = 0.3  # seconds within which the launcher notices that a rank is gone; it looks every 0.1 s
SLOWER = 5.0  # seconds that rank 0 may begin later than another


@dataclass(frozen=True)
class Ending:
    """How one rank failed: its exit code as the system gives it (negative: killed by a signal), its line, when."""

    rank: int
    code: int
    line: str = ""
    time: float = 0.0


def first_cause(endings: Iterable[Ending]) -> Ending:
    """The failure that explains the others, with the code and the line that the launcher passes on.

    A rank that fails takes its peers along: they lose it (7) or are stopped (143, SIGTERM). So a rank's own code
    counts first, then Ctrl-C, then a rank that a signal killed and those that lost it, then SIGTERM: the earliest.
    One that was killed long after the first failure did not hear torchrun, which kills such ranks: no cause. Nor is one
    that NCCL aborted, which waited for another. One that found a stopped rank knows why: that one is woken to write
    its stacks, of which Python's faulthandler sometimes dies.
    """
    endings = list(endings)
    follows = {130: 1, PeerError.code: 2, 143: 3}
    late = min(end.time for end in endings) + KILLED_LATE

    def precedence(end: Ending) -> tuple[int, bool, bool, float, int]:
        no_cause = end.code >= 0 or end.code == -signal.SIGABRT or end.time > late
        return follows.get(public_code(end.code), 0), STOPPED not in end.line, no_cause, end.time, end.rank

    first = min(endings, key=precedence)
    return Ending(first.rank, public_code(first.code), first.line or _how_it_ended(first), first.time)


def public_code(code: int) -> int:
    """What a shell is to see, of an exit code as the system gives it."""
    if code >= 0:
        return code
    # Before it could hear the signal, or when its Python could not run.
    asked = -code in (*interrupts.ALWAYS, *interrupts.IF_UNUSED, GIVEN_UP)
    return interrupts.exit_code(-code) if asked else PeerError.code


def _how_it_ended(end: Ending) -> str:
    if end.code >= 0:
        return f"rank {end.rank} ended with exit code {end.code}"
    try:
        name = signal.Signals(-end.code).name
    except ValueError:
        name = f"signal {-end.code}"
    return f"rank {end.rank} was killed by {name}{CAUSES.get(name, '')}"


TIME_LIMIT = re.compile("timed out|time limit|has hung", re.IGNORECASE)  # in the line of a PeerError


def cause(error: BaseException, received: signal.Signals | None = None) -> str:
    """Why this rank ends, in a word or two: that of the rank which took it along, where one of this node says so."""
    line, code = explain(error)
    if code == Preempted.code and received is not None:
        return received.name
    if code == PeerError.code:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        others = reports(Path(file).parents[1], "*/error.json") if file else {}
        for end in sorted(others.values(), key=lambda end: end.time):
            if end.code not in (PeerError.code, Interrupted.code, Preempted.code):
                return f"{KINDS.get(end.code, TrainerError).cause} on rank {end.rank}"
        if TIME_LIMIT.search(line):
            return "time limit: a rank or device was silent"
    return KINDS.get(code, TrainerError).cause


def reports(logs: Path, pattern: str = "*/attempt_*/*/error.json") -> dict[int, Ending]:
    """What the ranks of this node wrote when they failed, by rank."""
    endings: dict[int, Ending] = {}
    for path in logs.glob(pattern):
        with suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads(path.read_text())["message"]
            extra = message["extraInfo"]
            rank = extra["rank"]
            endings[rank] = Ending(rank, message["errorCode"], extra["py_callstack"], extra["time"])
    return endings


def write_report(line: str, code: int, now: float) -> None:
    """Write this rank's line where torchrun looks for it: its summary shows it, and our launcher reads it.

    `now` is the time of the failure itself: a rank that found another stopped, and woke it, came first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    line = line if family.launcher_prints() else line.partition("\n")[0]  # torchrun's summary shows it for every rank
    seconds = int(now) + (code == PeerError.code)  # torchrun takes the earliest for the cause, and a lost peer is none
    extra = {"py_callstack": line, "timestamp": str(seconds), "time": now, "rank": place().rank}
    draft = f"{path}.{os.getpid()}"  # torchrun may look at any moment, and cannot read half of it
    with suppress(OSError):  # the exit code is left
        Path(draft).write_text(json.dumps({"message": {"message": line, "errorCode": code, "extraInfo": extra}}))
        os.replace(draft, path)


def with_stack(line: str, error: BaseException) -> str:
    """A bug in one line, with the file that holds its stack; where there is no run folder yet, above its stack.

    `line` is what `explain` makes of the error.
    """
    if isinstance(error, TrainerError):
        return line
    file = stacks.append(line)
    return f"{sentence(error)}; the stack is in {file}" if file else f"{sentence(error)}\n{line}"


def name_stopped_ranks(line: str, code: int, error: BaseException) -> str:
    """The line of a rank that lost others, which names those that were stopped."""
    stopped = family.resume_stopped() if code == PeerError.code else []
    if not stopped:
        return line
    waited = re.search(r"(\d+) ?ms|ms\)=(\d+)", f"{line} {error.__cause__}")
    silent = f" was silent for {int(waited[1] or waited[2]) / 1000:g} s:" if waited else ":"
    return f"rank {', '.join(map(str, stopped))}{silent} {STOPPED}"


def say(line: str, code: int) -> None:
    """Print how a run ended: one line on stderr (and the stack of a bug that has no file)."""
    prefix = "trainer: " if code in (0, 130, 143) else "trainer: error: "
    with suppress(OSError):  # the terminal may be gone
        print(f"{prefix}{as_typed(line)}", file=sys.stderr, flush=True)


def let_others_print(code: int) -> None:
    """Wait a moment, in a rank that prints nothing, for its launcher ends all ranks once one has failed.

    Ours names the one whose end it sees first, which is not to be one that lost another. Under the user's torchrun
    every rank finds a mistake in what was typed, or a missing folder, by itself, and only rank 0 prints it.
    """
    if family.launcher_prints():
        time.sleep(NOTICED * (code == PeerError.code))
    elif code in (RecipeError.code, SetupError.code):
        time.sleep(SLOWER)
