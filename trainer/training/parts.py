"""The parts of a checkpoint. Each class declares the values that are saved, and restores them.

All ranks restore the same parts, in the order of `PARTS`.
"""

import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from trainer.errors import CheckpointError, RecipeError
from trainer.models.reachable import is_own
from trainer.optim.optimizers import name_optimizer_state
from trainer.processes.rank import build_job_id
from trainer.saving.checkpoint import Position, State
from trainer.training.randomness import read_random_states, restore_random_states, seed_ranks
from trainer.training.same_images import report_changes
from trainer.training.state import History, Resolved, TrainState
from trainer.training.step_evidence import copy_into


class Part:
    """Base class of the parts of a checkpoint: tensors, metadata for its manifest, or both.

    Attributes:
        name: Name of the part's file, without its ending.
        saved_by: The ranks that save tensors. With "main", rank 0 saves the tensors. With "all",
            the ranks save the shards of the whole model's tensors, each shard once. With "each",
            every rank saves tensors that belong to that rank alone.
        trains: Whether an out-of-memory message counts the tensors as device memory of training.
    """

    name = ""
    saved_by = "main"
    trains = False

    def __init__(self, resolved: Resolved, state: TrainState) -> None:
        self.resolved = resolved
        self.state = state
        self.strategy = state.strategy
        self.recipe = resolved.recipe
        self.world = resolved.world
        self.say = resolved.tracker.say

    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's live tensors, under names that do not depend on the mode."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return values for the checkpoint's manifest, a JSON file."""
        return {}

    def restore(self, saved: State) -> None:
        """Restore this part from a checkpoint. Collective.

        By default, the tensors are copied from the checkpoint to the ranks.
        """
        stored = saved.part(self.name)
        all_names = self.world.gather([*self.tensors()])
        names = set[str]().union(*self.world.broadcast_object(all_names))
        self.check_names(stored, names)
        self.strategy.scatter(stored, self.tensors())

    def check_names(self, saved: Iterable[str], live: Iterable[str]) -> None:
        """Raise CheckpointError unless `saved` and `live` name the same tensors.

        An unknown tensor is an error too: ignoring it would lose state silently.
        """
        live_names = set(live)
        for name in sorted(live_names.symmetric_difference(saved)):
            fault = "lacks" if name in live_names else "has an unknown"
            raise CheckpointError(
                f"the checkpoint's {self.name} {fault} {name}: it belongs to another version, "
                "model or optimizer; choose another output= to start from scratch, from its "
                "weights with model.init_from=RUN"
            )


class Weights(Part):
    """The parameters and buffers of the model."""

    name = "model"
    saved_by = "all"
    trains = True

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.weights()


class OptimizerState(Part):
    name = "optimizer"
    saved_by = "all"
    trains = True

    def tensors(self) -> Mapping[str, Tensor]:
        return name_optimizer_state(self.state.updater.optimizer, self.state.parameters)

    def restore(self, saved: State) -> None:
        # Before the save, the model's own `train` may have unfrozen more parameters. The optimizer
        # needs a state of each of them, into which the saved state is copied.
        trained_names = {name.partition("//")[0] for name in saved.part(self.name)}
        self.state.updater.follow(self.state.parameters, also=trained_names)
        super().restore(saved)


class OuterOptimizer(Part):
    """The outer optimizer of local SGD. Its state does not depend on the number of workers."""

    name = "outer"
    trains = True

    def tensors(self) -> Mapping[str, Tensor]:
        return self.strategy.outer_state()

    def restore(self, saved: State) -> None:
        stored = saved.part(self.name)
        live = self.tensors()
        if live and stored:
            self.check_names(stored, live)
        self.strategy.load_outer_state(stored)
        if live and not stored:
            self.say("  local_sgd's outer optimizer starts from scratch: the checkpoint holds none")
        elif stored and not live:
            self.say("  local_sgd's outer optimizer is dropped: this run has none")


class Scaler(Part):
    """The loss scaler of fp16."""

    name = "scaler"

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.updater.state()

    def restore(self, saved: State) -> None:
        stored = saved.tensors(self.name)
        self.check_names(stored, self.tensors())
        copy_into(self.tensors(), stored)


class Averages(Part):
    """The moving average of the weights."""

    name = "ema"
    saved_by = "all"
    trains = True

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.averages()


class TrainingPosition(Part):
    """The position of the run in its epochs and steps.

    An epoch may have a different number of steps after the mode has changed (local SGD, Hogwild).
    Then the run resumes at the same fraction of the epoch. The step number continues from the
    checkpoint. The learning rate depends on the position in the epochs, which is the step number
    minus `TrainState.step_offset`.
    """

    def facts(self) -> dict[str, Any]:
        return {
            "steps_per_epoch": self.resolved.steps_per_epoch,
            "shift": self.state.step_offset,
            "last_step": self.state.total_steps,
            "shares": {
                "numbers": self.strategy.share.numbers,
                "devices": self.world.devices,
                "measured": self.recipe.shares == "auto",
            },
        }

    def restore(self, saved: State) -> None:
        state = self.state
        per_epoch = self.resolved.steps_per_epoch
        step, epoch, step_in_epoch = saved.position
        saved_per_epoch = saved.facts.get("steps_per_epoch", per_epoch)
        # The offset is not 0 if the saved run had changed to a mode with another number of steps.
        state.step_offset = saved.facts.get("shift", 0)
        # `max_steps` may have ended the saved run within an epoch, which then counts as done. A run
        # that trains longer trains the remaining steps of that epoch first.
        remaining = epoch * saved_per_epoch - (step - state.step_offset)
        if (
            not step_in_epoch
            and 0 < remaining < saved_per_epoch
            and step < (self.recipe.max_steps or math.inf)
        ):
            epoch -= 1
            step_in_epoch = saved_per_epoch - remaining
        if saved_per_epoch != per_epoch:
            # Rounding down keeps an unfinished epoch unfinished.
            step_in_epoch = step_in_epoch * per_epoch // saved_per_epoch
            state.step_offset = step - (epoch * per_epoch + step_in_epoch)
        state.position = Position(step, epoch, step_in_epoch)
        state.total_steps = self.recipe.epochs * per_epoch + state.step_offset
        # If a callback ended the saved run within an epoch, and a signal interrupted the evaluation
        # that followed, the resumed run must only evaluate.
        is_ended = saved.position.step_in_epoch > 0 and saved.facts.get("last_step") == step
        if is_ended and not self.resolved.longer:
            state.total_steps = step
        share = self.strategy.share
        saved_numbers = saved.facts.get("shares", {}).get("numbers", [])
        if share.every_sample and step_in_epoch and saved_numbers != [*share.numbers]:
            self.say(
                "  the shares changed in the middle of an epoch, so in this epoch some images are "
                "seen twice, or not at all"
            )
        if self.recipe.max_steps is not None:
            state.total_steps = min(state.total_steps, self.recipe.max_steps)


class ImageIdentity(Part):
    """Values that identify the images and the teacher's weights."""

    name = "samples"

    def tensors(self) -> Mapping[str, Tensor]:
        return self.resolved.samples

    def facts(self) -> dict[str, Any]:
        teacher = self.resolved.teacher
        return {"classes": self.resolved.datasets.classes, "teacher": teacher and teacher.facts}

    def restore(self, saved: State) -> None:
        saved_teacher = saved.facts.get("teacher")
        teacher = self.facts()["teacher"]
        # Earlier versions saved only the digest of the teacher's weights, so it is accepted too.
        digest = teacher and teacher[0]
        if saved_teacher not in (teacher, digest):
            raise CheckpointError(
                f"distill.teacher={self.recipe.distill.teacher} has other weights, precision, mean "
                "or std than this run has learned from: put those back, or choose another output= "
                "to start from scratch"
            )
        report_changes(self.resolved, self.state.total_steps, saved)


