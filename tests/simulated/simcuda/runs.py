"""Whole training runs on simulated devices, each once for all tests that ask what happened in it."""

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
BASE = """data.name=synthetic data.samples=32 data.val_samples=24 data.image_size=8 data.channels=1 batch_size=16
model.name=cnn_gn epochs=1 optimizer.lr=0.001 threads=1 logging.every_steps=1 logging.warmup_steps=0
logging.progress=false logging.tensorboard=false"""
# Who times a device with the host's clock: it must be idle then.
MEASURING = frozenset(
    {
        "models.balance._clock",
        "devices.health.speed",
        "telemetry.clocks.Ledger.span",
        "commands.plan.speed_probe._whole.<locals>.timed",
        "commands.prove.prove_probe.bare",
        "commands.trials.measuring.Measurer.seconds",
        "commands.prove.prove_probe.links",
        "commands.plan.speed_probe._exchange",
        "modes.base.Strategy.all_reduce_seconds",
        "modes.ddp.DistributedDataParallel._exposed",
        "modes.pipeline.timeline.Recorder._now",
        "modes.pipeline.stages.Staged._trial",
    }
)
IN_A_STEP = "training.loop.train_epoch"
NOT_EVERY_STEP = (
    "training.rank_sync.RankSync.after_step",
    "training.reporting.log_step",
    "training.snapshots.save",
    "telemetry.clocks.Ledger.span",
)


@dataclass
class Trained:
    """What a run did."""

    result: dict[str, Any]
    losses: list[float]
    weights: dict[str, Tensor]
    errors: list[str] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    held: list[bool] = field(default_factory=list)  # of looks at a held device, whether the weights stayed as they were

    def waits_in_steps(self) -> Counter[tuple[str, str]]:
        """Waits of the host in a training step, apart from logged steps and meetings of ranks."""
        return self.waits.inside(IN_A_STEP, *NOT_EVERY_STEP)


@functools.cache
def on_cuda(words: str, count: int = 3) -> Trained:
    """A run with all defaults of a machine that has `count` cards."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on_cuda(words, Path(folder) / "run", count)


def train_on_cuda(words: str, folder: Path, cards: int | Sequence[Card] = 3, own: bool = True) -> Trained:
    """In a folder that stays; `own` says that this rank writes it."""
    with alone(), simulated(cards) as machine:
        machine.waits.measuring = MEASURING
        with _looking() as held:
            done = _run(words, folder, own)
    done.errors, done.waits, done.held = machine.errors, machine.waits, held
    return done


@contextmanager
def _looking() -> Iterator[list[bool]]:
    """Runs that are long enough for a look at held devices; what `Trained.held` has."""
    held: list[bool] = []
    plain = diagnosis._own_seconds

    def look(run: Any, step: float, waited: float, update: float, budget: float) -> Any:
        before = {name: tensor.detach().clone() for name, tensor in run.state.weights().items()}
        found = plain(run, step, waited, update, 1e9)
        held.append(
            found is not None and all(torch.equal(before[name], now) for name, now in run.state.weights().items())
        )
        return found

    with mock.patch.multiple(diagnosis, _own_seconds=look, LITTLE=1e-9):
        yield held


@functools.cache
def on_cpu(words: str) -> Trained:
    """The same run on the CPU: devices that the words name are stand-ins there."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on_cpu(words, Path(folder) / "run")


def train_on_cpu(words: str, folder: Path, own: bool = True) -> Trained:
    plain = [word for word in words.split() if not word.startswith("devices=")]
    cards = sum(word.count("cuda:") for word in words.split() if word.startswith("devices="))
    with alone():
        return _run(" ".join([*plain, f"devices=[{','.join(['cpu'] * max(1, cards))}]"]), folder, own)


def _run(words: str, folder: Path, own: bool) -> Trained:
    given = {word.partition("=")[0] for word in words.split()}
    base = [word for word in BASE.split() if word.partition("=")[0] not in given]
    result = loop.run(load(None, *base, *words.split(), f"output={folder}"))
    return Trained(result, losses(folder), load_file(folder / "last.safetensors")) if own else Trained(result, [], {})


@contextmanager
def alone() -> Iterator[None]:
    """Nothing of a run is left in this process: threads, generators, environment. Trials of plans are short."""
    before = torch.get_num_threads(), torch.get_rng_state(), random.getstate(), np.random.get_state()
    benchmark = torch.backends.cudnn.benchmark
    quiet = open(os.devnull, "w")  # noqa: SIM115
    try:
        with quiet, mock.patch.multiple(stages, TRIAL_SECONDS=0.0, TRIAL_STEPS=(2, 2)), mock.patch("sys.stdout", quiet):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_rng_state(before[1])
        random.setstate(before[2])
        np.random.set_state(before[3])
        torch.backends.cudnn.benchmark = benchmark
