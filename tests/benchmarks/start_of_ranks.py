"""Seconds until the first step of two ranks on digits, and from a killed rank to the next new step.

    python tests/benchmarks/start_of_ranks.py [--rounds 5]

Start: from the command until the row of step 1 is in steps.csv, against a script with
DistributedDataParallel that torchrun starts, from the command until it has printed its first loss.
The script trains a small network on random images of the same shape. The variants alternate, and
ratios are taken round by round.

Restart: rank 1 is killed before step 40 of a run that saves every 5 steps, and `max_restarts=1`
starts it again. The time is that between the rows of step 39 and step 40.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.command_line import free_port

QUIET = ["threads=1", "mode=ddp", "logging.progress=false", "logging.every_steps=1"]
KILLED = 40
BARE = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.set_num_threads(1)
data = TensorDataset(torch.rand(1437, 1, 8, 8), torch.randint(0, 10, (1437,)))
loader = DataLoader(data, 32, sampler=DistributedSampler(data))
layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for inputs, targets in loader:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(loss.item(), flush=True)
    break
dist.destroy_process_group()
"""


def count_rows(file: Path) -> int:
    """Return the number of the last step in steps.csv, or 0."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return int(lines[-1].partition(",")[0]) if len(lines) > 1 and lines[-1][:1].isdigit() else 0


def wait_for_step(file: Path, step: int, process: subprocess.Popen[bytes]) -> float:
    """Return the time at which a step is in steps.csv."""
    while count_rows(file) < step:
        if process.poll():
            sys.exit(f"a run ended with exit code {process.returncode}")
        time.sleep(0.005)
    return time.perf_counter()


def torchrun() -> list[str]:
    port = f"--master_port={free_port()}"
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", port]


def start_own() -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [*QUIET, "recipe=digits", "max_steps=5", f"output={folder}/run"]
        command = [*torchrun(), "-m", "trainer", *words]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        seconds = wait_for_step(Path(folder, "run", "steps.csv"), 1, process) - begun
        process.wait()
        return seconds


def start_bare() -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bare.py")
        script.write_text(BARE)
        command = [*torchrun(), str(script)]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout
        process.stdout.readline()
        seconds = time.perf_counter() - begun
        process.communicate()
        return seconds


def restart() -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [*QUIET, "recipe=digits", "nproc=2", "max_restarts=1", "save.every_steps=5"]
        words += [f"max_steps={KILLED + 5}", f"output={folder}/run"]
        env = {**os.environ, "TRAINER_FAULT": f"kill@1:{KILLED}"}
        command = [sys.executable, "-m", "trainer", *words]
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, env=env, stdout=null, stderr=null)
        file = Path(folder, "run", "steps.csv")
        begun = wait_for_step(file, KILLED - 1, process)
        seconds = wait_for_step(file, KILLED, process) - begun
        process.wait()
        return seconds


def describe(figures: list[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pairs = [(start_own(), start_bare()) for _ in range(options.rounds)]
    own, bare = ([*times] for times in zip(*pairs, strict=True))
    print(f"first step: {describe(own)} s, a bare script: {describe(bare)} s")
    print(f"ratio: {describe([one / two for one, two in pairs])}")
    print(f"killed rank to next step: {describe([restart() for _ in range(options.rounds)])} s")


if __name__ == "__main__":
    main()
