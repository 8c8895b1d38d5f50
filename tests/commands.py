"""The real command line, for tests of whole runs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent
QUIET = ["logging.progress=false", "logging.every_steps=1", "logging.warmup_steps=1"]


def trainer(*words, env=None, timeout=180, cwd=None, python=()):
    """Run `python -m trainer words...`; returns the finished process."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": "", **(env or {})}
    command = [sys.executable, *python, "-m", "trainer", *map(str, words)]
    return subprocess.run(command, env=environment, timeout=timeout, cwd=cwd, capture_output=True, text=True)


def ok(*words, **options):
    done = trainer(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def steps(folder):
    with (Path(folder) / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    return [float(row["train_loss"]) for row in steps(folder)]


def result(folder):
    return json.loads((Path(folder) / "result.json").read_text())


def torchrun(*words, arguments=(), env=None):
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": "", **(env or {})}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "-m", "trainer", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
