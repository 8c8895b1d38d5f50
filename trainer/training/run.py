"""One run on one rank: what it was resolved to, the parts that `training` wires together, and its state."""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor, nn

from trainer.data import Datasets, Loader, Shard
from trainer.devices.strain import Strain, StrainMeter
from trainer.modes import Strategy
from trainer.optim.optimization import MovingAverage, Updater, total_steps
from trainer.processes.interrupts import Interrupts
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position, State
from trainer.saving.saver import Saver
from trainer.tasks import Task
from trainer.telemetry.clocks import Ledger, StepTimer
from trainer.telemetry.rank_watch import RankWatch
from trainer.telemetry.tracking import NullTracker
from trainer.training.callbacks import Callbacks
from trainer.training.evaluation import replayed
from trainer.training.step_graphs import Steps


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
    nonfinite: list[int] = field(default_factory=list)  # steps that were skipped as not finite
    lr_factor: float = 1.0  # of the schedule's learning rate, as callbacks chose


@dataclass
class Noticed:
    """What a run notices of itself, the same on every rank."""

    meter: StrainMeter  # of what keeps this machine from computing, since the run was built
    strain: Strain = field(default_factory=Strain)  # the worst of all ranks, at the end of the last epoch
    # Held-out samples of each class (`actual`) and those predicted as it, in the last epoch and the one before; empty
    # where a task does not count them.
    classes: list[dict[str, list[int]]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)  # what goes wrong, as sentences by kind
    announced: set[str] = field(default_factory=set)  # the kinds of which there was a word already
    lasting: dict[str, str] = field(default_factory=dict)  # warnings of what has passed since, by kind
    ranks: RankWatch = field(default_factory=RankWatch)  # which of them holds up the others, where all do the same work
    suspected: StrainMeter | None = None  # counts what this machine suffers while this rank is slower than the others


@dataclass(frozen=True)
class Resolved:
    """A run before anything is built: nothing of it is replaced any more."""

    recipe: Recipe  # with every key that was left open
    reasons: dict[str, str]  # why a key is not as typed, by its name
    datasets: Datasets
    task: Task
    world: World
    shard: Shard
    steps_per_epoch: int
    tracker: NullTracker
    state: State | None  # the checkpoint to continue
    samples: dict[str, Tensor]  # on rank 0 what identifies the images, as `same_images.identified` gives it
    speed_only: bool  # synthetic images in place of missing ones: measure, learn nothing, save nothing


@dataclass(frozen=True)
class ModelFacts:
    """What is to be known of the whole model, before a mode takes it apart."""

    parameters: int
    batch_norm: bool  # whether it has such layers that train
    notes: dict[str, str]  # of the banner: what does not train, and how the rest does
    training_flops: int  # of a sample; 0 where the devices' peak is not known
    peak_flops: float | None  # of all devices together


@dataclass
class Run:
    """A wired run; what it was resolved to are its own attributes too."""

    resolved: InitVar[Resolved]
    interrupts: Interrupts
    callbacks: Callbacks
    strategy: Strategy
    loader: Loader
    optimizer: torch.optim.Optimizer
    updater: Updater
    model: ModelFacts
    ledger: Ledger  # since the process's start of work
    average: MovingAverage | None = None
    position: Position = field(default_factory=lambda: Position(0, 0, 0))
    history: History = field(default_factory=History)
    unlogged: list[Tensor] = field(default_factory=list)  # losses of the steps since the last logged one, on the device
    memory: dict[str, int] = field(default_factory=dict)  # peak bytes per device
    facts: dict[str, str] = field(default_factory=dict)  # what is about to run, by title
    counted: tuple[int, int] = 0, 0  # unreadable images and uncached photos of this rank that the history has
    shift: int = 0  # steps that were counted beyond those of this mode's epochs, in another mode

    def __post_init__(self, resolved: Resolved) -> None:
        self.recipe, self.reasons, self.task = resolved.recipe, resolved.reasons, resolved.task
        self.datasets, self.samples = resolved.datasets, resolved.samples
        self.world, self.tracker, self.speed_only = resolved.world, resolved.tracker, resolved.speed_only
        self.steps_per_epoch = resolved.steps_per_epoch
        self.total_steps = total_steps(self.recipe, self.steps_per_epoch)
        self.num_classes = self.recipe.model.num_classes or len(self.datasets.classes)
        self.timer = StepTimer(self.world.drives, self.recipe.logging.warmup_steps)
        self.ledger.devices = self.world.drives
        self.noticed = Noticed(StrainMeter(self.world.place.local_size))
        self.saver = Saver(self.world.rank, self.recipe.timeout)
        self.steps = Steps(self.recipe, self.strategy, self.updater, self.optimizer, self.tracker.say)
        self.forward = replayed(self.strategy, self.tracker.say)
        self.parameters: dict[str, nn.Parameter] = self.strategy.named_parameters()

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers under plain names."""
        return {**self.parameters, **self.strategy.named_buffers()}

    def nothing_new(self) -> bool:
        """Whether a checkpoint holds all that was trained."""
        return self.saver.committed == self.position.step

    def seconds(self) -> float:
        """Seconds of this run over all its parts."""
        return self.history.seconds + time.perf_counter() - self.ledger.begun
