"""The configuration of a run on one rank, and the state that training changes."""

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.data import Datasets, DataShare
from trainer.distributed.world import World
from trainer.modes import Strategy
from trainer.optim.optimization import MovingAverage, Updater, count_total_steps
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position, State
from trainer.tasks import Task
from trainer.telemetry.tracking import NullTracker
from trainer.training.teaching import Teacher


@dataclass(frozen=True)
class Opened:
    """The configuration of a run, except for values that depend on the memory of its device.

    Attributes:
        recipe: The recipe. `recompute` and `accumulate` may still be auto.
        datasets: Training and validation images.
        task: The task.
        world: The connected ranks.
        share: This rank's share of the data.
        steps_per_epoch: Number of steps of an epoch.
        tracker: Writer of the run folder on rank 0; a tracker without effects on other ranks.
        checkpoint: The checkpoint to resume, or None for a new run.
        samples: Tensors that identify the images, from `same_images.identify_images`. Empty on
            ranks other than 0.
        speed_only: Whether synthetic images replace missing data. Then the run measures its speed
            and saves no checkpoint.
        longer: Whether the run trains longer than planned when its checkpoint was saved.
        teacher: The teacher of distill.teacher, if any.
    """

    recipe: Recipe
    datasets: Datasets
    task: Task
    world: World
    share: DataShare
    steps_per_epoch: int
    tracker: NullTracker
    checkpoint: State | None
    samples: dict[str, Tensor]
    speed_only: bool
    longer: bool
    teacher: Teacher | None


@dataclass(frozen=True)
class Resolved(Opened):
    """The configuration of a run, complete before its model is built.

    Attributes:
        recipe: The recipe. `recompute` is not auto, and `accumulate` is auto only if a batch is a
            single micro-batch.
        recomputed: Number N of blocks that are recomputed if `recompute` is True: the first N
            blocks of the model. None means all blocks.
        tuned: Measurements of earlier attempts, from the run folder.
    """

    recomputed: int | None
    tuned: dict[str, Any]


@dataclass
class History:
    """The history of a run across restarts, saved as JSON in every checkpoint.

    Attributes:
        losses: Mean training loss of each epoch.
        validation: Metrics of the last evaluated epoch, as `evaluate` returns them.
        evaluated_step: Step of the evaluation that `validation` is from. 0 before the first one,
            and in checkpoints of earlier versions. -1 if resuming has reopened the epoch that this
            evaluation ended.
        latest: Metrics of the last STANDSTILL_EPOCHS evaluated epochs, under the task's own names.
        evaluations: Metrics of each evaluated epoch, as in `latest`, after its `epoch`, counted
            from 1, its `step` and its `train_loss`. Earlier versions saved none.
        metric: Name of the metric that `best` is a value of.
        best: Best value of the task's metric, or None before the first evaluation.
        best_epoch: Epoch of `best`, counted from 0, or None before the first evaluation.
        epoch_loss: Sum of the logged step losses of the present epoch.
        epoch_steps: Number of steps whose losses `epoch_loss` contains.
        seconds: Seconds of all attempts up to the checkpoint.
        skipped: Number of times that an unreadable image was replaced or left out.
        uncached: Number of times that a photo was not in the cache and was prepared again.
        logged: Last value that a program's callback logged under each name.
        nonfinite: Numbers of the steps that an earlier version of the program left out because a
            loss or gradient was not finite.
        lr_factor: Factor of the learning rate, which schedule.name=plateau lowers, and callbacks
            of earlier versions could change.
        lowered_epoch: Epoch after which schedule.name=plateau has lowered the rate for the last
            time, counted from 0, or None.
    """

    losses: list[float] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    evaluated_step: int = 0
    latest: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    metric: str | None = None
    best: float | None = None
    best_epoch: int | None = None
    epoch_loss: float = 0.0
    epoch_steps: int = 0
    seconds: float = 0.0
    skipped: int = 0
    uncached: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    nonfinite: list[int] = field(default_factory=list)
    lr_factor: float = 1.0
    lowered_epoch: int | None = None


class TrainState:
    """The objects that training changes.

    The module `parts` declares which of them a checkpoint contains.
    """

    def __init__(
        self, resolved: Resolved, strategy: Strategy, updater: Updater, begun: float
    ) -> None:
        """Start at step 0. This attempt began at `time.perf_counter() == begun`."""
        recipe = resolved.recipe
        self.strategy = strategy
        self.updater = updater
        self._begun = begun
        self.parameters = strategy.named_parameters()
        self.average = None
        if recipe.ema is not None:
            self.average = MovingAverage(self.weights(), recipe.ema)
        self.position = Position(0, 0, 0)
        # Learning rate of the last step.
        self.lr = 0.0
        # Whether this start of the run has ended because `max_time` is over.
        self.out_of_time = False
        self.history = History()
        # Losses of the steps since the last logged step, 0-dim. They stay on the device, because
        # reading a loss in every step would make the host wait for the device.
        self.unlogged: list[Tensor] = []
        self.total_steps = count_total_steps(recipe, resolved.steps_per_epoch)
        # Number of steps so far minus the number that this mode needs for the same epochs. It is
        # not 0 if a run was resumed in another mode, with another number of steps in an epoch.
        self.step_offset = 0

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers by their names in the user's model."""
        return {**self.parameters, **self.strategy.named_buffers()}

    def averages(self) -> dict[str, Tensor]:
        """Return the moving averages of the weights, empty without `ema`."""
        if self.average:
            return self.average.tensors()
        return {}

    def seconds(self) -> float:
        """Return the seconds of this run over all attempts."""
        return self.history.seconds + time.perf_counter() - self._begun
