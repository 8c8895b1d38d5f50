"""A run on one rank: what it was resolved to, and what it trains and remembers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from trainer.data import Datasets, DataShare
from trainer.modes import Strategy
from trainer.optim.optimization import MovingAverage, Updater, total_steps
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position, State
from trainer.tasks import Task
from trainer.telemetry.tracking import NullTracker
from trainer.training.teaching import Teacher


@dataclass(frozen=True)
class Resolved:
    """A run before anything is built: nothing of it is replaced any more."""

    recipe: Recipe  # with every key that was left open
    datasets: Datasets
    task: Task
    world: World
    share: DataShare
    steps_per_epoch: int
    tracker: NullTracker
    checkpoint: State | None  # to continue
    samples: dict[str, Tensor]  # on rank 0 what identifies the images, as `same_images.identified` gives it
    speed_only: bool  # synthetic images in place of missing ones: measure, learn nothing, save nothing
    longer: bool  # whether the run was to end sooner when its checkpoint was saved
    teacher: Teacher | None = None
    recomputed: int | None = None  # so many first blocks are computed anew under recompute; None: all


@dataclass
class History:
    """What a run remembers across restarts; JSON in every checkpoint."""

    losses: list[float] = field(default_factory=list)  # mean training loss of each epoch
    validation: dict[str, float] = field(default_factory=dict)  # of the last evaluated epoch
    latest: list[dict[str, float]] = field(default_factory=list)  # the metrics of the last epochs
    best: float | None = None  # of the task's metric
    best_epoch: int | None = None
    epoch_loss: float = 0.0  # sum of the present epoch's logged step losses
    epoch_steps: int = 0
    seconds: float = 0.0  # of all its parts up to the checkpoint
    skipped: int = 0  # unreadable images
    uncached: int = 0  # photos that a cache did not give
    logged: dict[str, float] = field(default_factory=dict)  # last values of a program's callbacks
    nonfinite: list[int] = field(default_factory=list)  # steps that an earlier version left out as not finite
    lr_factor: float = 1.0  # of the learning rate, which callbacks of earlier versions could change


class TrainState:
    """What training changes. What a checkpoint holds of it is declared in `parts`."""

    def __init__(self, resolved: Resolved, strategy: Strategy, updater: Updater, begun: float) -> None:
        """`begun` is the time.perf_counter() at which this part of the run began."""
        recipe = resolved.recipe
        self.strategy, self.optimizer, self.updater, self._begun = strategy, updater.optimizer, updater, begun
        self.parameters = strategy.named_parameters()
        self.average = MovingAverage(self.weights(), recipe.ema) if recipe.ema is not None else None
        self.position, self.history = Position(0, 0, 0), History()
        self.unlogged: list[Tensor] = []  # losses of the steps since the last logged one, on the device
        self.total_steps = total_steps(recipe, resolved.steps_per_epoch)
        self.step_offset = 0  # steps that were counted beyond those of this mode's epochs, in another mode

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers under plain names."""
        return {**self.parameters, **self.strategy.named_buffers()}

    def averages(self) -> dict[str, Tensor]:
        """Their moving averages, if there are any."""
        return self.average.tensors() if self.average is not None else {}

    def seconds(self) -> float:
        """Seconds of this run over all its parts."""
        return self.history.seconds + time.perf_counter() - self._begun
