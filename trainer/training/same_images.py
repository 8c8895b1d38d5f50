"""Whether all ranks read the same images, and a continued run those that it began with.

Machines may hold different copies, and files may come and go while a run starts or between its parts.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.data import Datasets
from trainer.data.contents import contents_of, difference, sizes_of
from trainer.data.encoded import EncodedPhotos, size_of
from trainer.data.folders.scanning import few
from trainer.errors import SetupError
from trainer.processes.world import World
from trainer.saving.checkpoint import State
from trainer.training.run import Run

ROLES = {"train": "training", "val": "held out"}
ANEW = "or choose another output= to start anew (model.init_from=RUN keeps what it learned)"


def check_same_images(world: World, data: Datasets) -> None:
    """Compare the data that this rank sees with rank 0's. Collective.

    Raises:
        SetupError: on every rank, where one sees other data.
    """
    facts = world.gather((platform.node(), _facts(data)))
    odd = next((rank for rank, (_, theirs) in enumerate(facts) if theirs != facts[0][1]), None)
    why = world.broadcast_object(None if odd is None else _difference(odd, facts[odd], facts[0][1]))
    if why is not None:
        kept = ", and the run folder if it is continued: its split.csv tells what it holds out"
        raise SetupError(
            f"{why}: every machine needs the same files in data.root" + kept * (data.split_table is not None)
        )


def _facts(data: Datasets) -> dict[str, Any]:
    parts = (data.train, data.val)
    return {
        "training images": f"{len(data.train):,}",
        "held-out images": f"{len(data.val):,}",
        "classes": f"{len(data.classes)} ({few(data.classes)})",
        "shape": " x ".join(map(str, data.inputs.shape)),
        "files": [part.digest() for part in parts if isinstance(part, EncodedPhotos)],
    }


def _difference(rank: int, theirs: tuple[str, dict[str, Any]], here: dict[str, Any]) -> str:
    host, there = theirs
    what = next(key for key in here if there[key] != here[key])
    if what == "files":
        return f"rank {rank} on {host} trains on other files than rank 0, or holds out others"
    return f"rank {rank} on {host} found other data than rank 0 ({what}: {there[what]} there, {here[what]} here)"


def identified(world: World, data: Datasets, state: State | None) -> tuple[dict[str, Tensor], list[str]]:
    """What rank 0 keeps to recognise the images, and how many have other sizes than in a checkpoint. Collective.

    Raises:
        SetupError: on every rank, where the classes are others, or their folders were exchanged.
    """
    if state is not None:
        _check_classes(data, state)
    was = state.tensors.get("samples", {}) if state is not None else {}
    samples, resized = contents_of(data) if world.is_main else {}, []
    moved: dict[str, str] = {}
    for role, part in zip([*samples], data.sources or (data.train, data.val), strict=False):
        places, sizes = was.get(f"{role}_sizes", torch.zeros(0, 2, dtype=torch.int64)).T
        known = was.get(role, places)[places]
        sized = samples[f"{role}_sizes"] = sizes_of(part, samples[role], known)
        before = dict(zip(known.tolist(), sizes.tolist(), strict=True))
        photos = [(part.name(at), before.get(int(samples[role][at]), -1), size) for at, size in sized.tolist()]
        photos = [photo for photo in photos if min(photo[1:]) >= 0]
        others = [name for name, then, now in photos if then != now]
        if others:
            counts = f"{len(others)} of {len(photos)} {ROLES[role]} photos looked at"
            resized.append(f"{counts} have another size than when the run began ({few(others)})")
            moved |= _moved(part, photos, data.classes)
    moved = world.broadcast_object(moved)
    if moved:
        moves = few([f"{source} is now in {other}" for source, other in moved.items()])
        raise SetupError(f"the class folders of this run changed places ({moves}): put them back, {ANEW}")
    return samples, resized


def _moved(part: EncodedPhotos, photos: Sequence[tuple[str, int, int]], classes: Sequence[str]) -> dict[str, str]:
    """Class folders of which one holds now what another one held, by `photos`: names, and bytes then and now."""
    folders = defaultdict(list)
    for name, then, now in photos:
        folder, _, below = name.partition("/")
        folders[folder].append((below, then, then != now))
    others = [name for name in classes if sum(new for *_, new in folders[name]) > max(2, len(folders[name]) / 4)]
    moved = {
        name: other
        for name, other in itertools.permutations(others, 2)
        if all(size_of(os.fsencode(f"{part.root}/{other}/{below}")) == then for below, then, _ in folders[name])
    }
    return moved if {*moved} == {*moved.values()} else {}


def _check_classes(data: Datasets, state: State) -> None:
    """Compare the classes with those that a checkpoint was trained on: an output is a class by its place.

    Raises:
        SetupError: they are others, or in another order.
    """
    was, now = state.facts.get("classes"), list(data.classes)
    if not isinstance(was, list) or was == now:  # older checkpoints do not tell
        return
    gone, new = [name for name in was if name not in now], [name for name in now if name not in was]
    if gone or new:
        changes = [f"{what}: {few(names)}" for what, names in (("gone", gone), ("new", new)) if names]
        problem = f"not those that this run was trained on ({'; '.join(changes)})"
    else:
        problem = f"in another order than this run was trained on ({few(was)} then, {few(now)} now)"
    raise SetupError(f"the classes of data.name={data.name} are {problem}: put the old names back, {ANEW}")


def tell_changes(run: Run, state: State) -> None:
    """Say what was added and removed since a checkpoint was saved."""
    was, now = state.tensors.get("samples"), run.samples
    if not was or not now:  # an older checkpoint; or rank 0 says it
        return
    differences = {role: difference(was[part], now[part]) for part, role in ROLES.items()}
    changes = [f"{role} {change}" for role, change in differences.items() if change] + run.resized
    if not changes:
        return
    seen = torch.isin(now["val"], was["train"]) & ~torch.isin(now["val"], was["val"])
    before = state.facts.get("steps_per_epoch", run.steps_per_epoch)
    consequences = [f"{int(seen.sum()):,} that are held out now were trained on"] * bool(seen.any())
    consequences += [f"an epoch is {run.steps_per_epoch:,} steps and was {before:,}"] * (before != run.steps_per_epoch)
    consequences += ["the best so far was measured on other images"] * bool(differences["held out"])
    run.tracker.say(f"  the images changed since then: {'; '.join([*changes, *consequences])}")
