"""One run on one rank: what it is, what it trains, who watches it, and what `loop` drives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trainer.data import Loader
from trainer.devices.host import Strain, StrainMeter
from trainer.models.undisturbed import is_plain
from trainer.modes.base import by_type
from trainer.processes.interrupts import Interrupts
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving.saver import Saver
from trainer.telemetry.clocks import Ledger, StepTimer
from trainer.telemetry.rank_watch import ROUNDS, RankWatch, ShareWatch
from trainer.telemetry.tracking import NullTracker
from trainer.training.callbacks import Callbacks
from trainer.training.evaluation import replayed
from trainer.training.state import Resolved, TrainState
from trainer.training.step_graphs import Steps


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
    shares: ShareWatch | None = None  # by what parts of a batch none would, where these are measured


@dataclass(frozen=True)
class ModelFacts:
    """What is to be known of the whole model, before a mode takes it apart."""

    parameters: int
    batch_norm: bool  # whether it has such layers that train
    notes: dict[str, str]  # of the banner: what does not train, and how the rest does
    training_flops: int  # of a sample; 0 where the devices' peak is not known
    peak_flops: float | None  # of all devices together


class Observer:
    """What watches a run and tells of it; a checkpoint holds nothing of it."""

    def __init__(self, recipe: Recipe, world: World, tracker: NullTracker, ledger: Ledger, model: ModelFacts) -> None:
        """`ledger`: since the process's start of work."""
        self.tracker, self.ledger, self.model = tracker, ledger, model
        self.ledger.devices = world.drives
        self.timer = StepTimer(world.drives, recipe.logging.warmup_steps)
        self.noticed = Noticed(StrainMeter(world.place.local_size))
        self.memory: dict[str, int] = {}  # peak bytes per device
        self.banner_lines: dict[str, str] = {}  # what is about to run, by title


@dataclass
class Run:
    """A wired run. The names after its parts are theirs, of what is never replaced."""

    resolved: Resolved
    state: TrainState
    observer: Observer
    loader: Loader
    interrupts: Interrupts
    callbacks: Callbacks

    def __post_init__(self) -> None:
        resolved, state, observer = self.resolved, self.state, self.observer
        self.recipe, self.world, self.task = resolved.recipe, resolved.world, resolved.task
        self.datasets, self.speed_only, self.teacher = resolved.datasets, resolved.speed_only, resolved.teacher
        self.tracker, self.timer, self.ledger = observer.tracker, observer.timer, observer.ledger
        self.noticed, self.strategy = observer.noticed, state.strategy
        self.saver = Saver(self.world.rank, self.recipe.timeout)
        if self.recipe.shares == "auto" and self.world.size > 1:
            self.noticed.shares = ShareWatch(0 if self.strategy.share.numbers else ROUNDS)
        self.steps = Steps(self.recipe, self.strategy, state.updater, self.tracker.say)
        self.forward = replayed(self.strategy, self.tracker.say)
        # What passes change of a model beside gradients; whether memory ran out in them, and all is as it was before.
        self.buffers = by_type(b for part in self.strategy.modules() for b in part.buffers() if is_plain(b))
        self.repeatable = False
        # Unreadable images and uncached photos of this rank that the history has.
        self.counted = torch.zeros(2, dtype=torch.int64)
