"""The real command line, for tests of whole runs."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.warm import Popen, run

PROJECT = Path(__file__).parent.parent
# A run of few steps takes half the time without.
BARE = [
    "logging.tensorboard=false",
    "logging.verdict=false",
]
WHOLE = ["logging.progress=false", "logging.every_steps=1", "logging.warmup_steps=1"]
QUIET = [*WHOLE, *BARE]
# Variables that change a run, and variables that are read only when they are needed.
AMBIENT = (
    "NPROC|NNODES|NODE_RANK|PET_|RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC_|"
    "TRAINER_(?!DATA$)"
)
LATE = f"{AMBIENT}|TRAINER_DATA|FAULTY_|GLOO_|HOME$|MLFLOW_|WANDB_|PATH$|PYTHONPATH$|TORCH_HOME$"


def digest(path):
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def environment(**changes):
    """Return the environment of this process for a run on the CPU, without the variables that would
    change the run.
    """
    plain = {
        key: value for key, value in os.environ.items() if not re.match(f"{AMBIENT}|OMP_", key)
    }
    # A process has one thread, because threads of tests that run at the same time wait for each
    # other.
    return {
        **plain,
        "PYTHONPATH": str(PROJECT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


def trainer(*words, env=None, timeout=180, cwd=None, python=()):
    """Run `python -m trainer words...`; return the finished process.

    It is forked from a process that has imported torch already (see `tests.warm`), unless `env`
    says what others read as they are imported.
    """
    start = (
        run if not python and all(re.match(LATE, name) for name in env or {}) else subprocess.run
    )
    command = [sys.executable, *python, "-m", "trainer", *map(str, words)]
    return start(
        command,
        env=environment(**(env or {})),
        timeout=timeout,
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def ok(*words, **options):
    completed = trainer(*words, **options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed


def python(*words, start=subprocess.run, **options):
    """Run Python, a new process unless `start` is `tests.warm.run`; returns the finished
    process.
    """
    usual = {
        "cwd": PROJECT,
        "env": environment(),
        "timeout": 60,
        "capture_output": True,
        "text": True,
    }
    return start([sys.executable, *map(str, words)], **{**usual, **options})


def within(seconds, condition):
    """Return the value of a condition as soon as it is true, and after `seconds` in any case."""
    deadline = time.monotonic() + seconds
    while not (actual := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return actual


def suggested(text):
    """Return the settings that a message suggests, as "try batch_size=64" does."""
    value = r"\[[^]]*\]|[^\s.,;:?)][^\s,;:?)]*"
    return re.findall(
        rf"(?:did you mean|as in|or|set|try|type|use|write) ([a-z_]+(?:\.[a-z_]+)?=(?:{value}))",
        text,
    )


def suggested_commands(text):
    """Return the whole commands that a message suggests."""
    message = re.findall(
        r"type ((?:python -m trainer|\./launch\.sh|torchrun) .*?)(?:$|[,;:] | without | \()",
        text,
        re.M,
    )
    return [command.replace(" ... ", " recipe=digits ") for command in message]


def latest(*words):
    """Return the arguments without those whose key is given again later."""
    return [*{word.partition("=")[0]: word for word in words}.values()]


def rows(file):
    """A CSV file's, by the names in its first line."""
    with Path(file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def steps(folder):
    return rows(Path(folder) / "steps.csv")


def losses(folder):
    return [float(row["train_loss"]) for row in steps(folder)]


def result(folder):
    return json.loads((Path(folder) / "result.json").read_text())


@contextmanager
def torchrun(*words, arguments=(), env=None, cwd=None):
    """A torchrun that the user starts, as a process; it does not outlive the block."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *arguments,
        "-m",
        "trainer",
        *map(str, words),
    ]
    pipe = subprocess.PIPE
    started = Popen(
        command,
        env=environment(**(env or {})),
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
    )
    try:
        yield started
    finally:
        started.kill()  # The kernel kills the ranks with it, because they asked for that.
        started.wait()


def wait_for(condition, process=None, seconds=60):
    """Wait until a condition is true.

    Assert that `process`, which should make it true, has not ended before.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "ended early"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def alive(pid):
    """Whether a process runs, or could."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def blocks():
    """Blocks of shared memory that have a name; semaphores are not counted, which any program may
    have for a moment.
    """
    with os.scandir("/dev/shm") as entries:
        return {
            entry.name
            for entry in entries
            if not entry.name.startswith("sem.") and not entry.is_dir()
        }


def orphaned_blocks(before):
    """Return new blocks of shared memory that no living process maps; other programs and other
    tests have blocks, too.
    """
    left = blocks() - before
    for pid in filter(str.isdigit, os.listdir("/proc")) if left else ():
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            left -= {name for name in left if name in maps}
    return {name for name in left if (Path("/dev/shm") / name).exists()}


def written(folder):
    """(tag, step) of every value, sorted."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = []
    for path in filter(Path.is_file, folder.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            events += [(value.tag, event.step) for value in event.summary.value]
    return sorted(events)


def scalars(folder):
    """(step, value) of every scalar, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
