"""Which checkpoint a run continues, on every rank: read where a rank finds it, sent by rank 0 where it does not; and
going on with it. Collective: every rank calls these."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from trainer.errors import CheckpointError, RecipeError, SetupError, TrainerError, is_out_of_memory, text_of
from trainer.processes.rank import is_restart
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.recipe.reflection import new_cosine
from trainer.saving import checkpoint
from trainer.saving.tensor_files import CHUNK
from trainer.telemetry.tracking import NullTracker
from trainer.training.parts import PARTS
from trainer.training.state import Resolved, TrainState

_SENSELESS = (
    "the checkpoint of step {step} is intact but lacks what this version needs to continue ({reason}); "
    "start anew in another folder (output=...), or from its weights: model.init_from=<run>/last.safetensors"
)


def newest(tracker: NullTracker, world: World, recipe: Recipe) -> checkpoint.State | None:
    """The newest good checkpoint of a run folder that is being continued; rank 0 finds it and all follow.

    Raises:
        CheckpointError: there are checkpoints and none is good.
        SetupError: another rank has checkpoints in that folder and rank 0 has none; starting over would lose them.
    """
    mine = None
    if tracker.folder.replaced:
        tracker.say(f"{tracker.path}: the run that was here saved nothing; starting over")
    if tracker.folder.resuming and tracker.path is not None:
        mine = checkpoint.newest(tracker.path, tracker.say)
        if mine is None:
            tracker.say(f"{tracker.path}: the run that was here has no checkpoint yet; starting over")
    if mine and not mine.state.part("model"):
        raise CheckpointError(_SENSELESS.format(step=mine.state.position.step, reason="no weights"))
    state = on_every_rank(mine, world)
    if state is None and recipe.output is not None:
        # A rank of a node that joins has no restarts of its own.
        continued = recipe.resume is not None or world.place.restarts > 0 or is_restart()
        here = continued and bool(checkpoint.checkpoints_in(Path(recipe.output).expanduser() / "checkpoints"))
        owner = int(world.max_(torch.tensor(world.rank if here else 0)).item())
        if owner:
            raise SetupError(
                f"rank {owner} finds checkpoints in {recipe.output} where rank 0 has none: make the machine of "
                f"rank {owner} the first (torchrun --node_rank=0), or let all machines share the folder"
            )
    return state


def on_every_rank(mine: checkpoint.GoodCheckpoint | None, world: World) -> checkpoint.State | None:
    """Rank 0's checkpoint, None where it has none; collective.

    A rank that finds the very same files, which rank 0 has hashed, or whole copies of them, reads from these. Where one
    does not, as on another machine that does not share the run folder, rank 0 sends the files in pieces, and that rank
    keeps them in temporary ones. Raises CheckpointError where rank 0's files changed meanwhile.
    """
    described: tuple[Path, bytes, checkpoint.Fingerprint] | None = world.broadcast_object(
        (mine.path, checkpoint.manifest_bytes(mine.path), checkpoint.fingerprint(mine.path)) if mine else None
    )
    if described is None:
        return None
    path, raw, files = described
    state = mine.state if mine else found_here(path, raw, files)
    if world.max_(torch.tensor(float(state is None))).item():
        received = _sent(path, checkpoint.understood(path, raw), world, wanted=state is None)
        state = state or received
    return state


def found_here(path: Path, raw: bytes, files: checkpoint.Fingerprint) -> checkpoint.State | None:
    """The checkpoint of this manifest, where this rank finds it whole; rank 0's very `files` are not hashed again."""
    try:
        if checkpoint.manifest_bytes(path) != raw:
            return None
        if checkpoint.fingerprint(path) != files:
            return checkpoint.load(path)
        return checkpoint.assembled(path, checkpoint.understood(path, raw), path.joinpath)
    except (CheckpointError, OSError):
        return None


def _sent(path: Path, manifest: checkpoint.Manifest, world: World, wanted: bool) -> checkpoint.State | None:
    """Every file from rank 0, for the ranks that want them."""
    with ExitStack() as closing:
        kept: dict[str, BinaryIO] = {}
        for name, entry in manifest.files.items():
            source = closing.enter_context(checkpoint.reading(path / name, entry.size))[0] if world.is_main else None
            target = closing.enter_context(_temporary(path)) if wanted else None
            sha = hashlib.sha256()
            for start in range(0, entry.size, CHUNK):
                piece = bytearray(min(CHUNK, entry.size - start))
                if source:
                    source.readinto(piece)
                world.broadcast_(torch.frombuffer(piece, dtype=torch.uint8))
                sha.update(piece)
                if target:
                    target.write(piece)
            if sha.hexdigest() != entry.sha256:
                raise CheckpointError(f"{path}: {name} changed while it was sent to other machines")
            if target:
                target.flush()
                kept[name] = target
        # The files have no names, and last as long as what is read from them.
        return checkpoint.assembled(path, manifest, lambda name: f"/dev/fd/{kept[name].fileno()}") if wanted else None


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """A file that no one else sees."""
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise SetupError(
            f"{path} is not on this machine, and there is no room for it in {tempfile.gettempdir()} "
            f"({error.strerror}): let all machines share the run folder, or set TMPDIR to a larger folder"
        ) from error


def lengthened(recipe: Recipe, shorter: Recipe, saved: checkpoint.State, per_epoch: int) -> Recipe:
    """The recipe of a run that trains on where a `shorter` one ended; `per_epoch` steps where `saved` does not tell.

    A cosine begins anew there: the rate follows from the recipe alone, wherever a run is killed. Raises RecipeError
    where it ends as before.
    """
    per_epoch, shift = saved.facts.get("steps_per_epoch", per_epoch), saved.facts.get("shift", 0)
    was, now = (min(r.epochs * per_epoch + shift, r.max_steps or math.inf) for r in (shorter, recipe))
    if now == was:
        key, more = ("max_steps", "null") if recipe.epochs > shorter.epochs else ("epochs", f"{recipe.epochs + 1}")
        word = f"{key}={getattr(recipe, key)}"
        raise RecipeError(f"{word} ends this run at step {now:.0f}, as before: to train longer, add {key}={more}")
    done = (was - shift) / per_epoch
    if new_cosine(shorter, recipe) is None or done <= recipe.schedule.warmup_epochs:
        return recipe
    return recipe.replace(schedule__restart=sorted({*shorter.schedule.restarts, done}))


def restore(resolved: Resolved, state: TrainState, saved: checkpoint.State) -> None:
    """Continue a checkpoint, whose weights have the names and shapes of the model.

    Raises:
        CheckpointError: its optimizer state or moving average does not fit, or it is whole and yet no run's.
    """
    try:
        for part in PARTS:
            part(resolved, state).restore(saved)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TrainerError) or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:120]}"
        raise CheckpointError(_SENSELESS.format(step=saved.position.step, reason=reason)) from error
