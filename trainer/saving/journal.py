"""The journal of a run: one line for each attempt, with the seconds spent on each part of the work.

The line of the current attempt in journal.jsonl is overwritten in place about once a second, so a
kill loses at most that second. A machine that loses power may leave a damaged line, which the
checksum at its end reveals.
"""

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

from pydantic import BaseModel, ValidationError

from trainer.errors import TrainerError
from trainer.processes import rank
from trainer.saving.files import Json, describe_error, read, report_write_errors, set_aside

JOURNAL = "journal.jsonl"
# Parts of a run's time. The names of the start-up parts begin with START.
START = "start-up: "
STEPS = "steps"
DATA = "waiting for data"
UNFINISHED = "unfinished steps"
OTHER = "other"
REDONE = "redone steps"
RESTART = "waiting to be restarted"
# Cause of the end of an attempt that completed the run.
COMPLETED = "completed"
# Cause of the end of an attempt that could not record a cause, because it was ended by SIGKILL, by
# the kernel for lack of memory, or by a power failure.
KILLED = "killed"
# Maximum number of problems in a line. Further problems are dropped, because a run with a lasting
# problem would fill its journal with the same sentence.
MAX_NOTICES = 20
# Minimum number of seconds between two writes of the line. The disk may be slow or shared, so the
# line is not written at every step.
WRITE_SECONDS = 1.0


class Attempt(BaseModel):
    """Line of the journal about one process that works on the run.

    Attributes:
        host: host name.
        boot: identifier of the boot that `began` and `now` refer to. Empty if it is unknown.
        began: start of the process in seconds since boot, which changes of the clock do not affect.
        now: time at which this line was written, in seconds since boot.
        time: time at which this line was written, in seconds since 1970.
        resumed: step at which training started. None until training starts.
        step: last completed step.
        seconds: seconds spent on each part of the work, by the name of the part.
        end: cause of the end. None while the attempt runs, or if it was killed.
        noticed: problems of this attempt, as sentences that name the step.
    """

    host: str
    boot: str
    began: float
    now: float
    time: float
    resumed: int | None = None
    step: int = 0
    seconds: dict[str, float]
    end: str | None = None
    noticed: list[str] = []


@dataclass(frozen=True)
class Goodput:
    """How much of a run's time was spent on useful steps.

    Attributes:
        fraction: time of useful steps divided by `wall_s`, from 0 to 1.
        wall_s: seconds from the start of the first attempt to the last line of the last attempt,
            without the time between the end of a completed run and the attempt that trains longer.
        attempts: number of attempts.
        seconds: seconds spent on each part of the work, longest first. They add up to `wall_s`.
        ends: `time`, `step` and `cause` of the end of each attempt that has ended.
        notes: sentences about time and attempts that the other fields do not include.
    """

    fraction: float
    wall_s: float
    attempts: int
    seconds: dict[str, float]
    ends: list[Json]
    notes: list[str]


class NullJournal:
    """Replacement for the journal on ranks without a run folder. All calls do nothing.

    Attributes:
        last_end: cause of the end of the previous attempt. None if there was no previous attempt,
            or if that attempt was killed.
    """

    last_end: str | None = None

    def mark(self, step: int | None = None, now: bool = False) -> None: ...
    def resumed(self, step: int) -> None: ...
    def notice(self, sentence: str) -> None: ...
    def end(self, cause: str) -> None: ...
    def close(self) -> None: ...

    def goodput(self) -> Json | None:
        return None


