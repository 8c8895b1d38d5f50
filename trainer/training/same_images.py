"""Whether all ranks read the same images, and a continued run those that it began with.

Machines may hold different copies, and files may come and go while a run starts or between its parts. Samples are
recognised by a fingerprint each, an int64, in another folder too.
"""

from __future__ import annotations

import itertools
import os
import platform
import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from trainer.data.encoded import EncodedPhotos, size_of
from trainer.data.folders.scanning import few
from trainer.data.items import stored_targets
from trainer.data.registered import UserItems
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet, TensorSet
from trainer.errors import SetupError
from trainer.processes.world import World
from trainer.saving.checkpoint import State
from trainer.saving.run_folder import free_beside
from trainer.tasks.classification import class_name
from trainer.training.state import Resolved

AT_ONCE = 2**16  # samples
SIZED = 256  # photos of a part whose sizes are kept
LOOKED_AT = 1024  # bytes of a sample in memory: more would take long for gigabytes
ROLES = {"train": "training", "val": "held out"}
ANEW = "or choose another output= to start anew (model.init_from=RUN keeps what it learned)"


def contents_of(data: Datasets) -> dict[str, Tensor]:
    """The fingerprints (samples,) int64 of the training and the held-out samples, in their order."""
    parts = data.sources or (data.train, data.val)
    return {name: torch.from_numpy(_keys(part)) for name, part in zip(("train", "val"), parts, strict=True)}


def sizes_of(part: Any, keys: Tensor, known: Tensor) -> Tensor:
    """The indices of some photos and their sizes in bytes, (photos, 2) int64: those with `known` keys first."""
    if not isinstance(part, EncodedPhotos):
        return torch.zeros(0, 2, dtype=torch.int64)
    places = np.lexsort((keys.numpy(), ~torch.isin(keys, known).numpy()))[:SIZED]
    return torch.tensor([[place, size_of(part.address(place))] for place in places.tolist()])


def difference(was: Tensor, now: Tensor) -> str:
    """How many samples were added and removed, in words; empty where nothing changed."""
    if torch.equal(was, now):
        return ""
    _, place = torch.unique(torch.cat([was, now]), return_inverse=True)
    before, after = (torch.bincount(part, minlength=len(place)) for part in (place[: len(was)], place[len(was) :]))
    added, removed = (int(more.clamp_min(0).sum()) for more in (after - before, before - after))
    return f"{added:,} added, {removed:,} removed" if added or removed else "in another order"


def _keys(part: Any) -> Array:
    """Of photos by their paths below the root, of tensors by their values, each with its label.

    Of items by the paths and targets that their data set lists; 0 where it lists none.
    """
    if isinstance(part, EncodedPhotos):
        return _hashed(*part.listed()) ^ _rows(part.labels)
    if isinstance(part, ImageSet | TensorSet):
        inputs = part.images if isinstance(part, ImageSet) else part.inputs
        return _rows(inputs.numpy()) ^ _rows(part.labels.numpy())
    if isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(each, Tensor) for each in part):
        return _rows(part[0].numpy()) ^ _rows(part[1].numpy())
    try:
        return _listed(part.items if isinstance(part, UserItems) else part)
    except Exception:  # a user's data set may raise anything at all
        return np.zeros(len(part), np.int64)


def _listed(items: Any) -> Array:
    if isinstance(items, Subset):
        return _listed(items.dataset)[np.asarray(items.indices, np.int64)]
    if isinstance(items, ConcatDataset):
        return np.concatenate([_listed(part) for part in items.datasets])
    samples = getattr(items, "samples", None)  # torchvision's: a path and a class each
    targets = stored_targets(items)
    keys = np.zeros(len(items), np.int64) if targets is None else _rows(targets.numpy())
    if isinstance(samples, Sequence) and len(samples) == len(items) and isinstance(samples[0][0], str):
        root = str(getattr(items, "root", ""))
        names = [path.removeprefix(root).encode(errors="surrogateescape") for path, *_ in samples]
        keys = keys ^ _hashed(b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64))
    return keys


