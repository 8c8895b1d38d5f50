"""One long run on 2 ranks that is disturbed at random all the while, held against one that nobody disturbs.

    python -m tests.soak --minutes=120 --seed=1

Ranks, launcher and helpers are killed, stopped and signalled, the disk fills and readers become slow, as the seed says.
At the end: the weights and losses of the undisturbed run, to the bit; memory that is flat, threads and open files that
are bounded, and a goodput whose parts are all the seconds that went by. Steps are slowed down so that they last as long
as asked for. Full disks need root.
"""

from __future__ import annotations

import argparse
import functools
import math
import mmap
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.command_line import orphaned_blocks, result
from tests.storms import TRACKER, Job, hear_signals, pause, same, slack
from trainer import register_dataset

BATCH, STEPS = 64, 100  # images of a step, steps of an epoch
WORDS = ["recipe=digits", "plugin=tests.soak", "data.name=paced", "data.image_size=8", "data.channels=1", "mode=ddp"]
WORDS += ["nproc=2", "model.name=cnn_gn", f"batch_size={BATCH}", "optimizer.lr=0.001", "ema=0.99", "threads=1"]
WORDS += ["data.workers=1", "save.every_epochs=1", "save.every_steps=25", "logging.progress=false", "resume=auto"]
RESTARTS = 5  # of one launcher
TIMEOUT = 15  # seconds that a stopped rank is waited for; on a busy machine a living one may be silent for some
PACE = 1.0  # steps of a second
SLOW = 32  # of so many images one takes as long to read as all: a busy machine makes each short sleep a long one
EARLY = 0.3  # the part of hits that may strike a run before it is farther than ever
CALM = (0.35, 0.55)  # the part of the time in which nothing is killed, so that a rank grows old
CONTROL = "SOAK_CONTROL"  # the variable that names the file of what follows
DELAY = struct.Struct("d")  # seconds that reading an image takes

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KINDS = {  # how often, and the exit codes that it may bring about
    "kill a rank": (4, {7}),
    "kill the launcher": (2, {-signal.SIGKILL}),
    "kill a helper": (2, {7}),
    "signal": (2, {143, *(-number for number in SIGNALS)}),  # Python itself was still starting
    "full disk": (2, {28}),
    "stop a rank": (2, {7}),
    "stop a rank for a moment": (3, set()),
    "stop all": (2, set()),
    "slow readers": (4, set()),
}
GENTLE = [kind for kind, (_, codes) in KINDS.items() if not codes]
ROOM, NEAR = 20 * 2**20, 1.05  # bytes, and times as much, that is as good as flat


@functools.cache
def control() -> mmap.mmap | None:
    """What the soak says now, in each of the job's processes; None in the run that it does not disturb."""
    name = os.environ.get(CONTROL)
    if name is None:
        return None
    with open(name, "r+b") as file:
        return mmap.mmap(file.fileno(), DELAY.size)


