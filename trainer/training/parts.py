"""What a checkpoint holds: each part of a run's state says here, once, what is saved of it and how a run goes on.

Collective: all ranks restore the same parts, in the order of `PARTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.optim.optimizers import optimizer_state
from trainer.processes.rank import job_id
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving.checkpoint import Position, State
from trainer.training.randomness import random_states, restore_random_states, seed_ranks
from trainer.training.same_images import tell_changes
from trainer.training.state import History, Resolved, TrainState


class Part:
    """One thing that a checkpoint holds: tensors, facts for its manifest, or both."""

    name = ""  # of its file
    # Who saves its tensors: rank 0; all ranks, the rows or stages that each has of the whole model's; or each its own.
    saved_by: Literal["main", "all", "each"] = "main"
    trains = False  # whether training keeps them on the device

    def __init__(self, resolved: Resolved, state: TrainState) -> None:
        self.resolved, self.state = resolved, state
        self.recipe, self.world, self.say = resolved.recipe, resolved.world, resolved.tracker.say

    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's, live, under plain names."""
        return {}

    def facts(self) -> dict[str, Any]:
        """JSON."""
        return {}

    def restore(self, saved: State) -> None:
        """Go on with what was saved."""


class Weights(Part):
    """Parameters and buffers."""

    name, saved_by, trains = "model", "all", True

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.weights()

    def restore(self, saved: State) -> None:
        self.state.strategy.scatter(saved.part(self.name), self.tensors())


class OptimizerState(Part):
    name, saved_by, trains = "optimizer", "all", True

    def tensors(self) -> Mapping[str, Tensor]:
        return optimizer_state(self.state.optimizer, self.state.parameters)

    def restore(self, saved: State) -> None:
        try:
            self.state.strategy.scatter(saved.part(self.name), self.tensors())
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint's optimizer state does not fit: {error} in it (weights alone: model.init_from=RUN)"
            ) from None


class OuterOptimizer(Part):
    """The mode's own, whose anchor is the same for any number of workers; told where it is not continued."""

    name, trains = "outer", True

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.strategy.outer_state()

    def restore(self, saved: State) -> None:
        before, kept = saved.part(self.name), self.tensors()
        self.state.strategy.load_outer_state(before)
        if bool(kept) != bool(before):
            became = "starts anew: the checkpoint holds none" if kept else "is dropped: this run has none"
            self.say(f"  local_sgd's outer optimizer {became}")


class Scaler(Part):
    """Of fp16's losses."""

    name = "scaler"

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.updater.state()

    def restore(self, saved: State) -> None:
        before = saved.tensors.get(self.name, {})
        for name, tensor in self.tensors().items():
            if name in before:
                tensor.copy_(before[name])


class Averages(Part):
    """The moving average of the weights."""

    name, saved_by, trains = "ema", "all", True

    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.averages()

    def restore(self, saved: State) -> None:
        if self.state.average is None:
            return
        before = saved.part(self.name)
        if not before:
            raise CheckpointError("the checkpoint holds no moving average; choose another output= to start anew")
        self.state.strategy.scatter(before, self.state.average.average)


class Standing(Part):
    """Where the run stands.

    A mode that cuts an epoch into another number of steps (local SGD, Hogwild) takes as large a share of this epoch as
    done; steps go on being counted from the checkpoint's, and the learning rate follows the epochs.
    """

    def facts(self) -> dict[str, Any]:
        measured, numbers = self.recipe.shares == "auto", self.state.strategy.share.numbers
        shares = {"numbers": numbers, "devices": self.world.devices, "measured": measured}
        return {"steps_per_epoch": self.resolved.steps_per_epoch, "shift": self.state.step_offset, "shares": shares}

    def restore(self, saved: State) -> None:
        state, now = self.state, self.resolved.steps_per_epoch
        state.position = saved.position
        step, epoch, inside = saved.position
        before = saved.facts.get("steps_per_epoch", now)
        state.step_offset = saved.facts.get("shift", 0)  # of a run that was continued so before
        left = epoch * before - (step - state.step_offset)  # of an epoch that `max_steps` ended
        if not inside and 0 < left < before and step < (self.recipe.max_steps or math.inf):
            epoch, inside = epoch - 1, before - left
            state.position = Position(step, epoch, inside)
        if before != now:
            inside = inside * now // before  # below the epoch's end, unless it was there
            state.position = Position(step, epoch, inside)
            state.step_offset = step - (epoch * now + inside)
        state.total_steps = self.recipe.epochs * now + state.step_offset
        share, then = state.strategy.share, saved.facts.get("shares", {}).get("numbers", [])
        if share.every_sample and inside and then != [*share.numbers]:
            self.say("  other shares in the middle of an epoch: in this one some images come twice, or not at all")
        if self.recipe.max_steps is not None:
            state.total_steps = min(state.total_steps, self.recipe.max_steps)


