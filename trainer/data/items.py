"""Conversion of items and data sets from the formats of torch, torchvision and Hugging Face."""

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

# Keys of the input and the target in an item that is a dictionary, the preferred ones first.
INPUTS = ("image", "images", "img", "pixel_values", "input", "inputs", "input_values", "x")
TARGETS = ("label", "labels", "target", "targets", "fine_label", "class", "y")
# Names of the classes, or of a regression's values.
Names = tuple[str, ...]
GIVE = "give their number: data=(train_set, val_set"


def split_item(item: Any) -> tuple[Any, Any]:
    """Return the input and the target of an item, which is a pair or a dictionary.

    Raises:
        ValueError: the item is something else.
    """
    description = type(item).__name__
    if isinstance(item, Mapping):
        input_key = next((name for name in INPUTS if name in item), None)
        target_key = next((name for name in TARGETS if name in item), None)
        if input_key is not None and target_key is not None:
            return item[input_key], item[target_key]
        description = f"a dictionary of {', '.join(map(str, item))[:100]}"
    elif isinstance(item, tuple | list):
        if len(item) == 2:
            return item[0], item[1]
        description += f" of {len(item)}"
    raise ValueError(
        f"an item must be (input, target), or a dictionary with one of {', '.join(INPUTS[:4])} and "
        f"one of {', '.join(TARGETS[:4])}, found {description}"
    )


def as_input(value: Any) -> Any:
    """Convert an item's input to a tensor, unless it is a Pillow image.

    A uint8 image (H, W) or (H, W, C) becomes (C, H, W).

    Raises:
        RecipeError: no tensor can hold the input.
    """
    if isinstance(value, Image.Image):
        return value
    return move_channels_first(as_tensor(value), 3)


def move_channels_first(images: Tensor, dimensions: int) -> Tensor:
    """Convert uint8 images (H, W) or (H, W, C) to (C, H, W).

    `dimensions` is 3 for one image, 4 for a batch. Other tensors are returned unchanged.
    """
    if images.dtype != torch.uint8:
        return images
    channel_dim = dimensions - 3
    if images.dim() == dimensions - 1:
        return images.unsqueeze(channel_dim)
    if images.dim() != dimensions:
        return images
    # An ambiguous shape such as (3, H, 3) is assumed to have its channels first.
    is_first = images.shape[channel_dim] in (1, 3)
    if images.shape[-1] in (1, 3) and not is_first:
        return images.movedim(-1, channel_dim)
    return images


def to_tensors(part: Any) -> tuple[Tensor, Tensor] | None:
    """Return a data set in memory as tensors (inputs, targets); None for any other data set."""
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        part = part.tensors
    if isinstance(part, Subset) and (whole := to_tensors(part.dataset)) is not None:
        index = as_tensor(part.indices)
        return whole[0][index], whole[1][index]
    is_pair = isinstance(part, tuple | list) and len(part) == 2
    if is_pair and all(isinstance(each, Tensor | np.ndarray) for each in part):
        inputs = as_tensor(part[0]).detach().cpu()
        targets = as_targets(part[1]).detach().cpu()
        return move_channels_first(inputs, 4), targets
    return None


def number_names(
    part: Any,
    kind: type[Task],
    where: str,
    tensors: tuple[Tensor, Tensor] | None,
) -> Names:
    """Return the numbers of the classes, or of a target's values, as their names.

    Args:
        part: a user's data set.
        kind: the task.
        where: the name of `part` for messages.
        tensors: inputs and targets, if the data set is in memory.

    Raises:
        RecipeError: the number of classes or values is unknown.
    """
    targets = None
    if tensors is not None:
        targets = tensors[1]
    elif kind.reads == "class":
        targets = find_stored_targets(part)
    if targets is None:
        raise RecipeError(
            f"{where}: it does not name its classes or values: {GIVE}, 10), or their names instead "
            "of 10"
        )
    if kind.reads != "class":
        return name_by_number(targets[0].numel())
    if targets.dtype.is_floating_point or targets.is_complex() or not targets.numel():
        raise RecipeError(
            f"{where}: classes are whole numbers from 0, found "
            f"{str(targets.dtype).removeprefix('torch.')}; to predict numbers: task.name=regression"
        )
    if strange := sparse(targets.numpy()):
        raise RecipeError(f"{where}: {strange}; if that is right, {GIVE}, 1000)")
    return name_by_number(int(targets.max()) + 1)


def name_by_number(count: int) -> Names:
    """Return the names "0", "1", ... for `count` classes without names."""
    return tuple(map(str, range(max(1, count))))


def unwrap_datasets(part: Any) -> list[Any]:
    """Return the data sets inside a ConcatDataset or a Subset, or `part` itself."""
    if isinstance(part, Subset):
        return unwrap_datasets(part.dataset)
    if isinstance(part, ConcatDataset):
        inner = []
        for each in part.datasets:
            inner += unwrap_datasets(each)
        return inner
    return [part]


def find_class_names(part: Any) -> Names:
    """Return the names of classes 0, 1, ... of a data set of torchvision or Hugging Face.

    The result is empty if the data set has no names.
    """
    index_of: Any = getattr(part, "class_to_idx", None)
    # Sorting raises TypeError if the values cannot be compared.
    with suppress(TypeError):
        has_indices = (
            isinstance(index_of, Mapping)
            and index_of
            and sorted(index_of.values()) == [*range(len(index_of))]
        )
        if has_indices:
            return tuple(map(str, sorted(index_of, key=index_of.__getitem__)))
    classes = getattr(part, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str) and classes:
        return tuple(map(str, classes))
    # Hugging Face describes each column in `features`. A column of class labels has `names`.
    features = getattr(part, "features", None)
    if isinstance(features, Mapping):
        for column in TARGETS:
            names = getattr(features.get(column), "names", None)
            if names:
                return tuple(map(str, names))
    return ()


def find_stored_targets(part: Any) -> Tensor | None:
    """Return all class indices of a data set if it has them as an attribute, else None.

    For a Subset, the class indices are those of the whole data set inside it.
    """
    if isinstance(part, Subset):
        return find_stored_targets(part.dataset)
    for name in ("targets", "labels"):
        try:
            targets = as_targets(getattr(part, name))
        except (AttributeError, ValueError):
            continue
        if targets.dim() == 1 and len(targets):
            return targets
    return None


def list_classes(part: Any) -> Tensor | None:
    """Return the class index of each item, or None if no attribute of the data set has them.

    For a Subset, the class indices are those of its items only.
    """
    if isinstance(part, Subset):
        targets = list_classes(part.dataset)
        return None if targets is None else targets[as_tensor(part.indices)]
    targets = find_stored_targets(part)
    if targets is not None and len(targets) != len(part):
        return None
    return targets
