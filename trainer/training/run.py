"""One run on one rank: the parts that `training` wires together, and what it remembers. No behaviour of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.data import Datasets, Loader
from trainer.modes import Strategy
from trainer.optim.optimization import MovingAverage, Updater
from trainer.processes.interrupts import Interrupts
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position
from trainer.tasks import Task
from trainer.telemetry.clocks import Ledger, StepTimer
from trainer.telemetry.tracking import NullTracker
from trainer.training.callbacks import Callbacks

WORKERS = "workers"  # what is known of the number that reads photos


@dataclass
class History:
    """What a run remembers across restarts; JSON in every checkpoint."""

    losses: list[float] = field(default_factory=list)  # mean training loss of each epoch
    validation: dict[str, float] = field(default_factory=dict)  # of the last evaluated epoch
    best: float | None = None  # of the task's metric
    best_epoch: int | None = None
    epoch_loss: float = 0.0  # sum of the present epoch's logged step losses
    epoch_steps: int = 0
    seconds: float = 0.0  # of all its parts up to the checkpoint
    skipped: int = 0  # unreadable images
    uncached: int = 0  # photos that a cache did not give


@dataclass
class Run:
    """A wired run."""

    recipe: Recipe
    reasons: dict[str, str]  # why a key of the recipe is not as typed
    interrupts: Interrupts
    callbacks: Callbacks
    datasets: Datasets
    task: Task
    world: World
    tracker: NullTracker
    strategy: Strategy
    loader: Loader
    optimizer: torch.optim.Optimizer
    updater: Updater
    average: MovingAverage | None
    timer: StepTimer
    total_steps: int
    steps_per_epoch: int
    num_classes: int
    model_size: int  # parameters of the whole model
    batch_norm: bool  # whether the model has such layers that train
    notes: dict[str, str]  # of the banner: what does not train, and how the rest does
    speed_only: bool  # synthetic images in place of missing ones: measure, learn nothing, save nothing
    begun: float  # time.perf_counter() at the process's start of work
    flops_per_sample: int = 0  # forward; 0 where the device's peak is not known
    peak_flops: float | None = None  # of all devices together
    position: Position = field(default_factory=lambda: Position(0, 0, 0))
    history: History = field(default_factory=History)
    unlogged: list[Tensor] = field(default_factory=list)  # losses of the steps since the last logged one, on the device
    memory: dict[str, int] = field(default_factory=dict)  # peak bytes per device
    counted: tuple[int, int] = 0, 0  # unreadable images and uncached photos of this rank that the history has
    samples: dict[str, Tensor] = field(default_factory=dict)  # on rank 0 a number for each, as `contents_of`
    resized: list[str] = field(default_factory=list)  # photos of other sizes than in the checkpoint, in words
    shift: int = 0  # steps that were counted beyond those of this mode's epochs, in another mode

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.world.drives)
        self.parameters: dict[str, nn.Parameter] = self.strategy.named_parameters()

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers under plain names."""
        return {**self.parameters, **self.strategy.named_buffers()}

    def seconds(self) -> float:
        """Seconds of this run over all its parts."""
        return self.history.seconds + time.perf_counter() - self.begun
