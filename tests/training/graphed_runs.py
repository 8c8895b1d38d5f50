"""Whole runs of the training loop with eager or replayed steps, and all their results, equal to the
bit.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.ops import StochasticDepth

import trainer
from tests.command_line import latest, result, steps
from tests.simulated.simcuda.runs import alone
from tests.simulated.tape import CpuRecorder, graphs_on_the_cpu
from trainer.processes import faults
from trainer.recipe import load
from trainer.training import loop, step_graphs, step_tuning
from trainer.training import run as runs

WARM, TIMED = 2, 3  # steps before one is recorded, and of each kind that graphs=auto compares
BASE = """data.name=synthetic data.samples=40 data.val_samples=16 data.image_size=8
data.channels=1 data.workers=0
batch_size=8 model.name=noisy epochs=2 optimizer.lr=0.02 schedule.name=cosine
schedule.warmup_epochs=0.7 threads=1
mode=single devices=[cpu] logging.every_steps=3 logging.warmup_steps=0
logging.progress=false logging.tensorboard=false
logging.verdict=false save.every_steps=4 augment.hflip=0.5"""
TIMES = ("seconds", "samples_per_sec")


class Noisy(nn.Module):
    """Dropout, stochastic depth, attention, batch and layer norm."""

    def __init__(self, classes, channels, size):
        super().__init__()
        self.first = nn.Conv2d(channels, 8, 3, padding=1, stride=2)
        self.norm, self.deep = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.skip, self.drop = StochasticDepth(0.4, "row"), nn.Dropout(0.3)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = x + self.skip(self.deep(x).relu())
        return self.head(self.drop(self.block(x.flatten(2).mT).mean(1)))


class Waits(Noisy):
    def forward(self, x):
        out = super().forward(x)
        return out * 1.0 if out.detach().abs().max().item() > 0 else out


class HostDraws(Noisy):
    """Layers dropped by Python."""

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        if random.random() < 0.5:
            x = x + self.deep(x).relu()
        return self.head(x.mean((2, 3)))


class Counts(Noisy):
    """Decides by a count of its own: every third pass is another."""

    calls = 0

    def forward(self, x):
        self.calls += self.training
        x = self.norm(self.first(x)).relu()
        if self.calls % 3 == 0:
            x = x + self.deep(x).relu()
        return self.head(x.mean((2, 3)))


class Replaces(Noisy):
    """A running mean that is another tensor after each pass."""

    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        out = super().forward(x - self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return out


class FromTheHost(Noisy):
    """A number that the host makes in each pass, of its own."""

    passes = [0.0]  # one for all: no module's attribute changes  # noqa: RUF012

    def forward(self, x):
        self.passes[0] += 1.0
        return super().forward(x) * (1 + torch.tensor(self.passes[0]) / 64)


class Hooked(Noisy):
    """A model with a hook that its user reads in each pass."""

    def __init__(self, *given):
        super().__init__(*given)
        self.norm.register_forward_hook(lambda module, inputs, output: SEEN.append(output.shape))


class Anneals(Noisy):
    """A model whose layers depend on how often it was switched to training, that is, on the
    epoch.
    """

    epochs = 0

    def train(self, mode=True):
        self.epochs += mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) * (1 + 0.5 * self.epochs)


class Pace:
    calls = np.int64(0)


class CountsInObject(Noisy):
    """Is another model from its twelfth pass on, which it counts in an object: no recorded pass
    shows that.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.pace = Pace()

    def forward(self, x):
        self.pace.calls = self.pace.calls + self.training
        return super().forward(x) * (2 if self.pace.calls > 11 else 1)


class Drifts(Noisy):
    """A number in a list, which changes by too little to be seen in what a step leaves."""

    def __init__(self, *given):
        super().__init__(*given)
        self.factors = [1.0]

    def forward(self, x):
        self.factors[0] += 1e-9 * self.training
        return super().forward(x) * self.factors[0]


class Expanded(Noisy):
    """A model with an expanded buffer: its values share one number in memory, so torch refuses to
    write to it.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.register_buffer("factors", torch.ones(1).expand(10))

    def forward(self, x):
        return super().forward(x) * self.factors


class WaitsOnOne(Noisy):
    """A model in which one rank waits for the device."""

    def forward(self, x):
        out = super().forward(x)
        return (
            out * 1.0 if os.environ.get("RANK") == "1" and float(out.detach().sum()) > -1e9 else out
        )


class CountsEpochsOnOne(Anneals):
    """A model whose settings change from epoch to epoch on one rank, but not its outputs."""

    def train(self, mode=True):
        super().train(mode)
        if os.environ.get("RANK") != "1":
            self.epochs = 0
        return self

    def forward(self, x):
        return Noisy.forward(self, x)


SEEN: list[torch.Size] = []
for kind in (Noisy, *Noisy.__subclasses__(), CountsEpochsOnOne):
    trainer.register_model(kind.__name__.lower())(kind)


class Stopped(Exception):
    """A run that a test ends, without its knowing."""


class Left:
    """Results of a run: every tensor of its files, the rows and figures that it logged.

    Attributes:
        recorders: what recorded its steps.
        said: its lines about that.
        steps: the loop's `Steps`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorders: list[CpuRecorder] = []
        self.said: list[str] = []
        self.steps: Any = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.figures: dict[str, Any] = {}

    def read(self) -> Left:
        for file in sorted(self.folder.rglob("*.safetensors")):
            named = load_file(file)
            self.tensors |= {
                f"{file.relative_to(self.folder)}:{key}": tensor for key, tensor in named.items()
            }
        for row in steps(self.folder):
            self.figures[f"step {row['step']}"] = {key: row[key] for key in row if key not in TIMES}
        names = [
            "train_loss",
            "val_loss",
            "val_top1",
            "best",
            "epoch",
            "nonfinite_steps",
            "steps",
            "status",
        ]
        with suppress(FileNotFoundError):
            self.figures |= {
                name: value for name, value in result(self.folder).items() if name in names
            }
        return self

    @property
    def replays(self) -> int:
        return sum(recorder.replays for recorder in self.recorders)

    @property
    def replayed_to_the_end(self) -> bool:
        return self.replays > 0 and self.steps._reason is None


