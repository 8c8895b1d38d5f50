"""Saving a step: copied to host memory while training pauses, and written while it continues.

Collective: all ranks call these at the same step, and each writes what it holds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.data.photos.photo_reader import shorter_side_of
from trainer.errors import NotFiniteError
from trainer.models.zoo import bare
from trainer.saving.checkpoint import OF_RANK, State, begin, is_saved
from trainer.saving.files import writing
from trainer.saving.saver import Save, Saver
from trainer.saving.tensor_files import Piece, require_finite
from trainer.telemetry.clocks import synchronise
from trainer.training.parts import PARTS
from trainer.training.run import Run

Parts = dict[str, dict[str, Piece]]  # by the name of a file without its ending, then by plain name


def save(run: Run, weights: Sequence[str] = (), sealed: bool = True) -> None:
    """Begin to save this very step: a checkpoint, and files of weights by their names. The save before is waited for.

    Raises:
        NotFiniteError: a weight, buffer or optimizer state is NaN or infinite.
        TrainerError: this save cannot begin, or the one before failed. All of it on every rank.
    """
    if run.speed_only:
        return
    begun = time.perf_counter()
    finish_saving(run)
    with run.interrupts.saving():
        parts = _copied(run, sealed)
        folder, draft, sealed = run.world.broadcast_object(run.world.on_main(lambda: _begin(run, sealed)))
        parts, writers = _sent(run, parts, draft)
        if run.world.rank in writers:
            files = {run.tracker.path / f"{name}.safetensors": _metadata(run) for name in weights if run.tracker.path}
            evaluated = "ema" if run.state.average is not None else "model"
            peers, state, check = writers - {0}, _state(run, parts), run.tracker.folder.check
            work = Save(folder, draft, sealed, state, peers, files, evaluated, run.recipe.save.keep, check)
            run.saver.start(work, begun)
    run.saver.blocked = time.perf_counter() - begun
    run.timer.start()


def finish_saving(run: Run) -> None:
    """Wait for what is being written: rank 0, which waits for the others' files, once it is known that they are there.

    Raises:
        TrainerError: on every rank, where it failed on one.
    """
    saver, world = run.saver, run.world
    with run.interrupts.saving():
        if not world.is_main:
            saver.wait()
        if world.max_(torch.tensor(float(saver.error is not None))).item():
            saver.leave(patience=0.0)
        if (cost := saver.wait()) is not None:
            run.tracker.scalars({"save/blocked_s": cost.blocked, "save/seconds": cost.seconds}, cost.step)
        try:
            world.raise_any(saver.error)
        except Exception:
            saver.remove_draft()  # no rank writes any more
            raise


def _copied(run: Run, sealed: bool) -> Parts:
    """What this rank adds to a checkpoint, or to files of weights alone, in host memory."""
    state, world = run.state, run.world
    averages = state.averages()
    state.strategy.sync_weights(averages)
    world.heartbeat()
    every = [kind(run.resolved, state) for kind in PARTS]
    if not sealed:
        every = [part for part in every if part.name in ("ema" if averages else "model", "extra")]
    parts = {part.name: state.strategy.pieces(part.tensors()) for part in every if part.saved_by == "all"}
    error = None
    try:
        for name, pieces in parts.items():
            require_finite(name, {key: piece.local for key, piece in pieces.items()})
    except NotFiniteError as caught:
        error = caught
    world.raise_any(error)
    if world.grid.size("replicas") < world.size:
        parts = {f"{name}-{world.rank:05d}": pieces for name, pieces in parts.items()}
    own = {"each", "main"} if world.is_main else {"each"}
    for part in (part for part in every if part.saved_by in own):
        parts[part.name] = {name: Piece(tensor, tensor.shape) for name, tensor in part.tensors().items()}
    return on_host(run.saver, parts, world.drives)


def on_host(saver: Saver, parts: Parts, devices: Sequence[torch.device]) -> Parts:
    """Copies that stay as they are while training goes on; what is empty is left out."""
    copies = {
        stem: {
            name: piece._replace(local=saver.to_host(stem, name, piece.local))
            for name, piece in pieces.items()
            if piece.is_whole or len(piece.local)
        }
        for stem, pieces in parts.items()
    }
    synchronise(devices)
    return {stem: pieces for stem, pieces in copies.items() if pieces}


def _begin(run: Run, sealed: bool) -> tuple[Path, Path | None, bool]:
    """On rank 0: the run folder, where files of a checkpoint go, if any do, and whether it is to be one.

    What is logged so far is on the disk before: a checkpoint that is continued has all its rows, wherever it is killed.
    """
    folder = run.tracker.path
    assert folder is not None
    run.tracker.folder.check()
    run.tracker.flush()
    with writing(folder):
        sealed = sealed and not is_saved(folder, run.state.position.step)
        cut = run.world.grid.size("replicas") < run.world.size
        return folder, (begin(folder, run.state.position.step) if sealed or cut else None), sealed


def _sent(run: Run, parts: Parts, draft: Path | None) -> tuple[Parts, frozenset[int]]:
    """What this rank is to write, and the ranks that write. One that does not see the draft, as on a machine that does
    not share the run folder, has sent what it has to rank 0."""
    world = run.world
    sees = torch.zeros(world.size)
    sees[world.rank] = world.is_main or (draft is not None and os.access(draft, os.W_OK))
    writers = frozenset(world.sum_(sees).nonzero().flatten().tolist())
    if draft is None or len(writers) == world.size:
        return parts, writers
    away = {} if world.rank in writers else {(stem, name): p for stem in parts for name, p in parts[stem].items()}
    places = world.gather({key: (piece.shape, piece.start) for key, piece in away.items()})
    tensors = world.gather_tensors({"/".join(key): piece.local for key, piece in away.items()})
    for place, named in zip(places, tensors, strict=True):
        for (stem, name), (shape, start) in place.items():
            parts.setdefault(stem, {})[name] = Piece(named[f"{stem}/{name}"], shape, start)
    return parts, writers


def _state(run: Run, parts: Parts) -> State:
    of_ranks = {stem: pieces for stem, pieces in parts.items() if OF_RANK.fullmatch(stem)}
    whole = {stem: pieces for stem, pieces in parts.items() if stem not in of_ranks}
    tensors = {stem: {name: piece.local for name, piece in pieces.items()} for stem, pieces in whole.items()}
    facts = {name: fact for kind in PARTS for name, fact in kind(run.resolved, run.state).facts().items()}
    return State(run.state.position, tensors, facts, of_ranks)


def _metadata(run: Run) -> dict[str, str]:
    """What is to be known of weights, besides their values, to use them elsewhere."""
    data = run.datasets
    names = run.recipe.model.num_classes or len(data.classes)
    model = bare(run.recipe.model, names, data.image_size, data.channels)
    return {
        "format": "pt",
        **({"model": model} if model else {}),
        "step": str(run.state.position.step),
        "ema": str(run.state.average is not None).lower(),
        "num_classes": str(names),
        "channels": str(data.channels),
        "image_size": json.dumps(data.image_size),
        **({} if data.plain else {"shorter_side": json.dumps(shorter_side_of(data))}),
        "inputs": data.inputs.to_json(),
        "mean": json.dumps(data.mean),
        "std": json.dumps(data.std),
        "classes": json.dumps(data.classes),
        "recipe": json.dumps(run.recipe.for_others()),
    }
