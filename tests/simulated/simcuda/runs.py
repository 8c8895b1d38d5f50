"""Whole training runs on simulated devices, each once for all tests that ask what
happened in it.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.command_line import losses
from tests.simulated.simcuda.machine import Card
from tests.simulated.simcuda.stubs import simulated
from tests.simulated.simcuda.waits import Waits
from trainer.modes.pipeline import stages
from trainer.recipe import load
from trainer.training import diagnosis, loop

# Small enough for a second a run: 2 steps of 16 images.
BASE = """data.name=synthetic data.samples=32 data.val_samples=24 data.image_size=8
data.channels=1 batch_size=16
model.name=cnn_gn epochs=1 optimizer.lr=0.001 threads=1 logging.every_steps=1
logging.warmup_steps=0
logging.progress=false logging.tensorboard=false"""
# Functions that time a device with the host's clock, so the device must be idle.
MEASURING = frozenset(
    {
        "models.balance._clock",
        "devices.health.measure_speed",
        "telemetry.clocks.Ledger.span",
        "commands.plan.speed_probe._measure_whole.<locals>.timed",
        "commands.prove.prove_probe.bare",
        "commands.trials.measuring.Measurer.seconds",
        "commands.prove.prove_probe.links",
        "commands.plan.speed_probe._exchange",
        "modes.measures.Measures.all_reduce_seconds",
        "modes.ddp.DistributedDataParallel._exposed",
        "modes.pipeline.timeline.Recorder._now",
        "modes.pipeline.stages.Staged._trial",
    }
)
IN_A_STEP = "training.loop.train_epoch"
NOT_EVERY_STEP = (
    "training.noticing.compare_passes",
    "training.step_graphs.GraphSteps.capture",
    "training.rank_sync.RankSync.after_step",
    "training.reporting.log_step",
    "training.snapshots.Snapshots.save",
    "telemetry.clocks.Ledger.span",
)


@dataclass
class Trained:
    """Results of a run."""

    result: dict[str, Any]
    losses: list[float]
    weights: dict[str, Tensor]
    errors: list[str] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    # Whether the weights stayed the same, for each measurement of a held device.
    held: list[bool] = field(default_factory=list)

    def waits_in_steps(self) -> Counter[tuple[str, str]]:
        """Waits of the host in a training step, apart from logged steps and meetings of ranks."""
        return self.waits.inside(IN_A_STEP, *NOT_EVERY_STEP)


@functools.cache
def on_cuda(words: str, count: int = 3) -> Trained:
    """A run with all defaults of a machine that has `count` cards."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on_cuda(words, Path(folder) / "run", count)


def train_on_cuda(
    words: str, folder: Path, cards: int | Sequence[Card] = 3, own: bool = True
) -> Trained:
    """Train in a folder that stays; `own` means that this rank writes it."""
    with alone(), simulated(cards) as machine:
        machine.waits.measuring = MEASURING
        with _looking() as kept:
            finished = _run(words, folder, own)
    finished.errors = machine.errors
    finished.waits = machine.waits
    finished.held = kept
    return finished


@contextmanager
def _looking() -> Iterator[list[bool]]:
    """Runs that are long enough for a look at held devices; what `Trained.held` has."""
    kept: list[bool] = []
    plain = diagnosis._measure_device_seconds

    def look(
        state: Any, weight: float, step: float, waited: float, update: float, budget: float
    ) -> Any:
        before = {name: tensor.detach().clone() for name, tensor in state.weights().items()}
        actual = plain(state, weight, step, waited, update, 1e9)
        kept.append(
            actual is not None
            and all(torch.equal(before[name], now) for name, now in state.weights().items())
        )
        return actual

    with mock.patch.multiple(diagnosis, _measure_device_seconds=look, NEGLIGIBLE_SHARE=1e-9):
        yield kept


@functools.cache
def on_cpu(words: str) -> Trained:
    """Return the same run on the CPU, with stand-ins for the devices of its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on_cpu(words, Path(folder) / "run")


def train_on_cpu(words: str, folder: Path, own: bool = True) -> Trained:
    plain = [word for word in words.split() if not word.startswith("devices=")]
    cards = sum(word.count("cuda:") for word in words.split() if word.startswith("devices="))
    with alone():
        return _run(
            " ".join([*plain, f"devices=[{','.join(['cpu'] * max(1, cards))}]"]), folder, own
        )


def _run(words: str, folder: Path, own: bool) -> Trained:
    arguments = {word.partition("=")[0] for word in words.split()}
    base = [word for word in BASE.split() if word.partition("=")[0] not in arguments]
    result = loop.run(load(None, *base, *words.split(), f"output={folder}"))
    return (
        Trained(result, losses(folder), load_file(folder / "last.safetensors"))
        if own
        else Trained(result, [], {})
    )


@contextmanager
def alone() -> Iterator[None]:
    """Restore threads, random generators and environment after a run. Trials of plans are short."""
    before = (
        torch.get_num_threads(),
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),
    )
    benchmark = torch.backends.cudnn.benchmark
    quiet = open(os.devnull, "w")  # noqa: SIM115
    try:
        with (
            quiet,
            mock.patch.multiple(stages, TRIAL_SECONDS=0.0, MAX_TRIAL_STEPS=2),
            mock.patch("sys.stdout", quiet),
        ):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_rng_state(before[1])
        random.setstate(before[2])
        np.random.set_state(before[3])
        torch.backends.cudnn.benchmark = benchmark
