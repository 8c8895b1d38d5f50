"""Resuming a run: find the newest checkpoint, make it available on every rank, and restore it.

A rank reads the checkpoint from its disk, or receives the files from rank 0 if they are not there.
All ranks must call `find_newest`, `on_every_rank` and `restore` at the same time.
"""

import hashlib
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from trainer.distributed.world import World
from trainer.errors import (
    CheckpointError,
    RecipeError,
    SetupError,
    TrainerError,
    describe,
    is_out_of_memory,
)
from trainer.processes.rank import is_restart
from trainer.recipe import Recipe
from trainer.recipe.recipe_files import format_argument
from trainer.recipe.reflection import describe_restart
from trainer.recipe.text import format_yaml
from trainer.saving import checkpoint
from trainer.saving.tensor_files import CHUNK
from trainer.telemetry.tracking import NullTracker
from trainer.training.parts import PARTS
from trainer.training.state import Resolved, TrainState

_SENSELESS = (
    "the checkpoint of step {step} is intact but lacks what this version needs to continue "
    "({reason}); start from scratch in another folder (output=...), or from its weights: "
    "model.init_from=<run>/last.safetensors"
)


def find_newest(tracker: NullTracker, world: World, recipe: Recipe) -> checkpoint.State | None:
    """Return the newest intact checkpoint of the run folder, which rank 0 chooses for all ranks.

    Returns:
        The checkpoint, or None if the run is not resumed or has no checkpoint.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest intact one has no weights.
        SetupError: Another rank has checkpoints in that folder and rank 0 has none. Starting from
            scratch would lose them.
    """
    loaded = None
    if tracker.folder.replaced:
        tracker.say(f"{tracker.path}: the run that was here saved nothing; starting over")
    changes = [
        f"{format_argument(key, new)} instead of {format_yaml(old)}"
        for key, (old, new) in tracker.folder.reported_changes.items()
    ]
    if changes:
        tracker.say(f"{tracker.path}: resumed with other augmentation: {', '.join(changes)}")
    if tracker.folder.resuming and tracker.path:
        loaded = checkpoint.load_newest(tracker.path, tracker.say)
        if loaded is None:
            tracker.say(
                f"{tracker.path}: the run that was here has no checkpoint yet; starting over"
            )
    if loaded and not loaded.state.part("model"):
        raise CheckpointError(
            _SENSELESS.format(step=loaded.state.position.step, reason="no weights")
        )
    state = on_every_rank(loaded, world)
    if state is None and recipe.output is not None:
        # The number of restarts is not the only condition, because it is 0 on a node that joins a
        # restarted job later.
        is_resumed = recipe.resume is not None or world.place.restarts > 0 or is_restart()
        rank = 0
        if is_resumed:
            folder = Path(recipe.output).expanduser() / "checkpoints"
            if checkpoint.checkpoints_in(folder):
                rank = world.rank
        owner = int(world.max_(torch.tensor(rank)))
        if owner:
            raise SetupError(
                f"rank {owner} finds checkpoints in {recipe.output} where rank 0 has none: make "
                f"the machine of rank {owner} the first (torchrun --node_rank=0), or let all "
                "machines share the folder"
            )
    return state


def on_every_rank(
    loaded: checkpoint.GoodCheckpoint | None, world: World
) -> checkpoint.State | None:
    """Return on every rank the checkpoint that rank 0 has `loaded`. Collective.

    A rank reads the checkpoint from its own disk if the files that rank 0 has hashed, or complete
    copies of them, are there. If the files are missing on any rank, because its machine does not
    share the run folder, rank 0 broadcasts them in chunks. The ranks that lack the files store
    temporary copies.

    Raises:
        CheckpointError: Rank 0's files changed in the meantime.
    """
    local = None
    if loaded:
        raw = checkpoint.read_manifest(loaded.path)
        local = loaded.path, raw, checkpoint.fingerprint(loaded.path)
    described: tuple[Path, bytes, checkpoint.Fingerprint] | None = world.broadcast_object(local)
    if described is None:
        return None
    path, raw, files = described
    state = loaded.state if loaded else check_here(path, raw, files)
    if world.is_any(state is None):
        manifest = checkpoint.parse_manifest(path, raw)
        received = _receive_files(path, manifest, world, is_missing=state is None)
        state = state or received
    return state