class KnownImages(Part):
    """Which they are, and which weights teach what they show."""

    name = "samples"

    def tensors(self) -> Mapping[str, Tensor]:
        return self.resolved.samples

    def facts(self) -> dict[str, Any]:
        teacher = self.resolved.teacher
        return {"classes": self.resolved.datasets.classes, "teacher": teacher and teacher.facts}

    def restore(self, saved: State) -> None:
        before, now = saved.facts.get("teacher"), self.facts()["teacher"]
        if before not in (now, now and now[0]):  # earlier versions kept the weights' digest alone
            word = f"distill.teacher={self.recipe.distill.teacher}"
            what = f"{word} has other weights, precision, mean or std than this run has learned from"
            raise CheckpointError(f"{what}: put those back, or choose another output= to start anew")
        tell_changes(self.resolved, self.state.total_steps, saved)


class Remembered(Part):
    """What the run remembers."""

    def facts(self) -> dict[str, Any]:
        return {"history": {**asdict(self.state.history), "seconds": self.state.seconds()}, "run_id": job_id()}

    def restore(self, saved: State) -> None:
        state, history = self.state, saved.facts["history"]
        # Before there were tasks, the best was a top-1 accuracy by name.
        best = history.get("best", history.get("best_top1"))
        state.history = TypeAdapter(History).validate_python({**history, "best": best})
        if state.position.epoch < saved.position.epoch:  # which goes on
            state.history.latest.pop()
            state.history.epoch_steps = state.position.step_in_epoch
            state.history.epoch_loss = state.history.losses.pop() * state.history.epoch_steps
        self.say(f"resuming at step {state.position.step} of {state.total_steps}")


class OfRank(Part):
    """What each rank has for itself, in a file of its own: random states, unlogged losses, and what its mode lets
    differ from rank to rank."""

    saved_by = "each"

    def __init__(self, resolved: Resolved, state: TrainState) -> None:
        super().__init__(resolved, state)
        self.name = part_of_rank(self.world.rank)

    def tensors(self) -> Mapping[str, Tensor]:
        unlogged = torch.stack(self.state.unlogged) if self.state.unlogged else torch.zeros(0)
        return {**random_states(self.world.drives), "unlogged": unlogged, **self._of_mode()}

    def _of_mode(self) -> dict[str, Tensor]:
        parts = (kind(self.resolved, self.state) for kind in PARTS if kind.name in self.recipe.traits.per_rank_state)
        return {f"{part.name}:{name}": tensor for part in parts for name, tensor in part.tensors().items()}

    def facts(self) -> dict[str, Any]:
        return {"topology": bound_to(self.recipe, self.world)}

    def restore(self, saved: State) -> None:
        was, now = saved.facts["topology"], bound_to(self.recipe, self.world)
        if was != {key: now[key] for key in now if key in was}:  # older ones do not tell of stages
            self.say(f"  saved as {was}, continued as {now}: random streams (dropout) start anew")
            seed_ranks(self.recipe.seed + self.state.position.step, self.world.rank)
            # Losses of other ranks than there are now: rank 0 takes their sum.
            total = torch.stack([_of_rank(saved, rank)["unlogged"] for rank in range(was["world_size"])]).sum(0)
            self._take_losses(total if self.world.is_main else total * 0)
            return
        mine = _of_rank(saved, self.world.rank)
        if fresh := restore_random_states(mine, self.world.drives):
            self.say(f"  random streams (dropout) start anew on {', '.join(map(str, fresh))}: none was saved")
        with torch.no_grad():
            for name, tensor in self._of_mode().items():
                if name in mine:  # an optimizer that starts anew has other tensors
                    tensor.copy_(mine[name])
        self._take_losses(mine["unlogged"])

    def _take_losses(self, losses: Tensor) -> None:
        known = losses[~losses.isnan()]  # earlier versions could leave out steps as not finite
        self.state.unlogged = list(known.to(self.world.device).unbind())


PARTS: tuple[type[Part], ...] = (
    *(Weights, OptimizerState, OuterOptimizer, Scaler, Averages),
    *(Standing, KnownImages, Remembered, OfRank),
)


def bound_to(recipe: Recipe, world: World) -> dict[str, Any]:
    """What the random streams of the ranks are bound to: which data a rank computes, and which part of the model."""
    dimensions = {name: size for name, size in world.grid.sizes.items() if name != "replicas"}
    return {"mode": recipe.mode, "world_size": world.size, **dimensions}


def part_of_rank(rank: int) -> str:
    """The part of a checkpoint that holds what a rank has for itself."""
    return f"rank-{rank:05d}"


def _of_rank(saved: State, rank: int) -> dict[str, Tensor]:
    """What a rank had for itself; older checkpoints hold it in one part for all."""
    if part_of_rank(rank) in saved.tensors:
        return saved.tensors[part_of_rank(rank)]
    prefix = f"{rank}/"
    return {key.removeprefix(prefix): value for key, value in saved.tensors["ranks"].items() if key.startswith(prefix)}
