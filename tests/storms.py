"""Storms: whole jobs are killed, signaled and stopped at random moments, resumed, and compared with
an undisturbed run.

    python -m tests.storms --kills=400 --signals=600 --stops=200 --pauses=40 --starts=100

A storm hits one run folder several times; each hit comes from the seed, which a failure names.
After each hit: no process left, nothing in shared memory, no traceback, an exit code that fits; at
the end every step once, and losses and weights of the undisturbed run, to the bit where the mode is
deterministic.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import warm
from tests.command_line import blocks, environment, orphaned_blocks, result, steps
from trainer.processes.interrupts import LOST_PEER_SECONDS

WORDS = [
    "recipe=digits",
    "model.name=cnn_gn",
    "batch_size=64",
    "optimizer.lr=0.001",
    "epochs=6",
    "ema=0.9",
    "threads=1",
    "save.every_steps=5",
    "logging.every_steps=1",
    "logging.progress=false",
    "resume=auto",
]
PIPELINE = ["mode=pipeline", "pipeline.microbatches=4"]
# Cuts by name, because measuring twice might give different cuts.
TWO, FOUR = (
    "pipeline.cuts=['7']",
    "pipeline.cuts=['1','4','7']",
)
REPLAYED = ["graphs=true", "plugin=tests.simulated.tape_plugin"]  # The plugin gives the CPU graphs.
MODES = {
    "single": ["mode=single"],
    "dp": ["mode=dp", "devices=[cpu,cpu]"],
    "ddp": ["mode=ddp", "nproc=2"],
    "fsdp": ["mode=fsdp", "nproc=2"],
    "split": ["mode=split", "devices=[cpu,cpu]", TWO],
    "streams": [*PIPELINE, "devices=[cpu,cpu]", TWO],
    "1f1b": [*PIPELINE, "nproc=2", TWO],
    "gpipe": [*PIPELINE, "nproc=2", "pipeline.schedule=gpipe", TWO],
    "interleaved1f1b": [*PIPELINE, "nproc=2", "pipeline.schedule=interleaved1f1b", FOUR],
    "zbv": [*PIPELINE, "nproc=2", "pipeline.schedule=zbv", FOUR],
    "1f1b 2x2": [*PIPELINE, "nproc=4", "pipeline.stages=2", TWO],
    "local_sgd": ["mode=local_sgd", "nproc=2"],
    "hogwild": ["mode=hogwild", "nproc=2"],
    "single replayed": ["mode=single", *REPLAYED],
    "ddp replayed": ["mode=ddp", "nproc=2", *REPLAYED],
    "streams replayed": [*PIPELINE, "devices=[cpu,cpu]", TWO, *REPLAYED],
}
# Runs with a long start, in which kernels are compiled in C++ and micro-batches measured. They only
# get signals.
SLOW_STARTS = {
    "single compiled": [*MODES["single"], "compile=true"],
    "ddp compiled": [*MODES["ddp"], "compile=true"],
    "1f1b measured": ["mode=pipeline", "nproc=2", "pipeline.microbatches=auto", TWO],
}
# lock-free updates; what is measured may be another number each time.
UNLIKE = (
    "hogwild",
    "1f1b measured",
)
SEVERAL = [
    name for name, words in MODES.items() if any(word.startswith("nproc=") for word in words)
]
TIMEOUT = 5  # seconds that a stopped rank is waited for
# Messages of Python's own resource tracker, if it was killed and started again, about resources of
# the previous one.
TRACKER = r'Traceback .*\n  File ".*/resource_tracker\.py", line .*\n.*\nKeyError: .*\n'
PHASES = ("start-up", "loading", "banner", "steps", "steps", "evaluation", "saving", "end")
SIGNALS = ("SIGTERM", "SIGTERM to all", "SIGINT", "SIGINT twice", "SIGHUP", "SIGUSR1", "SIGUSR2")
HITS = {  # Attacks: their effect, the modes they apply to, and their default number.
    "kills": (("kill",), [*MODES], 40),
    "signals": (SIGNALS, [*MODES, *SLOW_STARTS], 60),
    "stops": (("stop",), SEVERAL, 20),
    "pauses": (("pause",), SEVERAL, 10),
    "starts": (("start",), [*MODES], 40),
}


def shown(code: int) -> int:
    """An exit code as a shell has it."""
    return code if code >= 0 else 128 - code


def slack() -> float:
    """Return how much slower the machine is than a quiet one, because others use it."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


@dataclass
class Hit:
    """An attack on a job: its kind, its time, and how the job ended."""

    kind: str
    phase: str
    at: str = ""
    victim: str = ""
    code: int = 0
    seconds: float = 0.0
    output: str = field(default="", repr=False)


