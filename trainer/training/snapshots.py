"""Saving a step: copy to host memory while training pauses, then write while training continues."""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.data.photos.photo_reader import evaluation_shorter_side
from trainer.distributed.world import World
from trainer.errors import NotFiniteError
from trainer.models.zoo import format_bare_call
from trainer.processes.interrupts import Interrupts
from trainer.saving.checkpoint import Manifest, State, create_draft, is_saved
from trainer.saving.files import report_write_errors
from trainer.saving.saver import Save, Saver
from trainer.saving.tensor_files import Shard, require_finite, wrap_tensors
from trainer.tasks import Task
from trainer.telemetry.clocks import StepTimer, synchronise
from trainer.training.parts import PARTS
from trainer.training.replicas import ReplicaComparison
from trainer.training.state import Resolved, TrainState

# Shards that a rank writes: {name of the file without suffix: {name of the whole tensor: shard}}.
Parts = dict[str, dict[str, Shard]]


@dataclass
class Snapshots:
    """Writer of a run's checkpoints and weights. All ranks call its methods at the same step.

    Attributes:
        resolved: The configuration of the run.
        state: The state that is saved.
        interrupts: Signals, which do not interrupt a save.
        timer: Timer of the steps, which excludes saves.
        replicas: Compares the replicas before each save.
        saver: Writes this rank's files in a thread.
    """

    resolved: Resolved
    state: TrainState
    interrupts: Interrupts
    timer: StepTimer
    replicas: ReplicaComparison

    def __post_init__(self) -> None:
        self.saver = Saver(self.resolved.world.rank, self.resolved.recipe.timeout)

    def save(self, weights: Sequence[str] = (), sealed: bool = True) -> None:
        """Start to save the present step, after the previous save has ended. Collective.

        A run that only measures its speed saves nothing.

        Args:
            weights: Names of the files of weights to write, without the ending `.safetensors`.
            sealed: Whether to write a checkpoint, unless there is one of this step.

        Raises:
            NotFiniteError: A weight, buffer or optimizer state is NaN or infinite. Raised on every
                rank.
            TrainerError: The replicas differ, this save cannot start, or the previous save failed.
                Raised on every rank.
        """
        resolved = self.resolved
        state = self.state
        world = resolved.world
        if resolved.speed_only:
            return
        start = time.perf_counter()
        self.finish_saving()
        with self.interrupts.saving():
            parts = self._copy_parts(sealed)
            begun = world.on_main(lambda: self._begin(sealed))
            path, draft, sealed = world.broadcast_object(begun)
            parts, writers = _send_to_writers(world, parts, draft)
            if world.rank in writers:
                files = {}
                if resolved.tracker.path:
                    for name in weights:
                        file = resolved.tracker.path / f"{name}.safetensors"
                        files[file] = _collect_metadata(resolved, state)
                work = Save(
                    path,
                    draft,
                    sealed,
                    _state(resolved, state, parts),
                    writers - {0},
                    files,
                    "ema" if state.average is not None else "model",
                    resolved.recipe.save.keep,
                    resolved.tracker.folder.check,
                    resolved.recipe.save.top_k or 0,
                    partial(_rank_checkpoint, resolved.task, state.history.evaluations),
                )
                self.saver.start(work, start)
        self.saver.blocked = time.perf_counter() - start
        self.timer.start()

    def finish_saving(self) -> None:
        """Wait for the save that is being written. Collective.

        Rank 0 waits last, because its thread waits for the files of the other ranks. If another
        rank has failed, the thread stops waiting.

        Raises:
            TrainerError: The save failed on some rank. Raised on every rank.
        """
        saver = self.saver
        world = self.resolved.world
        with self.interrupts.saving():
            if not world.is_main:
                saver.wait()
            if world.is_any(saver.error is not None):
                saver.leave(patience=0.0)
            if (cost := saver.wait()) is not None:
                values = {"save/blocked_s": cost.blocked, "save/seconds": cost.seconds}
                self.resolved.tracker.scalars(values, cost.step)
            try:
                world.raise_any(saver.error)
            except Exception:
                # No rank writes to the draft any more, so it can be removed.
                saver.remove_draft()
                raise

    def _copy_parts(self, sealed: bool) -> Parts:
        """Compare the replicas, and copy this rank's tensors to host memory.

        The copies are all tensors for a checkpoint if `sealed`, and otherwise only the weights.

        Raises:
            NotFiniteError: A weight, buffer or optimizer state is NaN or infinite. Raised on every
                rank.
            RecipeError: The weights of the replicas differ. Raised on every rank.
        """
        state = self.state
        world = self.resolved.world
        averages = state.averages()
        state.strategy.sync_weights(averages)
        if sealed:
            world.heartbeat()
        self.replicas.compare()
        kinds = [kind(self.resolved, state) for kind in PARTS]
        if not sealed:
            name = "ema" if averages else "model"
            kinds = [part for part in kinds if part.name == name]
        parts = {
            part.name: state.strategy.pieces(part.tensors())
            for part in kinds
            if part.saved_by == "all"
        }
        error = None
        try:
            for name, pieces in parts.items():
                require_finite(name, {key: piece.local for key, piece in pieces.items()})
        except NotFiniteError as caught:
            error = caught
        world.raise_any(error)
        # If the model is divided over ranks, each rank writes files of its own.
        if world.grid.size("replicas") < world.size:
            parts = {f"{name}-{world.rank:05d}": pieces for name, pieces in parts.items()}
        for part in kinds:
            if part.saved_by == "each" or (part.saved_by == "main" and world.is_main):
                parts[part.name] = wrap_tensors(part.tensors())
        return on_host(self.saver, parts, world.local_devices)

    def _begin(self, sealed: bool) -> tuple[Path, Path | None, bool]:
        """Start a checkpoint on rank 0.

        The logs are flushed to the disk first. So whenever the run is killed, they have all rows up
        to the checkpoint from which it is resumed.

        Returns:
            `(folder, draft, sealed)`: `folder` is the run folder. `draft` is the folder to which
            the ranks write, or None if they write no checkpoint and no shards. `sealed` is whether
            the draft will be sealed as a checkpoint.
        """
        tracker = self.resolved.tracker
        folder = tracker.path
        step = self.state.position.step
        assert folder
        tracker.folder.check()
        tracker.flush()
        with report_write_errors(folder):
            sealed = sealed and not is_saved(folder, step)
            world = self.resolved.world
            is_divided = world.grid.size("replicas") < world.size
            draft = create_draft(folder, step) if sealed or is_divided else None
            return folder, draft, sealed