def check_here(path: Path, raw: bytes, files: checkpoint.Fingerprint) -> checkpoint.State | None:
    """Return the checkpoint with manifest `raw`, or None if this rank does not find it complete.

    If the files have the fingerprint `files`, they are those that rank 0 has hashed, and are not
    hashed again.
    """
    try:
        if checkpoint.read_manifest(path) != raw:
            return None
        if checkpoint.fingerprint(path) != files:
            return checkpoint.load(path)
        return checkpoint.build_state(path, checkpoint.parse_manifest(path, raw), path.joinpath)
    except (CheckpointError, OSError):
        return None


def _receive_files(
    path: Path, manifest: checkpoint.Manifest, world: World, is_missing: bool
) -> checkpoint.State | None:
    """Broadcast every file of a checkpoint from rank 0. Collective.

    Returns:
        The checkpoint if `is_missing` is True on this rank, or else None.
    """
    with ExitStack() as closing:
        received = {}
        for name, entry in manifest.files.items():
            source = None
            if world.is_main:
                source = closing.enter_context(checkpoint.open_limited(path / name, entry.size))
            target = None
            if is_missing:
                target = closing.enter_context(_temporary(path))
            sha = hashlib.sha256()
            for start in range(0, entry.size, CHUNK):
                chunk = bytearray(min(CHUNK, entry.size - start))
                if source:
                    source.readinto(chunk)
                world.broadcast_(torch.frombuffer(chunk, dtype=torch.uint8))
                sha.update(chunk)
                if target:
                    target.write(chunk)
            if sha.hexdigest() != entry.sha256:
                raise CheckpointError(f"{path}: {name} changed while it was sent to other machines")
            if target:
                target.flush()
                received[name] = target
        # The files have no names, so they are mapped by the paths of their descriptors. They exist
        # until the tensors that map them are deleted.
        if is_missing:
            return checkpoint.build_state(
                path, manifest, lambda name: f"/dev/fd/{received[name].fileno()}"
            )
        return None


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file without a name, for a file of the checkpoint at `path`.

    Raises:
        SetupError: The file cannot be created, or the block raises an OSError, as on a full disk.
    """
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise SetupError(
            f"{path} is not on this machine, and there is no room for it in "
            f"{tempfile.gettempdir()} ({error.strerror}): let all machines share the run folder, "
            "or set TMPDIR to a larger folder"
        ) from error


def extend_recipe(
    recipe: Recipe, shorter: Recipe, saved: checkpoint.State, per_epoch: int
) -> Recipe:
    """Return the recipe of a run that continues after its `shorter` recipe has ended.

    A cosine schedule restarts at the end of `shorter`. The restart is written to the recipe, so
    that the learning rate depends on the recipe alone, even if the run is killed and resumed.

    Args:
        recipe: The recipe of the longer run.
        shorter: The recipe of the run that has ended.
        saved: The last checkpoint of that run.
        per_epoch: Steps per epoch, for checkpoints that do not record them.

    Raises:
        RecipeError: The longer run ends at the same step.
    """
    per_epoch = saved.facts.get("steps_per_epoch", per_epoch)
    offset = saved.facts.get("shift", 0)
    old_end = min(shorter.epochs * per_epoch + offset, shorter.max_steps or math.inf)
    new_end = min(recipe.epochs * per_epoch + offset, recipe.max_steps or math.inf)
    if new_end == old_end:
        key = "epochs"
        more = f"{recipe.epochs + 1}"
        if recipe.epochs > shorter.epochs:
            key = "max_steps"
            more = "null"
        raise RecipeError(
            f"{key}={getattr(recipe, key)} ends this run at step {new_end:.0f}, as before: to "
            f"train longer, add {key}={more}"
        )
    epochs_done = (old_end - offset) / per_epoch
    if describe_restart(shorter, recipe) is None or epochs_done <= recipe.schedule.warmup_epochs:
        return recipe
    return recipe.replace(schedule__restart=sorted({*shorter.schedule.restarts, epochs_done}))


def restore(resolved: Resolved, state: TrainState, saved: checkpoint.State) -> None:
    """Restore a checkpoint whose weights have the names and shapes of the model. Collective.

    Raises:
        CheckpointError: The optimizer state or moving average does not fit, or the checkpoint was
            not saved by a run.
    """
    try:
        for part in PARTS:
            part(resolved, state).restore(saved)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TrainerError) or is_out_of_memory(error):
            raise
        message = _SENSELESS.format(step=saved.position.step, reason=describe(error))
        raise CheckpointError(message) from error