class Job:
    """A start of a run.

    All its processes are known by a mark in their environment. `start` is like `subprocess.Popen`.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        start: type[subprocess.Popen[bytes]] = subprocess.Popen,
        torchrun: bool = False,
        fault: str = "",
    ) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.blocks = blocks()
        self.out = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the job
        self.begun = time.monotonic()
        self.rows = len(steps(folder)) if (folder / "steps.csv").exists() else 0
        self.attempts = self._count(folder / "journal.jsonl", 0)
        self.unfinished = self._unfinished()  # checkpoints that the one before it began
        kernels = (
            {"TORCHINDUCTOR_CACHE_DIR": str(folder.with_name(self.mark))}
            if "compile=true" in words
            else {}
        )
        before = ["-m"]
        if torchrun:  # the user's own
            count = next((word[6:] for word in words if word.startswith("nproc=")), "1")
            before = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={count}",
                "-m",
            ]
            words = tuple(word for word in words if not word.startswith("nproc="))
        self.words = words
        self.main = start(
            [sys.executable, *before, "trainer", *words, f"output={folder}"],
            env=environment(STORM=self.mark, TRAINER_FAULT=fault, **kernels),
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def text(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def members(self) -> dict[int, str]:
        """Living processes of this job: pid -> RANK, or "" for the launcher and helpers."""
        collected = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    continue
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"STORM={self.mark}".encode() in words:
                    ranks = [word[5:].decode() for word in words if word.startswith(b"RANK=")]
                    # The name of a forked process.
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    ranks += [name.removeprefix("rank ")] * name.startswith("rank ")
                    collected[int(pid)] = ranks[0] if ranks else ""
        return collected

    def ranks(self) -> dict[str, int]:
        """Return the pid of each rank: the process that the launcher started."""
        collected: dict[str, int] = {}
        for pid, rank in sorted(self.members().items()):
            if rank:
                collected.setdefault(rank, pid)
        return collected or {"0": self.main.pid}

    def wait_for(self, phase: str, dice: random.Random) -> str | None:
        """Wait for a moment of this phase. Return it, or None if the job ended before."""
        log = self.folder / "steps.csv"
        delay = dice.uniform(0, 4)
        target = dice.randint(1, 45)
        pause = dice.uniform(
            0, {"loading": 0.3, "measured": 1.0, "compiled": 12.0}.get(phase, 0.05)
        )
        until = {
            "start-up": lambda: time.monotonic() - self.begun > delay,
            "loading": lambda: self._count(self.folder / "journal.jsonl", 0) > self.attempts,
            "measured": lambda: self._count(self.folder / "journal.jsonl", 0) > self.attempts,
            "banner": lambda: "trainer 0.2.0" in self.text(),
            "compiled": lambda: "trainer 0.2.0" in self.text(),
            "steps": lambda: self._count(log) >= self.rows + target,
            "evaluation": lambda: self._count(log) % 22 == 0 and self._count(log) > self.rows,
            "saving": lambda: self._unfinished() - self.unfinished,
            "end": lambda: self._count(log) >= 6 * 22 > self.rows,
        }[phase]
        deadline = self.begun + 120 * slack()
        while not until():
            if self.main.poll() is not None:
                return None
            assert time.monotonic() < deadline, f"no {phase} within two minutes:\n{self.text()}"
            time.sleep(0.002)
        time.sleep(0 if phase in ("start-up", "steps", "saving") else pause)
        return f"{time.monotonic() - self.begun:.2f} s, {self._count(log)} rows"

    def _unfinished(self) -> set[Path]:
        return {*(self.folder / "checkpoints").glob("*.tmp-*")}

    @staticmethod
    def _count(log: Path, head: int = 1) -> int:
        """Lines below the heading."""
        try:
            return max(0, log.read_bytes().count(b"\n") - head)
        except OSError:
            return 0

    def end(self, limit: float) -> tuple[int, float]:
        """Return the exit code and the seconds until all processes were gone, at most `limit`."""
        asked = time.monotonic()
        code = None
        while time.monotonic() - asked < limit:
            code = self.main.poll()
            if code is not None and not self.members():
                return code, time.monotonic() - asked
            time.sleep(0.02)
        left = self.members()
        self.clear()
        raise AssertionError(f"after {limit:.0f} s exit code {code}, left: {left}\n{self.text()}")

    def ends(self, limit: float, *codes: int) -> None:
        """Assert that the job ends with one of these exit codes and leaves nothing behind."""
        code, _ = self.end(limit * slack())
        assert shown(code) in codes and "Traceback" not in self.text(), (
            code,
            codes,
            self.words,
            self.text(),
        )
        assert not orphaned_blocks(self.blocks), self.words

    def clear(self) -> None:
        for pid in self.members():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.main.wait()


def strike(
    job: Job,
    kind: str,
    phase: str,
    dice: random.Random,
) -> Hit | None:
    """Kill, signal or stop a job in a phase, wait for its end and check it.

    Return None if the job had ended before.
    """
    hit = Hit(kind, phase)
    at = job.wait_for(phase, dice)
    if at is None:
        return None
    hit.at = at
    limit = 5.0
    with suppress(ProcessLookupError):  # The process has just ended.
        if kind == "kill":
            if not (members := sorted(job.members().items())):  # The job has just ended.
                return None
            pid, rank = dice.choice(members)
            itself = job.ranks().get(rank) == pid  # and not, say, its watchdog
            hit.victim = (
                f"rank {rank}" if itself else "the launcher" if pid == job.main.pid else "a helper"
            )
            os.kill(pid, signal.SIGKILL)
            # The process is a launcher's own or does not belong to us, so the job need not end.
            if hit.victim == "a helper":
                limit = 60.0
        elif kind == "start":
            hit.victim = "the launcher"
            job.main.kill()
        elif kind == "stop":
            rank, pid = dice.choice(sorted(job.ranks().items()))
            # A woken rank may get torchrun's SIGTERM before it detects that its peers are gone; it
            # leaves SHORTEST seconds later.
            hit.victim = f"rank {rank}"
            limit = TIMEOUT + LOST_PEER_SECONDS + 3.0
            os.kill(pid, signal.SIGSTOP)
        elif kind == "pause":
            hit.victim = "all"
            limit = 120.0
            pause(job, TIMEOUT + dice.uniform(1, 4))
        else:
            limit = 20.0
            name, _, rest = kind.partition(" ")
            number = signal.Signals[name]
            targets = list(job.members()) if rest == "to all" else [job.main.pid]
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if rest == "twice":
                time.sleep(dice.uniform(0, 0.5))
                with suppress(ProcessLookupError):
                    os.kill(job.main.pid, number)
    hit.code, hit.seconds = job.end(limit * slack())
    hit.output = job.text()
    check(hit, job)
    return hit


def pause(job: Job, seconds: float) -> None:
    """Stop all processes of a job, like a scheduler that suspends it, and continue them.

    Its last rank first, so that the others wait for it as they are stopped.
    """
    os.kill(job.ranks()[max(job.ranks())], signal.SIGSTOP)
    time.sleep(2)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in job.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(seconds if number is signal.SIGSTOP else 0)


def check(hit: Hit, job: Job) -> None:
    """Assert that a job ended as it should."""
    code = shown(hit.code)
    name = hit.kind.split()[0]
    # Hit too late.
    finished = [0] * any(
        '"completed"' in path.read_text() for path in job.folder.glob("result.json")
    )
    if name == "kill":
        allowed = (
            [0, 7, 128 + signal.SIGKILL]
            if hit.victim == "a helper"
            else [7, 128 + signal.SIGKILL, *finished]
        )
    elif name == "start":
        allowed = [128 + signal.SIGKILL, *finished]
    elif name == "stop":
        allowed = [7, *finished]
    elif name == "pause":
        allowed = [0]
    elif name == "SIGINT":
        allowed = [130, *finished]
    else:
        # Python itself was still starting.
        early = [128 + signal.Signals[name]] if hit.phase == "start-up" else []
        allowed = [143, *early, *finished]
    assert code in allowed, (code, allowed, hit.output)
    assert "Traceback" not in re.sub(TRACKER, "", hit.output), hit.output
    # The trained steps are kept.
    if code == 143 and Job._count(job.folder / "steps.csv") != job.rows:
        trained = int(steps(job.folder)[-1]["step"])
        saved = max((job.folder / "checkpoints").glob("step-????????"))
        assert trained == int(saved.name[5:]), (trained, saved, hit.output)
    # A rank that lost one of the others first cannot say for how long.
    if name == "stop" and code == 7:
        assert re.search(
            rf"{hit.victim}( was silent for {TIMEOUT} s)?: it is stopped", hit.output
        ), hit.output
    assert not orphaned_blocks(job.blocks)


def same(folder: Path, whole: Path) -> None:
    """Assert that two runs have the same steps, losses and weights, to the bit."""
    rows = steps(folder), steps(whole)
    for key in ("step", "epoch", "train_loss", "lr"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key
    for name in ("last.safetensors", "best.safetensors"):
        one = load_file(folder / name)
        two = load_file(whole / name)
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), (
            name
        )
    assert result(folder)["losses"] == result(whole)["losses"]


class Storms:
    """Storms over all modes, with the undisturbed run of each; `start` is as `Job` has it."""

    def __init__(
        self, home: Path, seed: int, start: type[subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        self.home = home
        self.seed = seed
        self.start = start
        self.count = 0

    def undisturbed(self, mode: str, words: list[str]) -> Path:
        folder = self.home / f"whole {mode}"
        if not folder.exists():
            self.finish(folder, *words)
        return folder

    def storm(self, mode: str, kinds: list[str]) -> list[Hit]:
        """Hit one run again and again, end it undisturbed, and compare."""
        self.count += 1
        dice = random.Random(f"{self.seed} {self.count}")
        folder = self.home / f"{self.count} {mode}"
        words = [*WORDS, *(MODES | SLOW_STARTS)[mode]]
        soon = [f"timeout={TIMEOUT}"] if {"stop", "pause"} & {*kinds} else []
        hits: list[Hit] = []
        phase = ""
        try:
            for kind in kinds:
                under_way = dict.fromkeys(("stop", "pause"), PHASES[3:7])
                usual = (*PHASES, *mode.split()[1:] * 8) if mode in SLOW_STARTS else PHASES
                phases = {"start": PHASES[:1], **under_way}.get(kind, usual)
                torchrun = kind == "start" and mode in SEVERAL and dice.random() < 0.5
                with Job(folder, *words, *soon, torchrun=torchrun, start=self.start) as job:
                    phase = dice.choice(phases)
                    hit = strike(job, kind, phase, dice)
                if hit is None or (kind in SIGNALS and hit.code == 0):  # The job had ended before.
                    break
                hits.append(hit)
                message = f"{mode:16} {hit.kind:16} {hit.phase:10} {hit.at:22} {hit.victim:12}"
                print(f"{message} {hit.code} {hit.seconds:.1f} s")
            self.finish(folder, *words)
            self.compare(mode, folder, words)
        except BaseException as error:
            what = f"storm {self.count}, {mode}, {kinds}, after {hits}, {phase}, in {folder}"
            error.add_note(f"--seed={self.seed}, {what}")
            raise
        return hits

    def finish(self, folder: Path, *words: str) -> None:
        """A run to its end."""
        with Job(folder, *words, start=self.start) as job:
            job.ends(120, 0)

    def compare(self, mode: str, folder: Path, words: list[str]) -> None:
        rows = steps(folder)
        facts = result(folder)
        assert facts["status"] == "completed"
        assert [int(row["step"]) for row in rows] == list(range(1, facts["steps"] + 1)), [
            row["step"] for row in rows
        ]
        if mode in UNLIKE:
            return
        same(folder, self.undisturbed(mode, words))

    def run(
        self,
        kinds: tuple[str, ...],
        count: int,
        modes: list[str],
    ) -> list[Hit]:
        """`count` hits of these kinds, one after the other, over these modes; three a storm, or six
        that save.
        """
        each = 6 if kinds == SIGNALS else 3
        hits: list[Hit] = []
        for mode in itertools.cycle(modes):
            left = count - len(hits)
            if left <= 0:
                return hits
            hits += self.storm(
                mode, [kinds[(len(hits) + n) % len(kinds)] for n in range(min(each, left))]
            )
        return hits


def hear_signals() -> None:
    """Restore signals that a shell's `&` and nohup ignore, for all processes that are started from
    now on, too.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (_, _, count) in HITS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
    )
    parser.add_argument(
        "--warm", action="store_true", help="jobs are forked from a process that has imported torch"
    )
    every = [*MODES, *SLOW_STARTS]
    parser.add_argument("--modes", nargs="*", default=every, choices=every)
    asked = parser.parse_args()
    hear_signals()
    print(f"--seed={asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="storms-") as home:
        storms = Storms(
            Path(home),
            asked.seed,
            warm.Popen if asked.warm else subprocess.Popen,
        )
        begun = time.monotonic()
        for name, (kinds, some, _) in HITS.items():
            modes = [mode for mode in asked.modes if mode in some]
            if modes and (hits := storms.run(kinds, getattr(asked, name), modes)):
                seconds = sorted(hit.seconds for hit in hits)
                p50, p99, most = (
                    seconds[(len(seconds) - 1) * part // 100] for part in (50, 99, 100)
                )
                within = f"ended within {p50:.1f} s (half), {p99:.1f} s (99 %), {most:.1f} s (all)"
                print(f"{len(hits)} x {', '.join(kinds)}: {within}", flush=True)
                for what in ("kind", "phase"):
                    slowest = {
                        getattr(hit, what): hit.seconds
                        for hit in sorted(hits, key=lambda hit: hit.seconds)
                    }
                    print(
                        "  slowest: "
                        + ", ".join(
                            f"{name} {value:.1f} s" for name, value in sorted(slowest.items())
                        )
                    )
        print(f"all held, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