class UserCode(Part):
    """Digests of the user's source files.

    Code may change between attempts. The user is warned, because the tensors of a checkpoint do not
    show such a change.
    """

    def facts(self) -> dict[str, Any]:
        return {"code": hash_user_code()}

    def restore(self, saved: State) -> None:
        digests = hash_user_code()
        for name, digest in saved.facts.get("code", {}).items():
            if digests.get(name, digest) != digest:
                self.say(
                    f"WARNING: {name} has changed since the checkpoint was saved: the run uses the "
                    "new code"
                )


class RunHistory(Part):
    """The `History` of the run, and the ID of the job that saved it."""

    def facts(self) -> dict[str, Any]:
        history = asdict(self.state.history) | {"seconds": self.state.seconds()}
        return {"history": history, "run_id": build_job_id()}

    def restore(self, saved: State) -> None:
        state = self.state
        history = saved.facts["history"]
        # Versions without tasks saved the best top-1 accuracy as `best_top1`.
        best = history.get("best", history.get("best_top1"))
        task = self.resolved.task
        # Versions without `task.metric` saved no name: the metric was that of the task's class.
        metric = history.get("metric") or type(task).metric
        if metric != task.metric and best is not None:
            raise RecipeError(
                f"the best epoch so far was chosen by {metric}, and this run has {task.metric}: "
                f"add task.metric={metric}, or choose another output= to start from scratch"
            )
        state.history = TypeAdapter(History).validate_python(history | {"best": best})
        # If `TrainingPosition.restore` has reopened an epoch, its mean loss becomes a sum again.
        if state.position.epoch < saved.position.epoch:
            state.history.latest.pop()
            state.history.evaluations = state.history.evaluations[:-1]
            # The evaluation is dropped. -1 differs from 0, the value of earlier versions.
            state.history.evaluated_step = -1
            state.history.epoch_steps = state.position.step_in_epoch
            state.history.epoch_loss = state.history.losses.pop() * state.history.epoch_steps
        self.say(f"resuming at step {state.position.step} of {state.total_steps}")