class Journal(NullJournal):
    """Writer of the current attempt's line."""

    def __init__(
        self,
        folder: Path,
        check: Callable[[], None],
        seconds: Callable[[], dict[str, float]],
        ours: bool,
    ):
        """Open the journal, and write the first version of this attempt's line.

        Args:
            folder: run folder.
            check: raises if the folder belongs to another run now.
            seconds: returns the seconds by part since this process began its work.
            ours: whether this process exists only for this run, so that the time of its imports
                belongs to the run.
        """
        self.folder = folder
        self._check = check
        path = folder / JOURNAL
        with report_write_errors(folder):
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                set_aside(path)
                path.unlink(missing_ok=True)
            self._earlier, self._notes = read_journal(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._offset = os.fstat(self._file).st_size
            # A killed writer may have left an incomplete line, which must not merge with ours.
            if self._offset and os.pread(self._file, 1, self._offset - 1) != b"\n":
                self._offset += os.pwrite(self._file, b"\n", self._offset)
        if self._earlier:
            self.last_end = self._earlier[-1].end
        self._startup: dict[str, float] = {}
        if ours:
            self._startup = _measure_startup(sum(seconds().values()), self._earlier)
        self._seconds = seconds
        self._width = 0
        self._last_write = -math.inf
        now = _since_boot()
        spent = sum((self._startup | seconds()).values())
        self._line = Attempt(
            host=socket.gethostname(),
            boot="",
            began=round(now - spent, 4),
            now=0.0,
            time=0.0,
            seconds={},
        )
        with suppress(OSError):
            self._line.boot = rank.read_boot_id()
        self.mark(now=True)

    def mark(self, step: int | None = None, now: bool = False) -> None:
        """Record progress, and write the line if the last write was more than a second ago.

        Args:
            step: last completed step.
            now: write immediately.
        """
        if step is not None:
            self._line.step = step
        if self._file < 0:
            return
        if not now and time.monotonic() - self._last_write <= WRITE_SECONDS:
            return
        # Another run may have claimed the folder while this process was suspended.
        self._check()
        body = self._attempt().model_dump_json()
        line = f'{body[:-1]},"crc":{zlib.crc32(body.encode())}}}'
        # Spaces overwrite the rest of a previous line that was longer.
        self._width = max(self._width, len(line))
        with report_write_errors(self.folder):
            os.pwrite(self._file, f"{line:{self._width}}\n".encode(), self._offset)
        self._last_write = time.monotonic()

    def _attempt(self) -> Attempt:
        seconds = self._startup | self._seconds()
        update = {
            "seconds": {part: round(spent, 4) for part, spent in seconds.items()},
            "now": round(_since_boot(), 4),
            "time": round(time.time(), 3),
        }
        return self._line.model_copy(update=update)

    def resumed(self, step: int) -> None:
        """Record the step at which training starts."""
        self._line.resumed = step
        self.mark(step, now=True)

    def notice(self, sentence: str) -> None:
        """Record a problem. After `MAX_NOTICES` problems, further ones are dropped."""
        self._line.noticed = [*self._line.noticed, sentence][:MAX_NOTICES]
        self.mark(now=True)

    def end(self, cause: str) -> None:
        """Record why the attempt ends. A write error is ignored, because `cause` matters more."""
        self._line.end = cause
        with suppress(TrainerError):
            self.mark(now=True)

    def close(self) -> None:
        """Write the line for the last time and close the file."""
        if self._file >= 0:
            with suppress(TrainerError):
                self.mark(now=True)
            os.close(self._file)
            self._file = -1

    def goodput(self) -> Json | None:
        """Return the goodput of all attempts until now, for result.json."""
        goodput = compute_goodput([*self._earlier, self._attempt()], self._notes, over=False)
        return asdict(goodput) if goodput else None


def read_journal(path: Path) -> tuple[list[Attempt], list[str]]:
    """Read a journal. A file that is missing or cannot be read has no attempts.

    Returns:
        (attempts, notes): the attempts in order, and sentences about a file or lines that could not
        be read.
    """
    if not os.path.lexists(path):
        return [], []
    try:
        content = read(path)
    except OSError as error:
        return [], [f"{JOURNAL} is left out: {describe_error(error)}"]
    attempts = []
    damaged = 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        attempt = _parse_line(line)
        if attempt is None:
            damaged += 1
        else:
            attempts.append(attempt)
    notes = []
    if damaged:
        notes = [f"attempts not counted, because their lines in {JOURNAL} are damaged: {damaged}"]
    return attempts, notes


def _parse_line(line: bytes) -> Attempt | None:
    body, key, checksum = line.rstrip().rpartition(b',"crc":')
    body += b"}"
    if not key or checksum != b"%d}" % zlib.crc32(body):
        return None
    try:
        return Attempt.model_validate_json(body)
    except ValidationError:
        return None


def compute_goodput(
    attempts: Sequence[Attempt], notes: Sequence[str] = (), over: bool = True
) -> Goodput | None:
    """Compute the goodput of a run.

    Args:
        attempts: all attempts in order.
        notes: sentences about the journal, which come first in the notes of the result.
        over: whether the last attempt has ended.

    Returns:
        The goodput, or None without attempts.
    """
    if not attempts:
        return None
    remarks = list(notes)
    seconds: dict[str, float] = defaultdict(float)
    # Attempts are visited from the last to the first. The later ones repeated all steps after
    # `kept_step`.
    kept_step = math.inf
    for attempt in reversed(attempts):
        parts = dict(attempt.seconds)
        first_step = attempt.resumed or 0
        step_seconds = parts.pop(STEPS, 0.0)
        step_count = attempt.step - first_step
        if step_count > 0:
            last_useful_step = min(max(kept_step, first_step), attempt.step)
            lost = step_seconds * (attempt.step - last_useful_step) / step_count
            seconds[REDONE] += lost
        else:
            lost = step_seconds
            seconds[UNFINISHED] += lost
        seconds[STEPS] += step_seconds - lost
        for part, spent in parts.items():
            seconds[part] += spent
        # The clocks of the parts stop while the machine sleeps, but time since boot does not. The
        # difference counts as `OTHER`.
        elapsed = attempt.now - attempt.began
        seconds[OTHER] += max(0.0, elapsed - sum(attempt.seconds.values()))
        if attempt.resumed is not None:
            kept_step = min(kept_step, attempt.resumed)
    for before, after in pairwise(attempts):
        # The time until the user resumes a completed run with more epochs is not waiting time.
        if before.end == COMPLETED:
            remarks.append(f"{before.end} and later continued: the time between is left out")
            continue
        is_same_boot = bool(before.boot) and before.boot == after.boot
        if is_same_boot:
            gap = after.began - before.now
        else:
            gap = after.time - (after.now - after.began) - before.time
        seconds[RESTART] += max(0.0, gap)
        # Clocks of different machines may differ by a second, so report only a larger difference.
        if gap < -1 and not is_same_boot:
            remarks.append(
                f"a clock went back {-gap:.0f} s from one attempt to the next: no time between "
                "them is counted"
            )
    if attempts[0].resumed:
        remarks.append(
            f"counted from step {attempts[0].resumed} on: there is no journal of what came before"
        )
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    parts = {part: spent for part, spent in longest_first if spent > 0}
    wall = sum(parts.values())
    ended = list(attempts)
    if not over and not attempts[-1].end:
        ended.pop()
    ends = []
    for attempt in ended:
        end_time = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(attempt.time))
        ends.append({"time": end_time, "step": attempt.step, "cause": attempt.end or KILLED})
    return Goodput(
        fraction=seconds[STEPS] / wall if wall else 0.0,
        wall_s=wall,
        attempts=len(attempts),
        seconds=parts,
        ends=ends,
        notes=remarks,
    )


def _measure_startup(working: float, earlier: Sequence[Attempt]) -> dict[str, float]:
    """Return the seconds before this process began its work, by part.

    The first attempt of a run also includes the start of torchrun. If this process has made an
    earlier attempt, the result is empty, because that attempt has counted these seconds.

    Args:
        working: seconds since this process began its work.
        earlier: previous attempts of the run.
    """
    parts = {}
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    # Not every system reports when a process started.
    with suppress(OSError, ValueError, IndexError):
        began = rank.read_start_ticks(os.getpid()) / ticks_per_second
        if earlier and earlier[-1].boot == rank.read_boot_id() and earlier[-1].now > began:
            return {}
        parts[f"{START}imports"] = _since_boot() - began - working
        if not earlier and "TORCHELASTIC_RUN_ID" in os.environ:
            launcher_began = rank.read_start_ticks(rank.launcher()) / ticks_per_second
            parts[f"{START}launcher"] = began - launcher_began
    return parts


def _since_boot() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
