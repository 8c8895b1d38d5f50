"""What local SGD costs in accuracy beside DDP, by how often it averages and by its outer optimizer.

    python tests/benchmarks/averaging.py --images FOLDER     # of CIFAR-10: FOLDER/train/CLASS and FOLDER/test/CLASS
    python tests/benchmarks/averaging.py                     # the digits that come with scikit-learn, in seconds

A CNN of 24,000 weights is trained by mode=ddp on two processes, and by mode=local_sgd on each number of workers,
averaged every so many steps, with each pair of outer_lr and outer_momentum: for each seed the same images, in steps of
as many. The first images of each class are taken, made half as large and kept in memory. A figure is the share of test
images that are labelled correctly after the last epoch: mean, least and most over the seeds.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trainer import register_dataset, register_model

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
QUIET = ["logging.progress=false", "logging.tensorboard=false", "logging.verdict=false", "save.every_epochs=null"]
DIGITS = ["recipe=digits"]
CIFAR = ["recipe=cifar10", "batch_size=64", "optimizer.lr=0.05", "schedule.warmup_epochs=0.5"]
CIFAR += [
    "data.name=small_images",
    "data.image_size=16",
    "augment.crop_padding=2",
    "model.name=narrow_cnn",
    "plugin=averaging",
]
FILE = "images.pt"


@register_dataset("small_images")
def small_images(data: Any) -> tuple[Any, Any, Any]:
    """What `shrunk` wrote into data.root."""
    parts = torch.load(Path(data.root, FILE))
    return parts["train"], parts["test"], parts["classes"]


@register_model("narrow_cnn")
def narrow_cnn(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Three convolutions with BatchNorm, the image halved between them."""
    layers: list[nn.Module] = []
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if width < 64 else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        channels = width
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))


def shrunk(folder: Path, each: int | None) -> tuple[Tensor, Tensor]:
    """The first `each` images of each class (N, 3, H / 2, W / 2), and their class indices (N,)."""
    images, labels = [], []
    for label, home in enumerate(sorted(folder.iterdir())):
        for path in sorted(home.iterdir())[:each]:
            with Image.open(path) as image:
                images.append(np.asarray(image.convert("RGB").reduce(2)))
            labels.append(label)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def trained(words: list[str]) -> float:
    """The share of test images that a run labels correctly, after its last epoch."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        path = os.pathsep.join(filter(None, [str(PROJECT), str(HERE), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "trainer", *QUIET, *words, f"output={output}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
        top1: float = json.loads((output / "result.json").read_text())["val_top1"]
        return top1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder of train/CLASS and test/CLASS")
    parser.add_argument("--each", type=int, default=2560, help="training images of a class")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--every", type=int, nargs="+", default=[20, 100], help="steps between averagings")
    parser.add_argument("--outer", nargs="+", default=["1,0", "0.7,0.9"], help="outer_lr,outer_momentum")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="gets a row as each run ends")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [*(CIFAR if options.images else DIGITS), f"epochs={options.epochs}"]
        if options.images:
            train, test = shrunk(options.images / "train", options.each), shrunk(options.images / "test", None)
            classes = sorted(path.name for path in (options.images / "train").iterdir())
            torch.save({"train": train, "test": test, "classes": classes}, Path(folder, FILE))
            words += [f"data.root={folder}"]
        measure(words, options)


def measure(words: list[str], options: argparse.Namespace) -> None:
    """Train all variants, seed by seed, and print their figures."""
    variants = {"ddp, 2 processes": ["mode=ddp", "nproc=2"]}
    for workers, every, outer in itertools.product(options.workers, options.every, options.outer):
        lr, momentum = outer.split(",")
        name = f"local_sgd, {workers} workers, every {every} steps, outer_lr {lr}, outer_momentum {momentum}"
        variants[name] = ["mode=local_sgd", f"nproc={workers}", f"local_sgd.every={every}"]
        variants[name] += [f"local_sgd.outer_lr={lr}", f"local_sgd.outer_momentum={momentum}"]
    found: dict[str, list[float]] = {name: [] for name in variants}
    with open(options.csv or os.devnull, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["variant", "seed", "top1"])
        for seed, name in itertools.product(range(1, options.seeds + 1), variants):
            found[name].append(trained([*words, *variants[name], f"seed={seed}"]))
            rows.writerow([name, seed, found[name][-1]])
            file.flush()
    for name, top1 in found.items():
        print(f"{name}: {statistics.mean(top1):.2%} ({min(top1):.2%} to {max(top1):.2%}, {len(top1)} seeds)")


if __name__ == "__main__":
    main()
