"""Data sets of the user's own: functions that a plugin registers, and images in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainer import tasks
from trainer.data.folders.photo_folders import IMAGENET, Shape, image_shape, shape_of, statistics
from trainer.data.folders.scanning import few
from trainer.data.folders.targets import Targets, target_of
from trainer.data.items import as_input, counted_names, made_of, names_in, numbers, pair, tensors_of
from trainer.data.photos.decoding import from_item, with_channels
from trainer.data.photos.photo_reader import centre_cut
from trainer.data.photos.pixel_range import wanted_of
from trainer.data.sets import CLASS, Datasets, ImageSet, TensorSet, TensorSpec
from trainer.errors import RecipeError
from trainer.processes import pickling
from trainer.recipe import DataRecipe, Recipe
from trainer.recipe.image_sizes import in_pixels, sides, typed_size
from trainer.recipe.known_names import DATASETS, Registry
from trainer.saving.files import portable
from trainer.tasks import Task
from trainer.tasks.classification import class_name

ITEMS_LOOKED_AT = 16  # of a user's data set, to choose a size
ROLES = ("training set", "held-out set")
SPLIT = "the held-out part that its function returns"

Maker = Callable[[DataRecipe], Any]
registered = Registry[Maker]("register_dataset", taken=lambda: DATASETS)


def register_dataset(name: str) -> Callable[[Maker], Maker]:
    """Make a data set known as `data.name=name`.

    The decorated function takes the recipe's `data` section and returns (train, val, names). These are the names of the
    classes, or of a regression's values, their number, or None where the sets have them. train and val each are a pair
    of tensors or arrays (inputs, targets) or a TensorDataset, which are kept in memory, or any map-style data set of
    items (input, target) or {"image": input, "label": target}, which loader workers read. What an item draws at random
    (torch, NumPy, random, or generators among the data set's attributes) depends on seed, epoch and index alone.

    Images are uint8 tensors (N, C, H, W), C = 1 or 3; an item is one of them, of any size, or a Pillow image. Inputs of
    another type reach the model as they are, and all have one shape. Targets are what the recipe's task wants: for
    classification (N,) class indices, an int an item.

    Raises:
        RecipeError: the name is taken.
    """
    return registered.register(name)


def open_registered(recipe: Recipe) -> Datasets:
    """The data set of the function that is registered as `data.name`. Raises RecipeError."""
    data = recipe.data
    made, where = registered[data.name](data), f"data.name={data.name}"
    if not isinstance(made, tuple) or len(made) != 3:
        raise RecipeError(f"{where}: its function must return (train, val, class names), not {type(made).__name__}")
    *parts, names = made
    pairs = [pair for part in parts if (pair := tensors_of(part)) is not None]
    if len(pairs) == 2:
        for inputs, targets in pairs:
            if not len(inputs) or len(inputs) != (len(targets) if targets.dim() else -1):
                shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
                raise RecipeError(f"{where}: inputs and targets must be as many, and at least 1, found {shapes}")
        return _from_tensors(data, pairs, _names(parts, pairs[0], names, recipe))
    if any(isinstance(part, tuple | list) and tensors_of(part) is not None for part in parts):
        raise RecipeError(f"{where}: train and val must both be pairs of tensors, or neither")
    for part, role in zip(parts, ROLES, strict=True):
        readable = hasattr(part, "__getitem__") and hasattr(part, "__len__") and len(part)
        if isinstance(part, DataLoader | IterableDataset) or not readable:
            raise RecipeError(
                f"{where}: its {role} must have items and a length above 0, found {type(part).__name__}: samples are "
                "read by their number. Of a DataLoader give loader.dataset, and what fits into memory as list(...)"
            )
    return _from_items(recipe, parts, _names(parts, None, names, recipe))


def _names(parts: Sequence[Any], tensors: tuple[Tensor, Tensor] | None, names: Any, recipe: Recipe) -> tuple[str, ...]:
    """The names that a user gives, or as many numbers, or those of the data sets. Raises RecipeError where these number
    their classes differently."""
    kind, where = tasks.kind(recipe), f"data.name={recipe.data.name}"
    given = () if names is None or isinstance(names, int) else _alike(names)
    known = [[_alike(names_in(one)) for one in made_of(part)] for part in parts]
    own = next(filter(None, known[0]), ())
    if kind.reads != "values":
        others = {each for each in (*known[0], *known[1], own or given) if each}
        if given and sorted(given) == sorted(own):
            others.add(given)
        if len(others) > 1:
            several = " and ".join(f"({few(each)})" for each in sorted(others)[:2])
            raise RecipeError(
                f"{where}: its data sets number different classes, {several}: renumber one by its "
                "target_transform, and give it the other's `classes` and `class_to_idx`"
            )
    else:
        own = ()
    if isinstance(names, int):
        return numbers(names)
    return given or own or counted_names(parts[0], kind, f"{where}, {ROLES[0]}", tensors)


def _alike(names: Iterable[Any]) -> tuple[str, ...]:
    return tuple(portable(class_name(str(name))) for name in names)


def _from_tensors(data: DataRecipe, parts: Sequence[Sequence[Tensor]], names: tuple[str, ...]) -> Datasets:
    train, val = parts
    if train[0].dtype != torch.uint8:
        sets = [TensorSet(plain(inputs), targets) for inputs, targets in parts]
        specs = [TensorSpec.of(part.inputs) for part in sets]
        if specs[0] != specs[1]:
            raise RecipeError(f"data.name={data.name}: training inputs are {specs[0]}, held-out ones {specs[1]}")
        return _plain(data, sets[0], sets[1], names, specs[0])
    for images, _ in parts:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3, data.channels):
            raise RecipeError(
                f"data.name={data.name}: images must be uint8 (N, 1, 3 or data.channels, H, W), and other inputs of "
                f"another type, found {images.dtype} {tuple(images.shape)}"
            )
    return in_memory(data, train, val, names, measured(train[0]), SPLIT)


def in_memory(
    data: DataRecipe,
    train: Sequence[Tensor],
    val: Sequence[Tensor],
    classes: tuple[str, ...],
    known: tuple[tuple[float, ...], tuple[float, ...]],
    holdout: str,
) -> Datasets:
    """A data set of two pairs of images (N, C, H, W) uint8 and targets (N, ...), cut to the recipe's size.

    They are resized until they just cover it, and what they have beyond it is cut off at both ends. `known` are
    the images' mean and standard deviation, a channel each. Raises RecipeError.
    """
    channels = data.channels or train[0].shape[1]
    height, width = train[0].shape[-2:]
    if data.image_size is None and height != width:
        raise RecipeError(
            f"data.name={data.name}: images of {height} x {width} are not square: "
            f"data.image_size={min(height, width)} keeps the square in their middle, "
            f"data.image_size=[{height},{width}] all of them"
        )
    size = typed_size(data.image_size) or int(height)

    def resized(pair: Sequence[Tensor]) -> ImageSet:
        images = with_channels(pair[0], channels)
        if images.shape[-2:] != sides(size):
            if pair[1].dim() > 2:
                raise RecipeError(
                    f"data.name={data.name}: its images are {' x '.join(map(str, images.shape[-2:]))} and would become "
                    f"{in_pixels(size)}, and its targets, of {' x '.join(map(str, pair[1].shape[1:]))}, would not "
                    "follow"
                )
            images = centre_cut(images, size, size)
        return ImageSet(images, pair[1])

    mean, std = statistics(*known, channels)
    parts, sources = (resized(train), resized(val)), (train, val)
    (high, wide), before = sides(size), {tuple(pair[0].shape[-2:]) for pair in sources}
    shapes = " and ".join(f"{height} x {width}" for height, width in sorted(before) if height * wide != width * high)
    kept = "square" if high == wide else f"part of the shape of {in_pixels(size)}"
    notes = {"images": f"are {shapes}, of which the {kept} in the middle is kept"} if shapes else {}
    return Datasets(data.name, *parts, classes, channels, size, mean, std, False, holdout, notes, sources=sources)


def _from_items(recipe: Recipe, parts: Sequence[Any], names: tuple[str, ...]) -> Datasets:
    data = recipe.data
    kind = tasks.kind(recipe)
    shapes, spec, target = _look(parts[0], kind, names)
    if len(target.shape) > 1 and spec is None:
        raise RecipeError(
            f"data.name={data.name}: its targets, of {' x '.join(map(str, target.shape))}, lie on images, which are "
            "resized and they are not: give the images as float tensors, which stay as they are, or all as two tensors"
        )
    train, val = (
        UserItems(part, f"{data.name}, {role}", Targets(kind, names, target), spec, recipe.data)
        for part, role in zip(parts, ROLES, strict=True)
    )
    if spec is not None:
        return _plain(data, train, val, names, spec, target)
    channels, size, notes = image_shape(recipe, shapes)
    if channels not in (1, 3) and (data.mean is None or data.std is None):
        raise RecipeError(f"data.name={data.name}: give data.mean and data.std of its {channels} channels")
    mean, std = statistics(*IMAGENET, channels)
    return Datasets(data.name, train, val, names, channels, size, mean, std, False, SPLIT, notes, target)


class UserItems:
    """A user's map-style data set as a source of photos, or of other inputs of shape and type `spec`."""

    def __init__(self, items: Any, name: str, targets: Targets, spec: TensorSpec | None, data: DataRecipe) -> None:
        self.items, self.name, self.targets, self.spec = items, name, targets, spec
        self.pixel_range = wanted_of(data)
        self.by_value = False  # pickle its classes too: no other process can import them

    def __getstate__(self) -> dict[str, Any]:
        if self.by_value or pickling.nowhere_to_import():
            return {"packed": pickling.packed(vars(self), "the data set")}
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "packed" in state:
            pickling.arrived = True
            state = pickle.loads(state["packed"])
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.items)

    def where(self, index: int) -> str:
        return f"{self.name}: item {index}"

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor | int]:
        item, label = pair(self.items[index])
        item, target = as_input(item), self.targets.checked(label)
        if self.spec is None:
            return from_item(item, channels, self.pixel_range), target
        inputs = plain(item)
        if (spec := TensorSpec.of(inputs[None])) != self.spec:
            raise ValueError(f"its input is {spec}, and that of others {self.spec}")
        return inputs, target


