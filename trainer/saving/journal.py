"""journal.jsonl of a run folder: a line for each attempt, with the seconds that it spent by what it spent them on.

The line of the attempt that runs is replaced in place about once a second, so that a kill at any moment loses no more.
A killed process leaves what it wrote; a machine that loses its power may leave a damaged line, which a checksum shows.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trainer.errors import TrainerError
from trainer.processes import rank
from trainer.saving.files import read, set_aside, why, writing

JOURNAL = "journal.jsonl"
# Parts of a run's seconds. Those of the start-up begin with START.
START, STEPS, DATA, UNFINISHED, OTHER = "start-up: ", "steps", "waiting for data", "unfinished steps", "other"
REDONE, RESTART = "redone steps", "waiting to be restarted"
COMPLETED = "completed"
KILLED = "killed"  # by SIGKILL, by the system for want of memory, by a loss of power: without a word
NOTICED = 20  # sentences of an attempt
EVERY = 1.0  # seconds between two states of a line


class Attempt(BaseModel):
    """One line: from a process's beginning to its end."""

    host: str
    boot: str  # which start of which machine the seconds since boot are of; empty where the system does not tell
    began: float  # in seconds since boot, which no change of a clock moves
    now: float  # likewise: when this was written
    time: float  # of `now`, in seconds since 1970
    resumed: int | None = None  # the step from which it went on; None before it has begun to train
    step: int = 0  # how far it has come
    seconds: dict[str, float]  # by part
    end: str | None = None  # why it ended; None while it runs, and where it was killed
    noticed: list[str] = []  # what went wrong meanwhile, as sentences with their steps


@dataclass(frozen=True)
class Goodput:
    """How much of a run's time went into useful steps."""

    fraction: float  # of `wall_s`, the seconds from the first attempt's beginning to the last one's latest word
    wall_s: float
    attempts: int
    seconds: dict[str, float]  # by part; they add up to `wall_s`
    ends: list[dict[str, Any]]  # of each attempt that has ended: `time`, `step`, `cause`
    notes: list[str]  # what these figures lack


class NullJournal:
    """Of a rank that has no run folder."""

    def mark(self, step: int | None = None, now: bool = False) -> None: ...
    def resumed(self, step: int) -> None: ...
    def notice(self, sentence: str) -> None: ...
    def end(self, cause: str) -> None: ...
    def close(self) -> None: ...

    last_end: str | None = None  # of the attempt before this one

    def goodput(self) -> dict[str, Any] | None:
        return None