class Images:
    """Images that can be learnt, which take as long to read as `control` says."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % SLOW == 0 and (now := control()) is not None:
            time.sleep(SLOW * DELAY.unpack_from(now)[0])
        dice, label = torch.Generator().manual_seed(self.first + index), index % 10
        image = torch.randint(0, 120, (1, 8, 8), dtype=torch.uint8, generator=dice)
        image[0, label % 8] += 80 if label < 8 else 120
        return image, label


@register_dataset("paced")
def paced(data: object) -> tuple[Images, Images, int]:
    return Images(BATCH * STEPS, 0), Images(2 * BATCH, BATCH * STEPS), 10


@dataclass(frozen=True)
class Sample:
    """What a process used at a time, which it has lived for `age` seconds."""

    at: float
    role: str
    pid: int
    age: float
    memory: int
    threads: int
    files: int


def sampled(job: Job, at: float, born: dict[int, float]) -> list[Sample]:
    """All processes of a job that live; `born` gets when each was first seen."""
    members, found = job.members(), []
    ranks = {pid: f"rank {rank}" for rank, pid in job.ranks().items()} | {job.main.pid: "launcher"}
    words: dict[int, str] = {}
    for pid in members:
        with suppress(OSError):
            words[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    for pid, line in words.items():
        with suppress(OSError, ValueError, IndexError):
            facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            kind = next((word for word in ("resource_tracker", "watchdog", "forkserver") if word in line), "helper")
            if kind == "forkserver" and "forkserver" in words.get(int(facts[1]), "") and int(facts[1]) not in ranks:
                kind = "loader worker"
            whose = f"rank {members[pid]}" if members[pid] else "launcher"
            role = ranks.get(pid, f"{whose}'s {kind}")
            memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
            files = len(os.listdir(f"/proc/{pid}/fd"))
            found.append(Sample(at, role, pid, at - born.setdefault(pid, at), memory, int(facts[17]), files))
    return found


def grown(samples: Iterable[Sample], whole: float) -> list[str]:
    """What did not stay as it was, in sentences, over a soak of `whole` seconds.

    Of each process that lived long: its last quarter against its eleventh to fifteenth minute (a twelfth of two hours
    and half as much again). Of all processes of a kind: those of one age, in the last third of the soak against the
    first.
    """
    settled, told = max(60.0, min(600.0, whole / 12)), []
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.role, sample.pid].append(sample)
    young: dict[str, tuple[list[Sample], list[Sample]]] = defaultdict(lambda: ([], []))
    for (role, pid), life in lives.items():
        oldest = life[-1].age
        if oldest >= 2 * settled:
            early = [sample for sample in life if settled <= sample.age <= 1.5 * settled]
            told += _more(f"{role} ({pid})", early, [sample for sample in life if sample.age >= 0.75 * oldest])
        of_age = [sample for sample in life if max(30.0, 0.1 * settled) <= sample.age <= max(60.0, 0.3 * settled)]
        for n, there in enumerate((lambda at: at < whole / 3, lambda at: at > 2 * whole / 3)):
            young[role][n].extend(sample for sample in of_age if there(sample.at))
    for role, (first, last) in young.items():
        told += _more(f"{role}, those of one age", first, last)
    return told


def _more(whose: str, early: list[Sample], late: list[Sample]) -> list[str]:
    """What is more in late samples than in early ones."""
    if not early or not late:
        return []
    told = []
    was, now = (statistics.median(sample.memory for sample in part) for part in (early, late))
    if now > max(was * NEAR, was + ROOM):
        told.append(f"{whose}: {was / 2**20:.1f} MiB became {now / 2**20:.1f}")
    for what in ("threads", "files"):
        was, now = (max(getattr(sample, what) for sample in part) for part in (early, late))
        if now > was + 4:
            told.append(f"{whose}: {was} {what} became {now}")
    return told


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[bool]:
    """A disk that can be filled; whether there is one, which only root may make."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    try:
        yield not made.returncode
    finally:
        if not made.returncode:
            subprocess.run(["umount", "-l", path], check=True)


