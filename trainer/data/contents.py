"""Fingerprints of a set's samples, an int64 each, by which a continued run recognises them in another folder too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from trainer.data.encoded import EncodedPhotos, size_of
from trainer.data.items import stored_targets
from trainer.data.registered import UserItems
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet, TensorSet

AT_ONCE = 2**16  # samples
SIZED = 256  # photos of a part whose sizes are kept
LOOKED_AT = 1024  # bytes of a sample in memory: more would take long for gigabytes


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
