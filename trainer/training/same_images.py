"""Checks that all ranks and all attempts of a run read the same images.

Machines may have different copies of the data, and files may be added or deleted while a run starts
or between its attempts. A checkpoint therefore contains, for the training set and the validation
split, the number of samples, a hash of their names and targets, and the sizes and content hashes of
some photos.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.encoded import FEW, EncodedPhotos, encoded_size, hash_content
from trainer.data.items import find_stored_targets
from trainer.data.registered import UserItems
from trainer.data.sets import Datasets, ImageSet, TensorSet
from trainer.distributed.world import World
from trainer.errors import SetupError
from trainer.recipe.text import list_some
from trainer.saving.checkpoint import State
from trainer.tasks.classification import class_name
from trainer.training.state import Resolved

# Maximum number of photos of a split whose sizes and content hashes a checkpoint contains.
SIZED = 256
# Number of threads that hash these photos. Each of them mostly waits for the disk.
WAITING = 16
# Maximum number of bytes that are hashed of each sample of a data set of tensors. In larger
# samples, only every n-th byte is hashed.
LOOKED_AT = 1024
ROLES = {"train": "training", "val": "held out"}
REMEDY = (
    "or choose another output= to start from scratch (model.init_from=RUN keeps what it learned)"
)


def hash_contents(data: Datasets) -> dict[str, Tensor]:
    """Return int64 tensors that identify the images.

    Returns:
        `train_images` has the number of training samples, the result of `_hash_part`, and the sizes
        of some photos in bytes. `train_contents` has hashes of the contents of these photos. A
        photo that is missing has size -1 and hash 0, and so has a photo in a Parquet file, because
        reading it would take long. `val_images` and `val_contents` have the same values for the
        validation split.
    """
    tensors = {}
    sources = data.sources or (data.train, data.val)
    for role, part in zip(ROLES, sources, strict=True):
        addresses = []
        if isinstance(part, EncodedPhotos):
            addresses = [part.address(index) for index in _choose_photos(len(part))]
        sizes = [encoded_size(address) for address in addresses]
        count = len(part[0] if isinstance(part, tuple | list) else part)
        tensors[role + "_images"] = torch.tensor([count, _hash_part(part), *sizes])
        with ThreadPoolExecutor(WAITING) as pool:
            contents = [*pool.map(_hash_content, addresses, sizes)]
        tensors[role + "_contents"] = torch.tensor(contents, dtype=torch.int64)
    return tensors


def _hash_content(address: bytes, size: int) -> int:
    return hash_content(address, FEW) >> 1 if size >= 0 else 0


def _find_changed(now: Mapping[str, Tensor], before: Mapping[str, Tensor], role: str) -> Tensor:
    """Return a mask over the photos of `_choose_photos`: True where size or content hash differ."""
    images = f"{role}_images"
    contents = f"{role}_contents"
    different = now[images][2:] != before[images][2:]
    # Checkpoints of earlier versions contain only the sizes.
    if contents in before:
        different |= now[contents] != before[contents]
    return different


def _choose_photos(count: int) -> list[int]:
    """Return the indices of up to SIZED photos, evenly spaced over `count` photos."""
    indices = np.linspace(0, count - 1, min(SIZED, count))
    return [int(index) for index in indices]


def _hash_part(part: Any) -> int:
    """Hash the targets of a split, and the names of its photos or the values of its tensors.

    For a user's data set of other items, hash the targets and file names that it lists, if any. The
    result is 0 if the data set raises an error.
    """
    if isinstance(part, EncodedPhotos):
        return int(part.digest()[:15], 16)
    digest = hashlib.blake2b(digest_size=7)
    if isinstance(part, ImageSet):
        part = part.images, part.labels
    elif isinstance(part, TensorSet):
        part = part.inputs, part.labels
    if isinstance(part, tuple | list) and all(isinstance(values, Tensor) for values in part):
        for values in part:
            rows = np.ascontiguousarray(values.numpy()).reshape(len(values), -1)
            rows = rows.view(np.uint8)
            stride = -(-rows.shape[1] // LOOKED_AT) or 1
            digest.update(np.ascontiguousarray(rows[:, ::stride]).data)
        return int(digest.hexdigest(), 16)
    items = part.items if isinstance(part, UserItems) else part
    try:
        targets = find_stored_targets(items)
        if targets is not None:
            digest.update(np.ascontiguousarray(targets.numpy()).data)
        # The `samples` of torchvision's data sets are pairs of a path and a class.
        root = str(getattr(items, "root", ""))
        for path, *_ in getattr(items, "samples", ()):
            digest.update(os.fsencode(str(path).removeprefix(root)))
    # The code of a user's data set may raise any exception.
    except Exception:
        return 0
    return int(digest.hexdigest(), 16)


def check_same_images(world: World, data: Datasets) -> None:
    """Check that all ranks have the same images: number, classes, shape, file names. Collective.

    Raises:
        SetupError: The data of a rank differs from rank 0's. Raised on every rank.
    """
    digests = [part.digest()[:8] for part in (data.train, data.val) if hasattr(part, "digest")]
    facts = {
        "training images": f"{len(data.train):,}",
        "held-out images": f"{len(data.val):,}",
        "classes": f"{len(data.classes)} ({list_some(data.classes)})",
        "shape": " x ".join(map(str, data.inputs.shape)),
        "names of files": " ".join(digests),
    }
    fault = ""
    rank_values = world.gather((platform.node(), facts))
    for rank, (host, rank_facts) in enumerate(rank_values):
        key = next((key for key in facts if rank_facts[key] != facts[key]), None)
        if key and not fault:
            fault = (
                f"rank {rank} on {host} found other data than rank 0 ({key}: {rank_facts[key]} "
                f"there, {facts[key]} here)"
            )
    fault = world.broadcast_object(fault)
    if fault:
        remedy = "every machine needs the same files in data.root"
        if data.holdout_table is not None:
            remedy += (
                ", and the run folder if it is continued: its split.csv says what it holds out"
            )
        raise SetupError(f"{fault}: {remedy}")


def identify_images(world: World, data: Datasets, state: State | None) -> dict[str, Tensor]:
    """Compare the images with those of the checkpoint `state`, if any. Collective.

    Returns:
        The tensors of `hash_contents` on rank 0, which later checkpoints contain; {} on other
        ranks.

    Raises:
        SetupError: The classes differ from those of the checkpoint, or more than half of the
            checked photos of a class have changed. Raised on every rank.
    """
    samples = hash_contents(data) if world.is_main else {}
    if state is None:
        return samples
    classes = list(data.classes)
    saved_classes = state.facts.get("classes")
    # Older checkpoints do not name the classes, so these cannot be compared.
    if isinstance(saved_classes, list):
        saved_classes = [class_name(str(name)) for name in saved_classes]
    else:
        saved_classes = classes
    # An output stands for a class by its index, so the order matters too.
    if saved_classes != classes:
        pairs = zip_longest(saved_classes, classes, fillvalue="none")
        changes = [
            f"{new_name} was {old_name}" for old_name, new_name in pairs if old_name != new_name
        ]
        raise SetupError(
            f"the classes of data.name={data.name} are others, or in another order, than this run "
            f"was trained on ({list_some(changes)}): put the old names back, {REMEDY}"
        )
    before = state.tensors("samples")
    changed_classes = set[str]()
    roles = ROLES if samples else ()
    sources = data.sources or (data.train, data.val)
    for role, part in zip(roles, sources, strict=False):
        images = samples[f"{role}_images"]
        saved_images = before.get(f"{role}_images")
        # The photos of a split are compared only if their number, names and labels are the same as
        # before, and if each label is one class.
        if (
            saved_images is None
            or len(images) == 2
            or not torch.equal(images[:2], saved_images[:2])
            or part.labels.ndim > 1
        ):
            continue
        labels = part.labels[_choose_photos(len(part))]
        different = _find_changed(samples, before, role).numpy()
        for label in np.unique(labels[different]).tolist():
            in_class = labels == label
            if in_class.sum() > 1 and different[in_class].mean() > 0.5:
                changed_classes.add(data.classes[label])
    if names := world.broadcast_object(sorted(changed_classes)):
        raise SetupError(
            f"most photos of {list_some(names)} have other sizes or contents than when this run "
            "began, under the same names: class folders changed places, or all were rewritten: put "
            f"them back, {REMEDY}"
        )
    return samples


def report_changes(resolved: Resolved, total_steps: int, state: State) -> None:
    """Print how the images have changed since the checkpoint `state` was saved."""
    saved = state.tensors("samples")
    samples = resolved.samples
    # Old checkpoints have no `samples`, and ranks other than 0 leave the report to rank 0.
    if not saved or not samples:
        return
    changes = list[str]()
    are_others = False
    for role, title in ROLES.items():
        images = samples[f"{role}_images"]
        count = int(images[0])
        saved_images = saved.get(f"{role}_images")
        if saved_images is None:
            # Older checkpoints have one number for each sample instead of a count.
            saved_count = len(saved[role])
        else:
            saved_count = int(saved_images[0])
        if saved_count != count:
            are_others = True
            changes.append(f"{title}: {count:,} and there were {saved_count:,}")
        elif saved_images is not None and images[1] != saved_images[1]:
            are_others = True
            changes.append(f"{title}: as many, with other names or labels, or in another order")
        elif saved_images is not None:
            different = int(_find_changed(samples, saved, role).sum())
            checked = len(saved_images) - 2
            if different:
                changes.append(f"{title}: {different} of {checked} photos checked are different")
    if not changes:
        return
    steps = resolved.steps_per_epoch
    saved_steps = state.facts.get("steps_per_epoch", steps)
    if are_others:
        changes.append(
            "what is held out now may have been trained on, and the best so far is of other images"
        )
    if saved_steps != steps:
        changes.append(f"an epoch is {steps:,} steps and was {saved_steps:,}")
    if state.position.step >= total_steps:
        changes.append("this run is complete and trains no further")
    resolved.tracker.say(f"  the images changed since then: {'; '.join(changes)}")
