"""Report how ranks ended: the message of a failing rank, and which failure caused the others.

A failing rank writes its one-line message into the file that torchrun reads. The launcher prints
the message of the first cause, and exits with the code of that cause.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Collection
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
    describe_bug,
    explain,
)
from trainer.processes import family, interrupts, stacks
from trainer.processes.rank import read_place
from trainer.processes.terminal import localize_commands
from trainer.processes.watchdog_process import WATCHDOG_SIGNAL

# Part of the message of a run that ran out of memory, if smaller micro-batches may fit. The
# launcher starts such a run again.
SMALLER = "the next attempt takes more pieces"
# Minimum number of seconds between two failures for lack of memory that restart the run with
# smaller micro-batches. If memory runs out again sooner, the run ends, because even smaller
# micro-batches are unlikely to help.
SMALLER_AFTER = 60.0
# A rank that a signal kills more than this number of seconds after the first failure is not the
# cause: torchrun itself sends SIGKILL to ranks that still run 30 or more seconds after a failure.
KILLED_LATE = 20.0
# Name of the file that `note_completed` writes for a rank that has completed.
COMPLETED = "completed"
STOPPED = "it is stopped (SIGSTOP, Ctrl-Z, a debugger)"
# Seconds that a rank that has lost a peer waits before it exits, so that our launcher notices the
# exit of the peer first. The launcher polls every 0.1 s.
NOTICE_SECONDS = 0.3
# Under the user's torchrun, seconds that a rank waits before it exits with an error of the recipe
# or the setup, so that rank 0 can print the error even if rank 0 starts later.
START_SECONDS = 5.0


@dataclass(frozen=True)
class Ending:
    """Failure of one rank.

    Attributes:
        rank: number of the rank.
        code: exit code in the form of `subprocess`: negative if a signal killed the rank.
        line: message of the rank; empty if it has not reported one.
        time: time of the failure in seconds since the epoch.
    """

    rank: int
    code: int
    line: str
    time: float = 0.0


def first_cause(endings: Collection[Ending]) -> Ending:
    """Return the failure that explains the others, with the code and line for the launcher.

    When a rank fails, its peers lose it (exit code 7) or are stopped (143, SIGTERM). Therefore a
    rank's own error comes first, then Ctrl-C, then ranks that a signal killed, then ranks that lost
    a peer, then SIGTERM. Among equals, the earliest failure comes first.
    """
    follows = {130: 1, PeerError.code: 2, 143: 3}
    late = min(end.time for end in endings) + KILLED_LATE

    def precedence(end: Ending) -> tuple[int, bool, bool, float, int]:
        # A late signal is not a cause, because torchrun kills ranks that do not react to SIGTERM.
        # Nor is SIGABRT, because torch's NCCL watchdog aborts a rank that has waited too long for
        # another rank.
        was_killed = end.code < 0 and end.code != -signal.SIGABRT and end.time <= late
        # A rank that found a stopped rank knows the cause. It also wakes the stopped rank to write
        # its stacks. Python's faulthandler sometimes crashes then, which looks like a kill.
        names_stopped_rank = STOPPED in end.line
        rank_of_code = follows.get(public_code(end.code), 0)
        return (rank_of_code, not names_stopped_rank, not was_killed, end.time, end.rank)

    first = min(endings, key=precedence)
    line = first.line or f"rank {first.rank} {family.describe_exit(first.code)}"
    return Ending(first.rank, public_code(first.code), line, first.time)


def public_code(code: int) -> int:
    """Convert an exit code of `subprocess` to the exit code that the launcher reports.

    A negative code -N means that signal N killed the rank. If signal N is one that stops a run, the
    result is the exit code of a stopped run (130, 131 or 143). For any other signal, the result is
    the exit code of a lost rank (`PeerError.code`).
    """
    if code >= 0:
        return code
    # A signal that stops a run can kill a rank that has no handlers yet or cannot run Python code.
    if -code in (*interrupts.ALWAYS, *interrupts.IF_UNUSED, WATCHDOG_SIGNAL):
        return interrupts.exit_code(-code)
    return PeerError.code


# Phrases in the message of a `PeerError` that a timeout caused.
TIME_LIMIT = re.compile("timed out|time limit|has hung", re.IGNORECASE)


def cause(error: BaseException, received: signal.Signals | None) -> str:
    """Return a short reason for the end of this rank.

    If this rank lost a peer, because another rank of this node failed, the reason is that of the
    other rank.

    Args:
        error: exception that ends this rank.
        received: signal that stopped the run, if any. Its name is the reason if `error` is
            `Preempted`.
    """
    line, code = explain(error)
    if code == Preempted.code and received is not None:
        return received.name
    if code == PeerError.code:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        failures = {}
        if file:
            failures = reports(Path(file).parents[1], "*/error.json")
        for end in sorted(failures.values(), key=lambda end: end.time):
            if end.code not in (PeerError.code, Interrupted.code, Preempted.code):
                return f"{KINDS.get(end.code, TrainerError).cause} on rank {end.rank}"
        if TIME_LIMIT.search(line):
            return "time limit: a rank or device was silent"
    return KINDS.get(code, TrainerError).cause


def reports(logs: Path, pattern: str = "*/attempt_*/*/error.json") -> dict[int, Ending]:
    """Return the failures that ranks of this node reported, by rank."""
    endings = {}
    for path in logs.glob(pattern):
        with suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads(path.read_text())["message"]
            extra = message["extraInfo"]
            rank = extra["rank"]
            line = extra["py_callstack"]
            endings[rank] = Ending(rank, message["errorCode"], line, extra["time"])
    return endings


def write_report(line: str, code: int, now: float) -> None:
    """Write this rank's line into the file that torchrun's summary and our launcher read.

    Args:
        line: why the rank failed.
        code: exit code of the rank.
        now: time of the failure in seconds since the epoch. Read the clock before
            `name_stopped_ranks` resumes stopped ranks, so that their failures are later than this.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # torchrun prints the report of every rank. Keep only the first line, because a stack in each
    # report would hide the messages.
    if not family.launcher_prints():
        line = line.partition("\n")[0]
    # torchrun reports the earliest failure. A rank that lost a peer is not the cause, so it reports
    # a time that is one second later.
    seconds = int(now) + (code == PeerError.code)
    extra = {
        "py_callstack": line,
        "timestamp": str(seconds),
        "time": now,
        "rank": read_place().rank,
    }
    report = {"message": {"message": line, "errorCode": code, "extraInfo": extra}}
    # torchrun may read the file at any moment, so an incomplete file must not exist.
    draft = f"{path}.{os.getpid()}"
    # If the file cannot be written, the exit code still shows the kind of the failure.
    with suppress(OSError):
        Path(draft).write_text(json.dumps(report))
        os.replace(draft, path)


