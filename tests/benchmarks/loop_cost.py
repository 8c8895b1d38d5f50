"""Cost of our loop: one step against one step of a raw PyTorch loop, tiny CNN, CIFAR-10's shape,
batch 32.

    python tests/benchmarks/loop_cost.py [--steps 600] [--pairs 9] [--threads 1]

Row 1: both read the same torch DataLoader; ours has TensorBoard, a progress bar and its metrics on.
Row 2: ours reads its in-memory batches, raw its DataLoader. The variants alternate in one process
(raw, row 1, row 2, raw, ...); printed are medians and, pair by pair, ratios.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import load_recipe, register_dataset, register_model
from trainer.data import Batch, Loader
from trainer.training import loop, setup

IMAGES = torch.randint(
    0,
    256,
    (50_000, 3, 32, 32),
    dtype=torch.uint8,
    generator=torch.Generator().manual_seed(0),
)
LABELS = torch.randint(
    0,
    10,
    (50_000,),
    generator=torch.Generator().manual_seed(1),
)
SCALED = IMAGES.float().div_(255).sub_(0.5).div_(0.25)
BATCH = 32


def tiny(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Two strided convolutions and a linear layer: about a millisecond a step."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


register_model("tiny")(tiny)
register_dataset("pictures")(
    lambda data: ((IMAGES, LABELS), (IMAGES[:320], LABELS[:320]), tuple(str(n) for n in range(10)))
)


def torch_loader() -> DataLoader:
    return DataLoader(TensorDataset(SCALED, LABELS), BATCH, shuffle=True, drop_last=True)


def raw(steps: int) -> float:
    """Return the seconds per step of a plain loop, like that of a tutorial, with a fused
    optimizer.
    """
    torch.manual_seed(0)
    model = tiny(10, 3, 32).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.1,
        momentum=0.9,
        fused=True,
    )
    criterion = nn.CrossEntropyLoss()
    batches = iter(torch_loader())
    begun = time.perf_counter()
    for finished in range(steps):
        if finished == steps // 10:
            begun = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - begun) / (steps - steps // 10)


class TorchBatches(Loader):
    """Our loader's place taken by torch's DataLoader."""

    def training(self, epoch: int, start_step: int = 0, stop_step: int | None = None):
        for images, labels in torch_loader():
            yield Batch(images, labels, len(labels))


class Terminal(io.StringIO):
    """A terminal for the progress bar, because printing costs time, too."""

    def isatty(self) -> bool:
        return True


def ours(steps: int, loader: type[Loader]) -> float:
    """Seconds a step of the real loop, logging included."""
    marks: list[float] = []
    inner = loop.build_learning_rate

    def marked(*schedule):
        rate = inner(*schedule)

        def timed(step):
            if step in (steps // 10, steps - 1):
                marks.append(time.perf_counter())
            return rate(step)

        return timed

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "mode=single",
            "model.name=tiny",
            "data.name=pictures",
            f"batch_size={BATCH}",
            "epochs=1",
            "threads=1",
        ]
        recipe = load_recipe(None, *words, f"max_steps={steps}", f"output={Path(folder, 'run')}")
        kept = (setup.Loader, loop.build_learning_rate, sys.stdout, sys.stderr)
        setup.Loader = loader
        loop.build_learning_rate = marked
        sys.stdout, sys.stderr = io.StringIO(), Terminal()
        try:
            loop.run(recipe.replace(threads=torch.get_num_threads()))
        finally:
            setup.Loader, loop.build_learning_rate, sys.stdout, sys.stderr = kept
    return (marks[1] - marks[0]) / (steps - 1 - steps // 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    variants = {
        "raw loop, DataLoader": lambda: raw(options.steps),
        "row 1: ours, the same DataLoader": lambda: ours(options.steps, TorchBatches),
        "row 2: ours, in-memory batches": lambda: ours(options.steps, Loader),
    }
    for run in variants.values():
        run()  # warm up
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.pairs):
        for name, run in variants.items():
            times[name].append(run())
    base = times["raw loop, DataLoader"]
    print(
        f"torch {torch.__version__}, {options.threads} thread(s), {options.pairs} rounds of "
        f"{options.steps} steps"
    )
    print(f"{'':34} {'ms a step':>10} {'ratio to raw: median':>21} {'min':>6} {'max':>6}")
    for name, candidate in times.items():
        ratios = [a / b for a, b in zip(candidate, base, strict=True)]
        milliseconds = 1e3 * statistics.median(candidate)
        print(
            f"{name:34} {milliseconds:10.3f} {statistics.median(ratios):21.3f} "
            f"{min(ratios):6.3f} {max(ratios):6.3f}"
        )


if __name__ == "__main__":
    main()