class Journal(NullJournal):
    """The attempt that this process makes."""

    def __init__(self, folder: Path, check: Callable[[], None], seconds: Callable[[], dict[str, float]], ours: bool):
        """
        Args:
            check: raises where the folder is another run's by now.
            seconds: by part, since this process began its work.
            ours: whether this process is there for this run only, so that its imports are the run's too.
        """
        self.folder, self._check = folder, check
        path = folder / JOURNAL
        with writing(folder):
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                set_aside(path)
                path.unlink(missing_ok=True)
            self._earlier, self._notes = read_journal(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._place = os.fstat(self._file).st_size
            if self._place and os.pread(self._file, 1, self._place - 1) != b"\n":  # a torn line ends here
                self._place += os.pwrite(self._file, b"\n", self._place)
        self.last_end = self._earlier[-1].end if self._earlier else None
        before = _before(sum(seconds().values()), self._earlier) if ours else {}
        self._before, self._seconds = before, seconds
        self._width, self._marked = 0, -math.inf
        began = round(_since_boot() - sum((before | seconds()).values()), 4)
        self._line = Attempt(host=socket.gethostname(), boot="", began=began, now=0.0, time=0.0, seconds={})
        with suppress(OSError):
            self._line.boot = rank.boot_id()
        self.mark(now=True)

    def mark(self, step: int | None = None, now: bool = False) -> None:
        """This attempt has come so far: written about once a second, or `now`."""
        self._line.step = self._line.step if step is None else step
        if self._file < 0 or not (now or time.monotonic() - self._marked > EVERY):
            return
        self._check()  # a suspended run may wake up in a folder that another run has taken
        body = self._attempt().model_dump_json()
        line = f'{body[:-1]},"crc":{zlib.crc32(body.encode())}}}'
        self._width = max(self._width, len(line))
        with writing(self.folder):
            os.pwrite(self._file, f"{line:{self._width}}\n".encode(), self._place)
        self._marked = time.monotonic()

    def _attempt(self) -> Attempt:
        seconds = {part: round(spent, 4) for part, spent in (self._before | self._seconds()).items()}
        stamp = {"now": round(_since_boot(), 4), "time": round(time.time(), 3), "seconds": seconds}
        return self._line.model_copy(update=stamp)

    def resumed(self, step: int) -> None:
        """Training goes on from this step."""
        self._line.resumed = step
        self.mark(step, now=True)

    def notice(self, sentence: str) -> None:
        """Something went wrong; of much, the first of it is kept."""
        self._line.noticed = [*self._line.noticed, sentence][:NOTICED]
        self.mark(now=True)

    def end(self, cause: str) -> None:
        """It ends, and why. Where that cannot be written, the first error tells."""
        self._line.end = cause
        with suppress(TrainerError):
            self.mark(now=True)

    def close(self) -> None:
        """The last word."""
        if self._file >= 0:
            with suppress(TrainerError):
                self.mark(now=True)
            os.close(self._file)
            self._file = -1

    def goodput(self) -> dict[str, Any] | None:
        """Over all attempts up to now, for result.json."""
        goodput = goodput_of([*self._earlier, self._attempt()], self._notes, over=False)
        return asdict(goodput) if goodput else None


def read_journal(path: Path) -> tuple[list[Attempt], list[str]]:
    """The attempts of a journal, and what is wrong with it, in words. Never raises."""
    try:
        lines = read(path).split(b"\n") if os.path.lexists(path) else []
    except OSError as error:
        return [], [f"{JOURNAL} is left out: {why(error)}"]
    attempts = [_parsed(line) for line in lines if line.strip()]
    good = [attempt for attempt in attempts if attempt is not None]
    damaged = len(attempts) - len(good)
    note = f"{damaged} damaged line{'s' * (damaged > 1)} of {JOURNAL} left out: those attempts are not counted"
    return good, [note] * (damaged > 0)


def _parsed(line: bytes) -> Attempt | None:
    body, key, check = line.rstrip().rpartition(b',"crc":')
    body += b"}"
    try:
        good = bool(key) and check == b"%d}" % zlib.crc32(body)
        return Attempt.model_validate_json(body) if good else None
    except ValidationError:
        return None


def goodput_of(attempts: Sequence[Attempt], notes: Sequence[str] = (), over: bool = True) -> Goodput | None:
    """What all attempts come to; None where there are none. `over`: no process is at the last one any more."""
    if not attempts:
        return None
    seconds: dict[str, float] = defaultdict(float)
    lacks, kept = list(notes), math.inf  # steps up to which no later attempt began anew
    for attempt in reversed(attempts):
        parts, first = dict(attempt.seconds), attempt.resumed or 0
        steps, done = parts.pop(STEPS, 0.0), attempt.step - first
        lost = steps * (attempt.step - min(max(kept, first), attempt.step)) / done if done > 0 else steps
        seconds[REDONE if done > 0 else UNFINISHED] += lost
        seconds[STEPS] += steps - lost
        for part, spent in parts.items():
            seconds[part] += spent
        # While a machine sleeps, no part goes on.
        seconds[OTHER] += max(0.0, attempt.now - attempt.began - sum(attempt.seconds.values()))
        kept = kept if attempt.resumed is None else min(kept, attempt.resumed)
    for before, after in pairwise(attempts):
        if before.end == COMPLETED:  # nobody waits for a run that is done
            lacks.append(f"{before.end} and later continued: the time between is left out")
            continue
        same = bool(before.boot) and before.boot == after.boot
        gap = after.began - before.now if same else after.time - (after.now - after.began) - before.time
        seconds[RESTART] += max(0.0, gap)
        if gap < -1 and not same:
            lacks.append(
                f"a clock went back {-gap:.0f} s from one attempt to the next: no time between them is counted"
            )
    if attempts[0].resumed:
        lacks.append(f"counted from step {attempts[0].resumed} on: there is no journal of what came before")
    parts = {part: spent for part, spent in sorted(seconds.items(), key=lambda item: -item[1]) if spent > 0}
    wall = sum(parts.values())
    ends = []
    for attempt in attempts if over or attempts[-1].end else attempts[:-1]:
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(attempt.time))
        ends.append({"time": when, "step": attempt.step, "cause": attempt.end or KILLED})
    return Goodput(seconds[STEPS] / wall if wall else 0.0, wall, len(attempts), parts, ends, lacks)


def _before(working: float, earlier: Sequence[Attempt]) -> dict[str, float]:
    """Seconds before this process began its work, `working` seconds ago, and of a run's first attempt also those of the
    torchrun that started it. None where the process has made an earlier attempt, which has them."""
    parts, tick = {}, os.sysconf("SC_CLK_TCK")
    with suppress(OSError, ValueError, IndexError):  # the system does not tell
        began = rank.start_of(os.getpid()) / tick
        if earlier and earlier[-1].boot == rank.boot_id() and earlier[-1].now > began:
            return {}
        parts[f"{START}imports"] = _since_boot() - began - working
        if not earlier and "TORCHELASTIC_RUN_ID" in os.environ:
            parts[f"{START}launcher"] = began - rank.start_of(rank.launcher()) / tick
    return parts


def _since_boot() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
