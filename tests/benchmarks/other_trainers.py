"""Speed of `mode=ddp` on two ranks of one thread against Accelerate and Lightning.

    pip install accelerate lightning
    python tests/benchmarks/other_trainers.py [--model cnn] [--batch 64] [--steps 400] [--rounds 5]

All train one network with SGD on random images of 32 px that are in memory, 64 a rank and step,
without a progress bar or logs. The others use DistributedDataParallel over gloo and a DataLoader of
a TensorDataset without workers. Each figure is the throughput of a fresh process after 50 steps;
the variants alternate, and ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.command_line import free_port
from trainer.models.zoo import build
from trainer.recipe.schema import ModelRecipe

WARMUP = 50
VARIANTS = ("trainer", "accelerate", "lightning")


def make_parts(options: argparse.Namespace) -> tuple[nn.Module, Any, DataLoader[Any]]:
    """Return network, optimizer and loader; a rank gets a loader of half the images."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build(ModelRecipe(name=options.model), 10, 3, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    count = 2 * options.batch * options.steps
    images = TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))
    return model, optimizer, DataLoader(images, options.batch, shuffle=True, drop_last=True)


class Clock:
    """Seconds from the end of the warm-up to the last step."""

    def __init__(self) -> None:
        self.steps = 0
        self.begun = self.now = 0.0

    def step(self) -> None:
        self.steps += 1
        self.now = time.perf_counter()
        if self.steps == WARMUP:
            self.begun = self.now

    def rate(self, batch: int) -> float:
        return 2 * batch * (self.steps - WARMUP) / (self.now - self.begun)


def train_with_accelerate(options: argparse.Namespace) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*make_parts(options))
    loss_function = nn.CrossEntropyLoss()
    clock = Clock()
    for images, labels in loader:
        loss = loss_function(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    return clock.rate(options.batch)


def train_with_lightning(options: argparse.Namespace) -> float:
    import lightning

    model, optimizer, loader = make_parts(options)
    clock = Clock()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            images, labels = batch
            return nn.functional.cross_entropy(self.model(images), labels)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

        def configure_optimizers(self) -> Any:
            return optimizer

    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)
    return clock.rate(options.batch)


def run_variant(name: str, options: argparse.Namespace) -> float:
    """Return the images/s of a fresh job of two ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    with tempfile.TemporaryDirectory() as folder:
        if name == "trainer":
            words = ["data.name=synthetic", "data.image_size=32", "data.val_samples=2", "epochs=1"]
            words += [f"model.name={options.model}", f"batch_size={2 * options.batch}"]
            words += [f"data.samples={2 * options.batch * options.steps}", "optimizer.lr=0.001"]
            words += ["mode=ddp", f"logging.warmup_steps={WARMUP}", "logging.progress=false"]
            words += ["logging.tensorboard=false", "save.every_epochs=null", "threads=1"]
            command = ["-m", "trainer", *words, f"output={folder}/run"]
        else:
            command = [__file__, "--child", name, "--file", f"{folder}/rate"]
            for key in ("model", "batch", "steps"):
                command += [f"--{key}", str(getattr(options, key))]
        subprocess.run(
            [sys.executable, *torchrun, *command], env=env, check=True, stdout=subprocess.DEVNULL
        )
        if name == "trainer":
            result = json.loads(Path(folder, "run", "result.json").read_text())
            return float(result["throughput"]["samples_per_sec"])
        return float(Path(folder, "rate").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=VARIANTS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train = {"accelerate": train_with_accelerate, "lightning": train_with_lightning}
        rate = train[options.child](options)
        if os.environ["RANK"] == "0":
            Path(options.file).write_text(str(rate))
        return
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name in VARIANTS:
            rates[name].append(run_variant(name, options))
    for name in VARIANTS[1:]:
        ratios = [own / other for own, other in zip(rates["trainer"], rates[name], strict=True)]
        print(
            f"{options.model}, batch {options.batch} a rank: "
            f"{statistics.median(rates['trainer']):.0f} images/s, {name}: "
            f"{statistics.median(rates[name]):.0f}; ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}, {options.rounds} rounds)"
        )


if __name__ == "__main__":
    main()
