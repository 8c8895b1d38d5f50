"""Whether all ranks read the same images, and a continued run those that it began with.

Machines may hold different copies, and files may come and go while a run starts or between its parts. A checkpoint
keeps of each part how many samples it has, a hash of their names and targets, and the sizes of some files.
"""

from __future__ import annotations

import hashlib
import os
import platform
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.encoded import EncodedPhotos, size_of
from trainer.data.folders.scanning import few
from trainer.data.items import stored_targets
from trainer.data.registered import UserItems
from trainer.data.sets import Datasets, ImageSet, TensorSet
from trainer.errors import SetupError
from trainer.processes.world import World
from trainer.saving.checkpoint import State
from trainer.tasks.classification import class_name
from trainer.training.state import Resolved

SIZED = 256  # photos of a part whose sizes are kept
LOOKED_AT = 1024  # bytes of a sample in memory: more would take long for gigabytes
ROLES = {"train": "training", "val": "held out"}
ANEW = "or choose another output= to start anew (model.init_from=RUN keeps what it learned)"


def contents_of(data: Datasets) -> dict[str, Tensor]:
    """Of the training and the held-out part, int64: samples, a hash of them all, and sizes of some in bytes."""
    found = {}
    for role, part in zip(ROLES, data.sources or (data.train, data.val), strict=True):
        sizes = [size_of(part.address(at)) for at in _sized(len(part))] if isinstance(part, EncodedPhotos) else []
        count = len(part[0] if isinstance(part, tuple | list) else part)
        found[role + "_images"] = torch.tensor([count, _digest(part), *sizes])
    return found


def _sized(count: int) -> list[int]:
    """The photos, of so many, whose sizes are kept."""
    return [int(place) for place in np.linspace(0, count - 1, min(SIZED, count))]


def _digest(part: Any) -> int:
    """Of photos by their names, of tensors by their values, each with its targets; of items by the targets and files
    that their data set lists."""
    if isinstance(part, EncodedPhotos):
        return int(part.digest()[:15], 16)
    digest = hashlib.blake2b(digest_size=7)
    if isinstance(part, ImageSet | TensorSet):
        part = (part.images if isinstance(part, ImageSet) else part.inputs), part.labels
    if isinstance(part, tuple | list) and all(isinstance(each, Tensor) for each in part):
        for values in part:
            rows = np.ascontiguousarray(values.numpy()).reshape(len(values), -1).view(np.uint8)
            digest.update(np.ascontiguousarray(rows[:, :: -(-rows.shape[1] // LOOKED_AT) or 1]).data)
        return int(digest.hexdigest(), 16)
    items = part.items if isinstance(part, UserItems) else part
    try:
        targets = stored_targets(items)
        digest.update(b"" if targets is None else np.ascontiguousarray(targets.numpy()).data)
        for path, *_ in getattr(items, "samples", ()):  # torchvision's: a path and a class each
            digest.update(os.fsencode(str(path).removeprefix(str(getattr(items, "root", "")))))
    except Exception:  # a user's data set may raise anything at all
        return 0
    return int(digest.hexdigest(), 16)


def check_same_images(world: World, data: Datasets) -> None:
    """Raises SetupError on every rank where one sees other data than rank 0. Collective."""
    mine = {
        "training images": f"{len(data.train):,}",
        "held-out images": f"{len(data.val):,}",
        "classes": f"{len(data.classes)} ({few(data.classes)})",
        "shape": " x ".join(map(str, data.inputs.shape)),
        "names of files": " ".join(part.digest()[:8] for part in (data.train, data.val) if hasattr(part, "digest")),
    }
    facts, why = world.gather((platform.node(), mine)), ""
    for rank, (host, theirs) in enumerate(facts):
        what = next((key for key in mine if theirs[key] != mine[key]), None)
        if what and not why:
            why = (
                f"rank {rank} on {host} found other data than rank 0 ({what}: {theirs[what]} there, {mine[what]} here)"
            )
    if why := world.broadcast_object(why):
        kept = ", and the run folder if it is continued: its split.csv tells what it holds out"
        raise SetupError(
            f"{why}: every machine needs the same files in data.root" + kept * (data.holdout_table is not None)
        )


def identified(world: World, data: Datasets, state: State | None) -> dict[str, Tensor]:
    """What rank 0 keeps to recognise the images. Collective.

    Raises:
        SetupError: on every rank, where the classes are others, or most photos of some classes have other bytes.
    """
    samples = contents_of(data) if world.is_main else {}
    if state is None:
        return samples
    was, now = state.facts.get("classes"), list(data.classes)
    was = [class_name(str(name)) for name in was] if isinstance(was, list) else now  # older checkpoints do not tell
    if was != now:  # an output is a class by its place
        changes = [(name, new) for name, new in zip_longest(was, now, fillvalue="none") if name != new]
        shown = few([f"{new} was {name}" for name, new in changes])
        raise SetupError(
            f"the classes of data.name={data.name} are others, or in another order, than this run was trained on "
            f"({shown}): put the old names back, {ANEW}"
        )
    before, exchanged = state.tensors.get("samples", {}), set[str]()
    for (role, here), part in zip(samples.items(), data.sources or (data.train, data.val), strict=False):
        old = before.get(role)
        if old is None or len(here) == 2 or not torch.equal(here[:2], old[:2]) or part.labels.ndim > 1:
            continue
        labels, others = part.labels[_sized(len(part))], (here[2:] != old[2:]).numpy()
        for label in np.unique(labels[others]).tolist():
            if (labels == label).sum() > 1 and others[labels == label].mean() > 0.5:
                exchanged.add(data.classes[label])
    if found := world.broadcast_object(sorted(exchanged)):
        raise SetupError(
            f"most photos of {few(found)} have other sizes than when this run began, under the same names: class "
            f"folders changed places, or all were written anew: put them back, {ANEW}"
        )
    return samples


def tell_changes(resolved: Resolved, total_steps: int, state: State) -> None:
    """Say what changed since a checkpoint was saved."""
    kept, now = state.tensors.get("samples"), resolved.samples
    if not kept or not now:  # an older checkpoint; or rank 0 says it
        return
    changes, others, steps = list[str](), False, resolved.steps_per_epoch
    for role, words in ROLES.items():
        mine, old = now[f"{role}_images"], kept.get(f"{role}_images")
        was = len(kept[role]) if old is None else int(old[0])  # older checkpoints have a number for each sample
        others |= was != int(mine[0]) or (old is not None and bool(mine[1] != old[1]))
        if was != mine[0]:
            changes.append(f"{words}: {int(mine[0]):,} and there were {was:,}")
        elif old is not None and mine[1] != old[1]:
            changes.append(f"{words}: as many, with other names or labels, or in another order")
        elif old is not None and (sizes := int((mine[2:] != old[2:]).sum())):
            changes.append(f"{words}: {sizes} of {len(old) - 2} photos checked have a different size")
    if not changes:
        return
    before = state.facts.get("steps_per_epoch", steps)
    changes += ["what is held out now may have been trained on, and the best so far is of other images"] * others
    changes += [f"an epoch is {steps:,} steps and was {before:,}"] * (before != steps)
    changes += ["this run is complete and trains no further"] * (state.position.step >= total_steps)
    resolved.tracker.say(f"  the images changed since then: {'; '.join(changes)}")
