"""All objects of a run on one rank, in the class `Run`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Loader
from trainer.devices import cuda_graphs
from trainer.models.undisturbed import is_plain
from trainer.modes import Strategy
from trainer.modes.flattening import group_by_type
from trainer.optim.optimization import Updater
from trainer.processes.interrupts import Interrupts
from trainer.recipe.checks import explain_eager_steps
from trainer.telemetry.rank_watch import ROUNDS, ShareWatch
from trainer.training.callbacks import Callbacks
from trainer.training.evaluation import build_forward
from trainer.training.observer import Observer
from trainer.training.presenting import Examples
from trainer.training.replicas import ReplicaComparison
from trainer.training.snapshots import Snapshots
from trainer.training.state import Resolved, TrainState
from trainer.training.steps import EagerSteps
from trainer.training.verifying import Verifier


@dataclass
class Run:
    """All objects of one run on one rank.

    `__post_init__` creates the objects that compute, evaluate and save steps. It also sets aliases
    (`recipe`, `world`, `tracker`, `strategy` and others) of attributes of the objects below.

    Attributes:
        resolved: The configuration of the run.
        state: The state that training changes.
        observer: Timers, logs and warnings.
        loader: Reads the batches of this rank.
        interrupts: Signals, such as Ctrl-C, that this process has received.
        callbacks: The callback of the calling program, if any.
    """

    resolved: Resolved
    state: TrainState
    observer: Observer
    loader: Loader
    interrupts: Interrupts
    callbacks: Callbacks

    def __post_init__(self) -> None:
        resolved = self.resolved
        state = self.state
        observer = self.observer
        self.recipe = resolved.recipe
        self.world = resolved.world
        self.task = resolved.task
        self.datasets = self.loader.datasets
        self.teacher = resolved.teacher
        self.tracker = observer.tracker
        self.timer = observer.timer
        self.ledger = observer.ledger
        self.noticed = observer.noticed
        self.strategy = state.strategy
        # The first pass may fill caches, such as a table, which do not count as state of the model.
        # So the state after the second pass is compared with the state after the first.
        if self.resolved.checkpoint or self.recipe.pieces > 1:
            self.noticed.passes_to_compare = 2
        if self.recipe.shares == "auto" and self.world.size > 1:
            self.noticed.shares = ShareWatch(0 if self.strategy.share.numbers else ROUNDS)
        self.steps = create_steps(self.strategy, state.updater)
        replicas = ReplicaComparison(state, observer, self.steps)
        self.snapshots = Snapshots(resolved, state, self.interrupts, self.timer, replicas)
        self.saver = self.snapshots.saver
        self.verifier = Verifier(resolved, replicas)
        self.forward = build_forward(self.strategy, self.tracker.say)
        self.examples = Examples(resolved)
        # Buffers that a pass may change. If memory runs out in a pass, `undo_on_out_of_memory`
        # restores them (only with accumulate=auto and a single rank) and sets `repeatable`: the run
        # can then be saved as it was before the failed step. No other code sets `repeatable`.
        buffers: list[Tensor] = []
        for module in self.strategy.modules():
            buffers += filter(is_plain, module.buffers())
        self.buffers = group_by_type(buffers)
        self.repeatable = False
        # This rank's numbers of unreadable images and of uncached photos, (2,), that
        # `loop.note_skipped` has already added to the history.
        self.counted = torch.zeros(2, dtype=torch.int64)

    def close(self) -> None:
        """Stop the processes that read images, and free the graphs and the mode."""
        self.loader.close()
        self.forward.close()
        self.steps.close()
        self.strategy.close()


def create_steps(strategy: Strategy, updater: Updater) -> EagerSteps:
    """Return the object that computes the steps of a run.

    It is a `GraphSteps` if the device has CUDA graphs, and the recipe and its mode allow them with
    this number of ranks. Otherwise it is an `EagerSteps`.
    """
    if (
        not cuda_graphs.has_cuda_graphs(strategy.device)
        or explain_eager_steps(strategy.recipe, strategy.world.size) is not None
    ):
        return EagerSteps(strategy, updater)
    # A run without graphs does not load their code.
    from trainer.training.step_graphs import GraphSteps

    return GraphSteps(strategy, updater)
