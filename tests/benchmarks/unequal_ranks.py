"""Images per second of two ranks with unequal speed: equal local batches, and local batches by
measured speed.

    python tests/benchmarks/unequal_ranks.py [seconds of an image on each rank] [rounds]

A rank "computes" by sleeping, two thirds of the time in the backward pass, so that two ranks need
no two free cores. What both could do together is the sum of what each does alone, measured in the
same way. Runs are interleaved.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.command_line import ok, result

WORDS = [
    "recipe=digits",
    "plugin=tests.modes.unequal_ranks",
    "model.name=unlike",
    "data.name=synthetic",
    "data.image_size=8",
    "data.channels=1",
    "data.samples=3840",
    "data.val_samples=64",
    "batch_size=128",
    "epochs=2",
]
WORDS += ["logging.progress=false", "logging.verdict=false", "logging.warmup_steps=30"]


def speed(folder: Path, name: str, each: str, *words: str) -> float:
    """Images a second after the first 30 steps, in which shares are measured."""
    run = folder / name
    ok(*WORDS, *words, f"output={run}", cwd=folder, env={"FAULTY_EACH": each})
    return float(result(run)["throughput"]["samples_per_sec"])


def main(each: str = "0.001,0.003", rounds: str = "3") -> None:
    fast, slow = each.split(",")
    collected: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as created:
        folder = Path(created)
        for n in range(int(rounds)):
            alone = [speed(folder, f"{n}-{one}", one, "mode=single") for one in (fast, slow)]
            equal = speed(folder, f"{n}-equal", each, "mode=ddp", "nproc=2")
            auto = speed(folder, f"{n}-auto", each, "mode=ddp", "nproc=2", "shares=auto")
            for name, value in {
                "fast": alone[0],
                "slow": alone[1],
                "equal": equal,
                "auto": auto,
            }.items():
                collected.setdefault(name, []).append(value)
            collected.setdefault("equal / slow", []).append(equal / alone[1])
            collected.setdefault("auto / sum", []).append(auto / sum(alone))
            collected.setdefault("auto / equal", []).append(auto / equal)
    print(f"load {os.getloadavg()[0]:.1f}, seconds of an image {each}, {rounds} rounds")
    for name, values in collected.items():
        print(f"{name:14} {statistics.mean(values):8.4g}  ({min(values):.4g} to {max(values):.4g})")


if __name__ == "__main__":
    main(*sys.argv[1:])
