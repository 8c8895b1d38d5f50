"""Items and whole sets as users of torch, torchvision and Hugging Face have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from trainer.data.folders.targets import sparse
from trainer.data.tensors import as_targets, as_tensor
from trainer.errors import RecipeError
from trainer.tasks import Task

INPUTS = ("image", "images", "img", "pixel_values", "input", "inputs", "input_values", "x")
TARGETS = ("label", "labels", "target", "targets", "fine_label", "class", "y")
GIVE = "give their number: data=(train_set, val_set"


def pair(item: Any) -> tuple[Any, Any]:
    """An item's input and target; those of a dictionary by their keys. Raises ValueError."""
    found = type(item).__name__
    if isinstance(item, Mapping):
        keys = [next((name for name in names if name in item), None) for names in (INPUTS, TARGETS)]
        if None not in keys:
            return item[keys[0]], item[keys[1]]
        found = f"a dictionary of {', '.join(map(str, item))[:100]}"
    elif isinstance(item, tuple | list):
        if len(item) == 2:
            return item[0], item[1]
        found += f" of {len(item)}"
    raise ValueError(
        f"an item must be (input, target), or a dictionary with one of {', '.join(INPUTS[:4])} and one of "
        f"{', '.join(TARGETS[:4])}, found {found}"
    )


def as_input(value: Any) -> Any:
    """An item's input as a Pillow image or a tensor, with an image's channels first. Raises RecipeError."""
    if isinstance(value, Image.Image):
        return value
    return channels_first(as_tensor(value), 3)


def channels_first(images: Tensor, dimensions: int) -> Tensor:
    """uint8 images (H, W) or (H, W, C) as (C, H, W); `dimensions` is 4 for several in a tensor."""
    if images.dtype != torch.uint8:
        return images
    if images.dim() == dimensions - 1:
        return images.unsqueeze(dimensions - 3)
    last, first = images.shape[-1:], images.shape[dimensions - 3 : dimensions - 2]
    if images.dim() == dimensions and last[0] in (1, 3) and first[0] not in (1, 3):
        return images.movedim(-1, dimensions - 3)
    return images


def tensors_of(part: Any) -> tuple[Tensor, Tensor] | None:
    """A part in memory as a pair of tensors (inputs, targets); None for others."""
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if isinstance(part, Subset) and (whole := tensors_of(part.dataset)) is not None:
        index = as_tensor(part.indices)
        return whole[0][index], whole[1][index]
    pairs = isinstance(part, tuple | list) and len(part) == 2
    if pairs and all(isinstance(each, Tensor | np.ndarray) for each in part):
        inputs, targets = (make(each).detach().cpu() for make, each in zip((as_tensor, as_targets), part, strict=True))
        return channels_first(inputs, 4), targets
    return None


def counted_names(part: Any, kind: type[Task], of: str, tensors: tuple[Tensor, Tensor] | None) -> tuple[str, ...]:
    """Numbers as names, of as many classes or values as the targets in memory have. Raises RecipeError."""
    targets = tensors[1] if tensors is not None else stored_targets(part) if kind.reads == "class" else None
    if targets is None:
        raise RecipeError(f"{of}: it does not name its classes or values: {GIVE}, 10), or their names instead of 10")
    if kind.reads != "class":
        return numbers(targets[0].numel())
    if targets.dtype.is_floating_point or targets.is_complex() or not targets.numel():
        raise RecipeError(
            f"{of}: classes are whole numbers from 0, found {str(targets.dtype).removeprefix('torch.')}; "
            "to predict numbers: task.name=regression"
        )
    if strange := sparse(targets.numpy()):
        raise RecipeError(f"{of}: {strange}; if so, {GIVE}, 1000)")
    return numbers(int(targets.max()) + 1)


def numbers(count: int) -> tuple[str, ...]:
    """Names for classes of which only the number is known."""
    return tuple(map(str, range(max(1, count))))


def made_of(part: Any) -> list[Any]:
    """The sets that a ConcatDataset or a Subset is made of."""
    if isinstance(part, Subset):
        return made_of(part.dataset)
    return [one for each in part.datasets for one in made_of(each)] if isinstance(part, ConcatDataset) else [part]


def names_in(part: Any) -> tuple[str, ...]:
    """The names of classes 0, 1, ... as torchvision's and Hugging Face's data sets have them; empty without any."""
    places = getattr(part, "class_to_idx", None)
    with suppress(TypeError):  # other values
        if isinstance(places, Mapping) and places and sorted(places.values()) == [*range(len(places))]:
            return tuple(map(str, sorted(places, key=places.__getitem__)))
    classes = getattr(part, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str) and classes:
        return tuple(map(str, classes))
    features = getattr(part, "features", None)
    named = (getattr(features.get(name), "names", None) for name in TARGETS) if isinstance(features, Mapping) else ()
    return tuple(map(str, next(filter(None, named), ())))


def stored_targets(part: Any) -> Tensor | None:
    """All class indices, where a data set has them as an attribute."""
    if isinstance(part, Subset):
        return stored_targets(part.dataset)
    for name in ("targets", "labels"):
        try:
            targets = as_targets(getattr(part, name))
        except (AttributeError, ValueError):
            continue
        if targets.dim() == 1 and len(targets):
            return targets
    return None