def plain(inputs: Tensor) -> Tensor:
    """Real numbers as float32, which models compute in; whole numbers stay what they are."""
    return inputs.float() if inputs.is_floating_point() else inputs


def _look(items: Any, kind: type[Task], names: Sequence[str]) -> tuple[list[Shape], TensorSpec | None, TensorSpec]:
    """Of some of a user's items: images' (channels, height, width), else the inputs; and the target.

    Reading an item reports what is wrong with it.
    """
    shapes, specs, targets = list[Shape](), list[TensorSpec](), list[TensorSpec]()
    for index in range(0, len(items), max(1, len(items) // ITEMS_LOOKED_AT)):
        with suppress(Exception):
            item, label = pair(items[index])
            item = as_input(item)
            if isinstance(item, Image.Image):
                shapes.append(shape_of(item))
            elif item.dtype == torch.uint8:
                channels, height, width = item.shape
                shapes.append((channels, height, width))
            else:
                specs.append(TensorSpec.of(plain(item)[None]))
            targets.append(TensorSpec.of(target_of(label, kind, names)[None]))
    return shapes, None if shapes or not specs else specs[0], targets[0] if targets else CLASS


def _plain(
    data: DataRecipe, train: Any, val: Any, names: tuple[str, ...], spec: TensorSpec, target: TensorSpec | None = None
) -> Datasets:
    """A data set of inputs that are not images."""
    first, last = (spec.shape[0], spec.shape[-1]) if spec.shape else (1, 1)
    return Datasets(
        data.name, train, val, names, first, last, (), (), False, SPLIT, targets=target or CLASS, plain=spec
    )


def measured(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, over at most 10,000 images."""
    pixels = images[:: max(1, len(images) // 10_000)].double() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3)).clamp_min(1e-3)
    return tuple(mean.tolist()), tuple(std.tolist())