def note_completed() -> None:
    """Tell our launcher that this rank has completed, so that later signals change no exit code."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and family.launcher_prints():
        with suppress(OSError):
            Path(path).with_name(COMPLETED).touch()


def with_stack(line: str, error: BaseException) -> str:
    """Return the message of an error, and write the stack of an unexpected one to the run folder.

    Without a run folder, the stack is appended to the message.

    Args:
        line: text that `explain` returned for this error.
        error: the exception.
    """
    if isinstance(error, TrainerError):
        return line
    file = stacks.append(line)
    if file:
        return f"{describe_bug(error)}; the stack is in {file}"
    return f"{describe_bug(error)}\n{line}"


def name_stopped_ranks(line: str, code: int, error: BaseException) -> str:
    """If this rank lost a peer, resume the stopped ranks of this node and name them in a message.

    Args:
        line: message of this rank.
        code: exit code of this rank. Nothing is done unless it is that of a lost peer.
        error: exception of this rank. Its cause may contain the timeout.

    Returns:
        The message about the stopped ranks, or `line` if there are none.
    """
    if code != PeerError.code:
        return line
    stopped = family.resume_stopped()
    if not stopped:
        return line
    ranks = ", ".join(map(str, stopped))
    # gloo and NCCL report their timeouts in milliseconds.
    timeout = re.search(r"(\d+) ?ms|ms\)=(\d+)", f"{line} {error.__cause__}")
    if timeout is None:
        return f"rank {ranks}: {STOPPED}"
    seconds = int(timeout[1] or timeout[2]) / 1000
    return f"rank {ranks} was silent for {seconds:g} s: {STOPPED}"


def say(line: str, code: int) -> None:
    """Print on stderr, in one line, how a run ended."""
    prefix = "trainer: error: "
    if code in (0, 130, 143):
        prefix = "trainer: "
    # The terminal may be closed.
    with suppress(OSError):
        print(localize_commands(f"{prefix}{line}"), file=sys.stderr, flush=True)


def let_others_print(code: int) -> None:
    """Wait before a failed rank exits, because its launcher ends all ranks as soon as one exits.

    Our launcher reports the rank that it sees exit first, which must not be a rank that only lost a
    peer. Under the user's torchrun, each rank detects a wrong argument or a missing folder itself,
    and only rank 0 prints it.
    """
    if family.launcher_prints():
        if code == PeerError.code:
            time.sleep(NOTICE_SECONDS)
    elif code in (RecipeError.code, SetupError.code):
        time.sleep(START_SECONDS)