def _rows(values: Array) -> Array:
    """A hash of each row's bytes, of some of them where a row is long."""
    if not values.size:
        return np.zeros(len(values), np.int64)
    flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    flat = np.ascontiguousarray(flat[:, :: -(-flat.shape[1] // LOOKED_AT)])
    # Multiplied, so that a label does not cancel an equal name.
    return _hashed(flat.reshape(-1), np.arange(1, len(flat) + 1) * flat.shape[1]) * 31


def _hashed(joined: bytes | Array, ends: Array) -> Array:
    """A hash of each of many concatenated byte strings: the sum of its bytes, each times a random factor."""
    data = np.frombuffer(joined, np.uint8) if isinstance(joined, bytes) else joined
    lengths = np.diff(ends, prepend=0)
    factors = np.random.Generator(np.random.Philox(key=1)).integers(
        -(2**63), 2**63 - 1, int(lengths.max(initial=0)), dtype=np.int64
    )
    keys = np.zeros(len(ends), np.int64)
    for first in range(0, len(ends), AT_ONCE):
        counts = lengths[first : first + AT_ONCE]
        starts = np.cumsum(counts) - counts
        begin = int(ends[first] - counts[0])
        piece = data[begin : begin + int(counts.sum())].astype(np.int64) + 1
        places = np.arange(len(piece)) - np.repeat(starts, counts)
        keys[first : first + AT_ONCE] = np.add.reduceat(piece * factors[places], starts)
    return keys


def check_same_images(world: World, data: Datasets) -> None:
    """Raises SetupError on every rank where one sees other data than rank 0. Collective."""
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
            counts = f"{len(others)} of {len(photos)} {ROLES[role]} photos checked"
            resized.append(f"{counts} have a different size than when the run began ({few(others)})")
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
    """An output is a class by its place: raises SetupError where a checkpoint has others, or in another order."""
    was, now = state.facts.get("classes"), list(data.classes)
    if not isinstance(was, list):  # older checkpoints do not tell
        return
    was = [class_name(str(name)) for name in was]
    if was == now:
        return
    gone, new = [name for name in was if name not in now], [name for name in now if name not in was]
    if gone or new:
        changes = [f"{what}: {few(names)}" for what, names in (("gone", gone), ("new", new)) if names]
        problem = f"not those that this run was trained on ({'; '.join(changes)})"
    else:
        problem = f"in another order than this run was trained on ({few(was)} then, {few(now)} now)"
    raise SetupError(f"the classes of data.name={data.name} are {problem}: put the old names back, {ANEW}")


def tell_changes(resolved: Resolved, total_steps: int, state: State) -> None:
    """Say what was added and removed since a checkpoint was saved."""
    was, now = state.tensors.get("samples"), resolved.samples
    if not was or not now:  # an older checkpoint; or rank 0 says it
        return
    differences = {role: difference(was[part], now[part]) for part, role in ROLES.items()}
    changes = [f"{role} {change}" for role, change in differences.items() if change] + resolved.resized
    if not changes:
        return
    seen = torch.isin(now["val"], was["train"]) & ~torch.isin(now["val"], was["val"])
    steps = resolved.steps_per_epoch
    before = state.facts.get("steps_per_epoch", steps)
    consequences = [f"{int(seen.sum()):,} that are held out now were trained on"] * bool(seen.any())
    consequences += [f"an epoch is {resolved.steps_per_epoch:,} steps and was {before:,}"] * (
        before != resolved.steps_per_epoch
    )
    consequences += ["the best so far was measured on other images"] * bool(differences["held out"])
    path = resolved.tracker.path
    if state.position.step >= total_steps and path is not None:
        words = f"recipe={shlex.quote(str(path))} output={free_beside(path, 'again')}"
        consequences += [f"this run is complete and trains no further: train on them with python -m trainer {words}"]
    resolved.tracker.say(f"  the images changed since then: {'; '.join([*changes, *consequences])}")
