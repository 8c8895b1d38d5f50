"""How well two workers share a machine: DDP against two independent processes, a pipeline against
DDP, Hogwild and local SGD against one.

    # ResNet-50, 64 px, synthetic; also --batch 96
    python tests/benchmarks/workers.py ddp --batch 384
    python tests/benchmarks/workers.py pipeline --batch 384
    # Small CNN, 32 px, batch 32 a worker
    python tests/benchmarks/workers.py hogwild
    python tests/benchmarks/workers.py local_sgd

Every process has one thread. The variants alternate; each is a fresh `python -m trainer` and its
figure is the throughput of its result.json, averaging and waiting included, start, evaluation and
warm-up left out. A ratio is taken round by round. Two independent processes run at the same time
and their throughputs are added up: the machine's bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

QUIET = [
    "threads=1",
    "logging.progress=false",
    "logging.tensorboard=false",
    "save.every_epochs=null",
]


class Run:
    """A training run in the background."""

    def __init__(self, words: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.output = Path(self.folder.name, "run")
        command = [sys.executable, "-m", "trainer", *QUIET, *words, f"output={self.output}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def rate(self) -> float:
        """Images a second."""
        if self.process.wait():
            sys.exit(f"a run ended with exit code {self.process.returncode}")
        actual: float = json.loads((self.output / "result.json").read_text())["throughput"][
            "samples_per_sec"
        ]
        self.folder.cleanup()
        return actual


def ddp(options: argparse.Namespace) -> tuple[list[list[str]], list[list[str]]]:
    """DDP over two ranks and two processes with half the batch each, or a pipeline and DDP."""
    words = [
        "model.name=resnet50",
        "data.name=synthetic",
        f"data.image_size={options.size}",
        "data.val_samples=2",
    ]
    words += [f"data.samples={options.batch * options.steps}", "epochs=1", "logging.warmup_steps=2"]
    words += ["logging.every_steps=2", "optimizer.lr=0.001"]
    alone = [
        *words,
        "mode=single",
        f"batch_size={options.batch // 2}",
        f"max_steps={options.steps}",
    ]
    two = [*words, "nproc=2", f"batch_size={options.batch}"]
    if options.mode == "pipeline":
        return [[*two, "mode=pipeline"]], [[*two, "mode=ddp"]]
    return [[*two, "mode=ddp"]], [alone, alone]


def together(options: argparse.Namespace) -> tuple[list[list[str]], list[list[str]]]:
    """Two workers of the mode, and one, each with batches of 32; they average after
    each epoch.
    """
    words = [
        "model.name=cnn",
        "data.name=synthetic",
        "data.image_size=32",
        "data.val_samples=2",
        "epochs=3",
    ]
    words += ["logging.warmup_steps=20", "optimizer.lr=0.001"]
    two = [
        *words,
        f"mode={options.mode}",
        "nproc=2",
        "batch_size=64",
        f"data.samples={64 * options.steps}",
    ]
    return [two], [[*words, "mode=single", "batch_size=32", f"data.samples={32 * options.steps}"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["ddp", "pipeline", "hogwild", "local_sgd"])
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, default=0, help="an epoch; default 6 for ddp, 500 for the others"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    is_large = options.mode in ("ddp", "pipeline")
    options.steps = options.steps or (6 if is_large else 500)
    variants = (ddp if is_large else together)(options)
    rates: list[list[float]] = [[], []]
    for _ in range(options.rounds):
        for candidate, words in zip(rates, variants, strict=True):
            runs = [Run(one) for one in words]
            candidate.append(sum(run.rate() for run in runs))
    ratios = [two / one for two, one in zip(*rates, strict=True)]
    against = {"ddp": "two independent processes", "pipeline": "ddp"}.get(
        options.mode, "one worker"
    )
    name = f"{options.mode}, batch {options.batch}" if is_large else options.mode
    print(
        f"{name}: {statistics.median(rates[0]):.1f} images/s, {against}: "
        f"{statistics.median(rates[1]):.1f}; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