def _rank_checkpoint(
    task: Task, evaluations: Sequence[dict[str, float]], manifest: Manifest
) -> float | None:
    """Return how good a checkpoint is by the task's metric; larger is better.

    The value comes from `evaluations`, because the checkpoint may have been saved before the
    evaluation of its step. Return None if its step was not evaluated, or the metric is NaN.
    """
    for evaluation in evaluations:
        value = evaluation.get(task.metric, math.nan)
        if evaluation["step"] == manifest.step and not math.isnan(value):
            return value if task.larger_is_better else -value
    return None


def on_host(saver: Saver, parts: Parts, devices: Sequence[torch.device]) -> Parts:
    """Copy shards to host memory, so that training may change the originals during the save.

    Empty shards are left out.
    """
    copies: Parts = {}
    for stem, pieces in parts.items():
        for name, piece in pieces.items():
            if piece.is_whole or len(piece.local):
                local = saver.to_host(stem, name, piece.local)
                copies.setdefault(stem, {})[name] = piece._replace(local=local)
    # The copies from GPUs are asynchronous, so the host waits for them here.
    synchronise(devices)
    return copies


def _send_to_writers(
    world: World, parts: Parts, draft: Path | None
) -> tuple[Parts, frozenset[int]]:
    """Send tensors to rank 0 from ranks that cannot write to the draft. Collective.

    A rank cannot write if its machine does not share the run folder.

    Returns:
        `(parts, writers)`: The shards that this rank writes, and the ranks that write.
    """
    can_write = torch.zeros(world.size)
    if world.is_main or (draft and os.access(draft, os.W_OK)):
        can_write[world.rank] = 1
    writer_ranks = world.sum_(can_write).nonzero().flatten()
    writers = frozenset(writer_ranks.tolist())
    if draft is None or len(writers) == world.size:
        return parts, writers
    local_layout = {}
    local_tensors = {}
    if world.rank not in writers:
        for stem, pieces in parts.items():
            for name, piece in pieces.items():
                local_layout[stem, name] = piece.shape, piece.start
                local_tensors[f"{stem}/{name}"] = piece.local
    layouts = world.gather(local_layout)
    tensors = world.gather_tensors(local_tensors)
    for layout, rank_tensors in zip(layouts, tensors, strict=True):
        for (stem, name), (shape, start) in layout.items():
            local = rank_tensors[f"{stem}/{name}"]
            parts.setdefault(stem, {})[name] = Shard(local, shape, start)
    return parts, writers


def _state(resolved: Resolved, state: TrainState, parts: Parts) -> State:
    facts: dict[str, Any] = {}
    for kind in PARTS:
        facts |= kind(resolved, state).facts()
    return State(state.position, parts, facts)


def _collect_metadata(resolved: Resolved, state: TrainState) -> dict[str, str]:
    """Return the metadata that other programs need to use the weights."""
    recipe = resolved.recipe
    data = resolved.datasets
    outputs = recipe.model.num_classes or len(data.classes)
    metadata = {"inputs": data.inputs.to_json()}
    if model := format_bare_call(recipe.model, outputs, data.image_size, data.channels):
        metadata["model"] = model
    history = state.history
    step, epoch, step_in_epoch = state.position
    # Within an epoch, `epoch` counts the completed ones.
    if step_in_epoch:
        epoch += 1
    values: dict[str, Any] = {"step": step, "epoch": epoch}
    if history.evaluated_step == step:
        metric = resolved.task.metric
        values |= {"metric": metric, "value": history.validation[f"val_{metric}"]}
    values |= {
        "ema": state.average is not None,
        "num_classes": outputs,
        "channels": data.channels,
        "image_size": data.image_size,
    }
    if not data.plain:
        values["shorter_side"] = evaluation_shorter_side(data)
        values["interpolation"] = data.interpolation
    values |= {
        "mean": data.mean,
        "std": data.std,
        "classes": data.classes,
        "recipe": recipe.for_others(),
    }
    return metadata | {key: json.dumps(value) for key, value in values.items()}