class RankState(Part):
    """State of one rank, saved to its own file.

    The state consists of random states, losses since the last logged step, and the parts that the
    mode names in `per_rank_state`, because they differ between its ranks.
    """

    saved_by = "each"

    def __init__(self, resolved: Resolved, state: TrainState) -> None:
        super().__init__(resolved, state)
        self.name = rank_part_name(self.world.rank)

    def tensors(self) -> Mapping[str, Tensor]:
        if self.state.unlogged:
            unlogged = torch.stack(self.state.unlogged)
        else:
            unlogged = torch.zeros(0)
        return {
            **read_random_states(self.world.local_devices),
            "unlogged": unlogged,
            **self._mode_tensors(),
        }

    def _mode_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for kind in PARTS:
            if kind.name in self.recipe.traits.per_rank_state:
                part = kind(self.resolved, self.state)
                for name, tensor in part.tensors().items():
                    tensors[f"{part.name}:{name}"] = tensor
        return tensors

    def facts(self) -> dict[str, Any]:
        """Return the mode, the number of ranks, and the sizes of the rank grid except `replicas`.

        These values decide which data and which part of the model each rank computes, so saved
        random states are valid only with the same values.
        """
        dimensions = dict(self.world.grid.sizes)
        dimensions.pop("replicas", None)
        topology = {"mode": self.recipe.mode, "world_size": self.world.size, **dimensions}
        return {"topology": topology}

    def restore(self, saved: State) -> None:
        saved_topology = saved.facts["topology"]
        topology = self.facts()["topology"]
        # Older checkpoints do not name the number of stages, so only saved keys are compared.
        if saved_topology != {key: topology[key] for key in topology if key in saved_topology}:
            self.say(
                f"  saved as {saved_topology}, resumed as {topology}: random numbers (dropout) are "
                "drawn from new seeds"
            )
            seed_ranks(self.recipe.seed + self.state.position.step, self.world.rank)
            # The saved ranks do not correspond to those of this run. So rank 0 restores the sum of
            # the losses of all saved ranks, and the other ranks restore zeros.
            rank_losses = [
                _rank_tensors(saved, rank)["unlogged"]
                for rank in range(saved_topology["world_size"])
            ]
            total = torch.stack(rank_losses).sum(0)
            self._restore_losses(total if self.world.is_main else total * 0)
            return
        stored = _rank_tensors(saved, self.world.rank)
        if fresh := restore_random_states(stored, self.world.local_devices):
            self.say(
                f"  the checkpoint has no random states of {', '.join(map(str, fresh))}: random "
                "numbers there (dropout) continue from this run's seed"
            )
        live = self._mode_tensors()
        per_rank = self.recipe.traits.per_rank_state
        stored_names = [name for name in stored if name.partition(":")[0] in per_rank]
        self.check_names(stored_names, live)
        copy_into(live, {name: stored[name] for name in live})
        self._restore_losses(stored["unlogged"])

    def _restore_losses(self, losses: Tensor) -> None:
        # Earlier versions skipped the update of a step whose loss or gradient was not finite, and
        # saved NaN as its loss. Such a step has no loss to log, so it is left out.
        losses = losses[~losses.isnan()]
        self.state.unlogged = list(losses.to(self.world.device).unbind())


PARTS: tuple[type[Part], ...] = (
    Weights,
    OptimizerState,
    OuterOptimizer,
    Scaler,
    Averages,
    TrainingPosition,
    ImageIdentity,
    UserCode,
    RunHistory,
    RankState,
)


@functools.cache
def hash_user_code() -> dict[str, str]:
    """Return a digest of each imported module below the working folder, by its relative path.

    Plugins are imported from the working folder. The first call reads the files. Later calls return
    the same digests, even if a file was edited in the meantime.
    """
    folder = Path.cwd()
    digests = {}
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, "__file__", None) or "")
        # The script `__main__` is left out, because it changes for many reasons that do not concern
        # the model.
        if (
            name != "__main__"
            and path.is_relative_to(folder)
            and "site-packages" not in path.parts
            and is_own(module)
        ):
            with suppress(OSError):
                content = path.read_bytes()
                digest = hashlib.sha256(content).hexdigest()
                digests[str(path.relative_to(folder))] = digest
    return digests


def rank_part_name(rank: int) -> str:
    """Return the name of the part of a checkpoint that holds the state of one rank."""
    return f"rank-{rank:05d}"


def _rank_tensors(saved: State, rank: int) -> dict[str, Tensor]:
    tensors = saved.tensors(rank_part_name(rank))
    if tensors:
        return tensors
    # Older checkpoints hold the state of all ranks in one part.
    prefix = f"{rank}/"
    return {
        key.removeprefix(prefix): value
        for key, value in saved.tensors("ranks").items()
        if key.startswith(prefix)
    }