class Soak:
    """A run that is disturbed for about so many seconds; `start` is as `Job` has it."""

    def __init__(
        self,
        home: Path,
        seconds: float,
        seed: int,
        kinds: Iterable[str],
        start: type[subprocess.Popen[bytes]] = subprocess.Popen,
        pace: float = PACE,
        gaps: tuple[float, float] = (10.0, 60.0),
        most: float = math.inf,
    ) -> None:
        """`pace`: steps of a second, in the mean over all; `gaps`: the least and most seconds between two hits; `most`:
        hits, at most."""
        self.home, self.seconds, self.start, self.gaps, self.most = home, seconds, start, gaps, most
        self.dice = random.Random(seed)
        self.kinds = [*kinds]
        epochs = max(1, round(seconds * pace / STEPS))
        self.steps = epochs * STEPS
        self.words = [*WORDS, f"epochs={epochs}", f"logging.every_steps={10 if epochs > 5 else 1}"]
        self.every = 10 if epochs > 5 else 1
        self.folder, self.whole = home / "disk" / "run", home / "whole"
        self.samples: list[Sample] = []
        self.hits, self.ends = Counter[str](), Counter[int]()
        self.waits: list[float] = []  # seconds until all processes of a job were gone
        self.later: list[tuple[float, int]] = []  # when which process goes on
        self.slow_until = 0.0

    def run(self) -> None:
        """Both runs to their ends, and what they come to."""
        undisturbed = Job(self.whole, *self.words, start=self.start)
        self.control = self.home / "control"
        self._set_delay(0.0)
        (self.home / "tmp").mkdir()
        os.environ |= {CONTROL: str(self.control), "TMPDIR": str(self.home / "tmp")}
        self.begun = time.monotonic()
        job = self._job()
        try:
            self._disturb(job)
            self.wall = time.monotonic() - self.begun
            code, _ = undisturbed.end(max(120.0, self.seconds) * slack())
            assert code == 0, undisturbed.text()
        finally:
            undisturbed.clear()

    def _job(self) -> Job:
        self.now, self.struck, self.born = time.monotonic() - self.begun, set[str](), dict[int, float]()
        return Job(self.folder, *self.words, f"timeout={TIMEOUT}", f"max_restarts={RESTARTS}", start=self.start)

    def _disturb(self, job: Job) -> None:
        """Strike now and then until the run has ended by itself."""
        gap, counted, best = self.dice.uniform(*self.gaps), 0.0, 0
        sample_at, every, seen, seen_at = 0.0, min(10.0, self.seconds / 60), -1, 0.0
        try:
            while True:
                self.now = time.monotonic() - self.begun
                for when, pid in [*self.later]:
                    if self.now >= when:
                        self.later.remove((when, pid))
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGCONT)
                if job.main.poll() is not None:
                    if self._ended(job) == 0:
                        return
                    job = self._job()
                if self.now >= sample_at:
                    self.samples += sampled(job, self.now, self.born)
                    sample_at = self.now + every
                    assert self.now - seen_at < 300 * slack(), f"no step for minutes:\n{job.text()}"
                    self._set_pace(seen * self.every)
                if (rows := Job._count(self.folder / "steps.csv")) != seen:
                    seen, seen_at = rows, self.now
                if counted == math.inf and rows > best:
                    counted = self.now
                if self.now >= counted + gap and self.hits.total() < self.most and self._strike(job):
                    best, gap = max(best, rows), self.dice.uniform(*self.gaps)
                    counted = self.now if self.dice.random() < EARLY else math.inf
                time.sleep(0.1)
        finally:
            job.clear()

    def _set_pace(self, done: int) -> None:
        """Slow down so that the steps that are left take about the time that is left, half of which is lost."""
        left = max(0.0, self.seconds - self.now) / max(1, self.steps - done)
        delay = max(0.0, left / 2 - 0.012) * 2 / BATCH
        if self.now < self.slow_until:
            delay = max(0.02, 10 * delay)
        self._set_delay(delay)

    def _set_delay(self, delay: float) -> None:
        with self.control.open("r+b" if self.control.exists() else "wb") as file:  # in place: ranks have mapped it
            file.write(DELAY.pack(delay))

    def _strike(self, job: Job) -> bool:
        """Disturb it; whether there was something to disturb."""
        calm = CALM[0] < self.now / self.seconds < CALM[1]
        kinds = [kind for kind in self.kinds if kind in GENTLE or not calm]
        kind = self.dice.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]
        members = job.members()
        ranks = [pid for pid in job.ranks().values() if pid != job.main.pid]
        helpers = [pid for pid in members if pid not in ranks and pid != job.main.pid]
        if kind == "full disk":
            self._count(kind, "")
            self._fill_disk(job)
            return True
        victims = {"kill a rank": ranks, "kill a helper": helpers, "kill the launcher": [job.main.pid]}
        victims |= {"stop a rank": ranks, "stop a rank for a moment": ranks, "stop all": ranks}
        if not victims.get(kind, [job.main.pid]):
            return False
        victim, note = self.dice.choice(victims.get(kind, [job.main.pid])), ""
        with suppress(ProcessLookupError):
            if kind.startswith("kill"):
                os.kill(victim, signal.SIGKILL)
            elif kind == "signal":
                number = self.dice.choice(SIGNALS)
                note = number.name
                os.kill(victim, number)
            elif kind == "stop all":
                pause(job, TIMEOUT + self.dice.uniform(1, 4))
            elif kind.startswith("stop"):
                seconds = self.dice.uniform(0.5, TIMEOUT / 2) if "moment" in kind else 3 * TIMEOUT
                note = f"{seconds:.1f} s"
                os.kill(victim, signal.SIGSTOP)
                self.later.append((self.now + seconds, victim))
            elif kind == "slow readers":
                self.slow_until = self.now + self.dice.uniform(5, 20)
        self._count(kind, note)
        return True

    def _count(self, kind: str, note: str) -> None:
        self.hits[kind] += 1
        self.struck.add(kind)
        done = Job._count(self.folder / "steps.csv") * self.every
        print(f"{self.now:7.0f} s  {done:6} steps  {kind} {note}", flush=True)

    def _fill_disk(self, job: Job) -> None:
        """Fill the run's disk until the run has ended of it, and empty it again."""
        filler = self.folder.parent / "filler"
        try:
            deadline = time.monotonic() + 120 * slack()
            while job.main.poll() is None:
                assert time.monotonic() < deadline, f"a full disk was not noticed:\n{job.text()}"
                with suppress(OSError), filler.open("ab", buffering=0) as file:
                    while file.write(bytes(2**16)):
                        pass
                time.sleep(0.1)
        finally:
            filler.unlink(missing_ok=True)

    def _ended(self, job: Job) -> int:
        """What a job's end tells, once all its processes are gone."""
        code, seconds = job.end(10 * slack())
        allowed = {0}.union(*(KINDS[kind][1] for kind in self.struck))
        assert code in allowed, (code, self.struck, job.text())
        assert "Traceback" not in re.sub(TRACKER, "", job.text()), job.text()
        assert not orphaned_blocks(job.blocks)
        self.ends[code] += 1
        self.waits.append(seconds)
        print(f"{self.now:7.0f} s  ended with {code}: {job.text().splitlines()[-1:]}", flush=True)
        return code

    def check(self) -> None:
        """That nothing was lost and nothing grew, in figures."""
        facts = result(self.folder)
        goodput = facts["goodput"]
        parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in goodput["seconds"].items())
        causes = Counter(end["cause"] for end in goodput["ends"])
        ends = ", ".join(f"{count} x {code}" for code, count in sorted(self.ends.items()))
        print(f"{sum(self.hits.values())} disturbances: {', '.join(f'{n} x {kind}' for kind, n in self.hits.items())}")
        print(f"launchers ended with {ends}; all processes gone within {max(self.waits):.1f} s")
        print(f"{goodput['attempts']} attempts: {', '.join(f'{n} x {cause}' for cause, n in causes.items())}")
        print(f"goodput {goodput['fraction']:.0%} of {goodput['wall_s']:.0f} s, {self.wall:.0f} by this clock: {parts}")
        for note in goodput["notes"]:
            print(f"  {note}")
        self._tell_samples()
        left, kept = (len(os.listdir(path)) for path in (self.home / "tmp", self.folder))
        print(f"{left} files left in the temporary folder, {kept} in the run's", flush=True)
        assert facts["steps"] == self.steps
        same(self.folder, self.whole)
        assert not (more := grown(self.samples, self.seconds)), more
        assert abs(goodput["wall_s"] - self.wall) < max(30.0, 0.02 * self.wall), (goodput, self.wall)
        print("the same weights and losses as the undisturbed run; memory flat, threads and files bounded", flush=True)

    def _tell_samples(self) -> None:
        roles: dict[str, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            roles[sample.role].append(sample)
        print(f"{'process':32} {'lives':>5} {'oldest':>8} {'MiB: median':>12} {'most':>6} {'threads':>8} {'files':>6}")
        for role, found in sorted(roles.items()):
            memory = [sample.memory / 2**20 for sample in found]
            lives, oldest = len({sample.pid for sample in found}), max(sample.age for sample in found)
            most = [max(getattr(sample, what) for sample in found) for what in ("threads", "files")]
            print(
                f"{role:32} {lives:5} {oldest:6.0f} s {statistics.median(memory):12.1f} {max(memory):6.1f} "
                f"{most[0]:8} {most[1]:6}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    print(f"--seed={asked.seed}", flush=True)
    hear_signals()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left behind
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    with small_disk(home / "disk", "96m") as small:
        kinds = [kind for kind in KINDS if small or kind != "full disk"]
        if left_out := KINDS.keys() - kinds:
            print(f"not possible here: {', '.join(left_out)}")
        soak = Soak(home, 60 * asked.minutes, asked.seed, kinds)
        try:
            soak.run()
            soak.check()
        except BaseException as error:
            shutil.copytree(soak.folder, home / "failed")
            error.add_note(f"--seed={asked.seed}, the run is in {home / 'failed'}")
            raise
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