def train(
    words: str,
    folder: Path,
    patches: Any = (),
    stop_after: int | None = None,
    kind: type[CpuRecorder] = CpuRecorder,
    nan_at: Sequence[int] = (),
) -> Left:
    """Train in this process, on a CPU with graphs.

    Args:
        patches: (owner, attribute, value) for its duration.
        stop_after: the step after which it is killed.
        kind: of recorder.
        nan_at: steps whose images are no numbers.
    """
    left = Left(Path(folder))
    recipe = load(
        None,
        *latest(*BASE.split(), *words.split()),
        f"output={folder}",
    )

    class Steps(step_graphs.GraphSteps):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            say = self._say

            def keep_and_say(line: str) -> None:
                left.said.append(line)
                say(line)

            self._say = keep_and_say
            left.steps = self

    real = runs.Run.__post_init__
    log = loop.reporting.log_step
    norms = {}

    def post_init(run: Any, *resolved: Any) -> None:
        real(run, *resolved)
        plain = run.strategy.after_step
        if stop_after is not None:

            def after_step(step: int) -> None:
                plain(step)
                if step == stop_after:
                    raise Stopped

            run.strategy.after_step = after_step

    def log_step(state: Any, observer: Any, mean: float, norm: Any, *more: Any) -> None:
        number = None if norm is None else norm.item()
        norms[f"norm {state.position.step}"] = (mean, state.lr, number)
        log(state, observer, mean, norm, *more)

    with alone(), ExitStack() as stack:
        left.recorders = stack.enter_context(graphs_on_the_cpu(kind))
        own = [
            (step_graphs, "GraphSteps", Steps),
            (runs.Run, "__post_init__", post_init),
            (loop.reporting, "log_step", log_step),
            (step_graphs, "WARMUP_STEPS", WARM),
            (step_tuning, "TIMED_STEPS", TIMED),
            (faults, "is_active", bool(nan_at)),
        ]
        fault = ",".join(f"nan@0:{step}" for step in nan_at)
        stack.enter_context(mock.patch.dict(os.environ, {"TRAINER_FAULT": fault}))
        for owner, attribute, value in (*own, *patches):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        with suppress(Stopped):
            loop.run(recipe)
    left.figures |= norms
    return left.read()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def differences(a: Left, b: Left) -> list[str]:
    """List what is not the same to the bit: weights, buffers, optimizer, averages, scaler, random
    states, rows, figures.
    """
    names = sorted(a.tensors.keys() | b.tensors.keys())
    actual = [
        n
        for n in names
        if n not in a.tensors or n not in b.tensors or not same(a.tensors[n], b.tensors[n])
    ]
    keys = sorted(a.figures.keys() | b.figures.keys())
    pairs = [(key, a.figures.get(key), b.figures.get(key)) for key in keys]
    return actual + [f"{key}: {one} {two}" for key, one, two in pairs if repr(one) != repr(two)]


@functools.cache
def launched(words: str) -> Left:
    """Return the run with eager steps, which all tests share."""
    with tempfile.TemporaryDirectory() as folder:
        left = train(f"{words} graphs=false", Path(folder))
        assert left.recorders == []
        return left


def replayed(
    words: str,
    patches: Any = (),
    graphs: str = "true",
    **more: Any,
) -> Left:
    """The run that records its steps."""
    with tempfile.TemporaryDirectory() as folder:
        return train(f"{words} graphs={graphs}", Path(folder), patches, **more)


class Dropping(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.first, self.norm, self.drop = (
            nn.Conv2d(channels, 6, 3),
            nn.BatchNorm2d(6),
            nn.Dropout(0.5),
        )
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x)).relu().mean((2, 3))))


class Waiting(Dropping):
    def forward(self, x):
        out = super().forward(x)
        return out * 2 if not self.training and out.max().item() > 0 else out


class Counting(Dropping):
    calls = 0

    def forward(self, x):
        self.calls += not self.training
        return super().forward(x) * (2 if self.calls % 3 == 0 else 1)
