"""Goodput of a run whose ranks are killed now and then: ResNet-18 on images as CIFAR-10's, by default for an hour.

    python tests/benchmarks/goodput.py [--minutes 60] [--each 5] [--seed 0] [WORD ...]

One rank after another gets SIGKILL, `--each` minutes apart, and `max_restarts` goes on. Further words are the recipe's.
Printed is what `runs show` tells.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

TRAINER = [sys.executable, "-m", "trainer"]
WORDS = ["recipe=resnet18", "data.name=synthetic", "data.image_size=32", "data.samples=50000", "batch_size=64"]
WORDS += ["augment.crop=pad"]
WORDS += ["nproc=2", "threads=1", "devices=[cpu]", "precision=fp32", "save.every_steps=50", "logging.progress=false"]


def ranks(launcher: int) -> list[int]:
    """The processes that `launcher` has started as ranks: each is named so."""
    under, found = [launcher], []
    for pid in under:
        with suppress(OSError):
            under += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            if Path(f"/proc/{pid}/comm").read_text().startswith("rank "):
                found.append(pid)
    return found


def main() -> None:
    """Train, kill, wait for the next moment; stop after the time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--each", type=float, default=5, help="minutes between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = f"output={folder}/run"
        words = [*WORDS, "max_restarts=1000", run, *more]
        training = subprocess.Popen([*TRAINER, *words], stdout=subprocess.DEVNULL)
        end = time.monotonic() + options.minutes * 60
        while time.monotonic() < end and training.poll() is None:
            time.sleep(max(0, min(options.each * 60, end - time.monotonic())))
            killable = ranks(training.pid)
            if killable and time.monotonic() < end:
                os.kill(dice.choice(killable), signal.SIGKILL)
        training.terminate()
        if training.wait() != 128 + signal.SIGTERM:
            sys.exit(f"the run ended by itself, with exit code {training.returncode}")
        subprocess.run([*TRAINER, "runs", "show", f"{folder}/run"], check=True)


if __name__ == "__main__":
    main()
