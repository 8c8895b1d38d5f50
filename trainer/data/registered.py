"""Data sets of users: functions that a plugin registers, and images in memory."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainer import tasks
from trainer.data.division import divide_tensors, keep_fraction
from trainer.data.folders.photo_folders import (
    IMAGENET,
    Numbers,
    Shape,
    image_shape,
    shape_of,
    statistics,
)
from trainer.data.folders.targets import Targets, target_of
from trainer.data.items import (
    Names,
    as_input,
    find_class_names,
    list_classes,
    name_by_number,
    number_names,
    split_item,
    to_tensors,
    unwrap_datasets,
)
from trainer.data.photos.decoding import convert_channels, decode_item
from trainer.data.photos.photo_reader import resize_and_center_crop
from trainer.data.photos.pixel_range import Range, recipe_pixel_range
from trainer.data.sets import CLASS, Datasets, ImageSet, TensorSet, TensorSpec
from trainer.errors import RecipeError
from trainer.processes import pickling
from trainer.recipe import DataRecipe, Recipe
from trainer.recipe.image_sizes import in_pixels, sides, typed_size
from trainer.recipe.known_names import DATASETS, Registry
from trainer.recipe.text import list_some
from trainer.saving.files import escape_non_utf8
from trainer.tasks import Task
from trainer.tasks.classification import class_name

# Minimum number of items of a user's data set that are read to choose an image size. All items of a
# smaller data set are read, and fewer than twice this number of a larger one.
ITEMS_INSPECTED = 16
ROLES = ("training set", "held-out set")
SPLIT = "the held-out part that its function returns"

Maker = Callable[[DataRecipe], Any]
registered = Registry[Maker]("register_dataset", taken=lambda: DATASETS)


def register_dataset(name: str) -> Callable[[Maker], Maker]:
    """Register a data set as `data.name=name`.

    The decorated function accepts the recipe's `data` section and returns (train, val, names).
    Both `train` and `val` have one of these forms:

    - Data in memory: a pair of tensors or arrays (inputs, targets), or a TensorDataset.
    - Data that loader workers read: a map-style data set. An item is a pair (input, target), or a
      dictionary such as {"image": input, "label": target}. The random numbers that an item draws
      (from torch, NumPy, random, or generators among the data set's attributes) depend only on
      seed, epoch and index.

    `names` contains the names of the classes, or of a regression's values. A number of names stands
    for the names "0", "1", ... With None, the names in the data sets are used if they have any.
    Otherwise, the names are numbers that follow from the targets.

    Images are uint8 tensors (N, C, H, W) with C = 1, 3 or data.channels. The input of an item is
    one image (C, H, W) of any size, or a Pillow image. Inputs of another type reach the model
    unchanged, except that floating-point inputs become float32. All of them must have the same
    shape. Targets have the form that the recipe's task expects: for classification, class indices
    (N,), or an int per item.

    Raises:
        RecipeError: the name is taken.
    """
    return registered.register(name)


def open_registered(recipe: Recipe) -> Datasets:
    """Return the data set of the function that is registered as `data.name`.

    Raises:
        RecipeError: the function returns something that cannot be used.
    """
    data = recipe.data
    where = f"data.name={data.name}"
    result = registered[data.name](data)
    if not isinstance(result, tuple) or len(result) != 3:
        raise RecipeError(
            f"{where}: its function must return (train, val, class names), not "
            f"{type(result).__name__}"
        )
    *parts, names = result
    pairs = [pair for part in parts if (pair := to_tensors(part)) is not None]
    if len(pairs) == 2:
        for inputs, targets in pairs:
            has_targets = targets.dim() and len(targets) == len(inputs)
            if not len(inputs) or not has_targets:
                raise RecipeError(
                    f"{where}: inputs and targets must have the same length, at least 1, but their "
                    f"shapes are {tuple(inputs.shape)} and {tuple(targets.shape)}"
                )
        classes = _choose_names(parts, pairs[0], names, recipe)
        if pairs[0][0].dtype != torch.uint8:
            *divided, holdout = divide_tensors(recipe, pairs[0], pairs[1], SPLIT)
            train, val = (TensorSet(to_float32(inputs), targets) for inputs, targets in divided)
            spec = TensorSpec.of(train.inputs)
            val_spec = TensorSpec.of(val.inputs)
            if spec != val_spec:
                raise RecipeError(
                    f"{where}: training inputs are {spec}, held-out inputs are {val_spec}: give "
                    "both the same shape and type"
                )
            return _build_tensor_datasets(data, train, val, classes, spec, holdout=holdout)
        for images, _ in pairs:
            is_uint8 = images.dtype == torch.uint8 and images.dim() == 4
            if not is_uint8 or images.shape[1] not in (1, 3, data.channels):
                raise RecipeError(
                    f"{where}: images must be uint8 (N, 1, 3 or data.channels, H, W), and other "
                    f"inputs of another type, found {images.dtype} {tuple(images.shape)}"
                )
        return build_in_memory(recipe, pairs[0], pairs[1], classes, None, SPLIT)
    if any(isinstance(part, tuple | list) and to_tensors(part) is not None for part in parts):
        raise RecipeError(f"{where}: train and val must both be pairs of tensors, or neither")
    for part, role in zip(parts, ROLES, strict=True):
        is_readable = hasattr(part, "__getitem__") and hasattr(part, "__len__") and len(part)
        if isinstance(part, DataLoader | IterableDataset) or not is_readable:
            raise RecipeError(
                f"{where}: its {role} must have items and a length above 0, found "
                f"{type(part).__name__}: samples are read by their number. Pass loader.dataset "
                "instead of a DataLoader, and other data that fit into memory as list(...)"
            )
    return _build_item_datasets(recipe, parts, _choose_names(parts, None, names, recipe))


def _choose_names(
    parts: Sequence[Any],
    tensors: tuple[Tensor, Tensor] | None,
    names: Any,
    recipe: Recipe,
) -> Names:
    """Return the names of the classes or values.

    The first of these sources that exists is used: the names, or the number of classes, that the
    user's function returns; the names that the data sets contain; the targets.

    Raises:
        RecipeError: the data sets or the user assign different numbers to the same classes, or the
            names are unknown.
    """
    kind = tasks.find_task_class(recipe)
    where = f"data.name={recipe.data.name}"
    user_names: Names = ()
    if names is not None and not isinstance(names, int):
        user_names = _normalize_names(names)
    # Names of each base data set, first of the training set, then of the validation set.
    names_of_parts = []
    for part in parts:
        bases = unwrap_datasets(part)
        names_of_parts.append([_normalize_names(find_class_names(base)) for base in bases])
    train_names, val_names = names_of_parts
    own_names = next(filter(None, train_names), ())
    if kind.reads != "values":
        distinct = {each for each in (*train_names, *val_names, own_names or user_names) if each}
        # User names that only reorder the data sets' own names contradict the class numbers. Other
        # user names rename the classes.
        if user_names and sorted(user_names) == sorted(own_names):
            distinct.add(user_names)
        if len(distinct) > 1:
            examples = " and ".join(f"({list_some(each)})" for each in sorted(distinct)[:2])
            raise RecipeError(
                f"{where}: its data sets number different classes, {examples}: renumber one by its "
                "target_transform, and give it the other's `classes` and `class_to_idx`"
            )
    else:
        own_names = ()
    if isinstance(names, int):
        return name_by_number(names)
    return user_names or own_names or number_names(parts[0], kind, f"{where}, {ROLES[0]}", tensors)


def _normalize_names(names: Iterable[Any]) -> Names:
    return tuple(escape_non_utf8(class_name(str(name))) for name in names)


def build_in_memory(
    recipe: Recipe,
    train: Sequence[Tensor],
    val: Sequence[Tensor],
    classes: Names,
    known_statistics: tuple[Numbers, Numbers] | None,
    holdout: str,
) -> Datasets:
    """Build a data set of images in memory.

    Images are resized so that they just cover the recipe's size, and cropped to it at the center.

    Args:
        recipe: the recipe.
        train: images (N, C, H, W) uint8 and targets (N, ...).
        val: images and targets for validation, in the form of `train`.
        classes: class names.
        known_statistics: (mean, std) of pixels in [0, 1], each with one number per channel of
            `train`; None to measure them over the training images that data.fold and data.fraction
            keep.
        holdout: a description of the validation split.

    Raises:
        RecipeError: the images are not square and the recipe has no size, or the images would be
            resized but have targets for each pixel.
    """
    data = recipe.data
    train, val, holdout = divide_tensors(recipe, train, val, holdout)
    channels = data.channels or train[0].shape[1]
    height, width = train[0].shape[-2:]
    if data.image_size is None and height != width:
        raise RecipeError(
            f"data.name={data.name}: images of {height} x {width} are not square: "
            f"data.image_size={min(height, width)} keeps the square in their middle, "
            f"data.image_size=[{height},{width}] all of them"
        )
    size = typed_size(data.image_size) or int(height)

    def resize(pair: Sequence[Tensor]) -> ImageSet:
        images, targets = pair
        images = convert_channels(images, channels)
        old_size = images.shape[-2:]
        if old_size != sides(size):
            if targets.dim() > 2:
                target_shape = " x ".join(map(str, targets.shape[1:]))
                raise RecipeError(
                    f"data.name={data.name}: its images of {old_size[0]} x {old_size[1]} would be "
                    f"resized to {in_pixels(size)}, but not its targets of {target_shape}: type "
                    f"data.image_size=[{old_size[0]},{old_size[1]}]"
                )
            images = resize_and_center_crop(images, size, size, data.interpolation)
        return ImageSet(images, targets)

    known_statistics = known_statistics or measure_statistics(train[0])
    mean, std = (statistics(each, channels) for each in known_statistics)
    train_set = resize(train)
    val_set = resize(val)
    high, wide = sides(size)
    old_sizes = {tuple(images.shape[-2:]) for images, _ in (train, val)}
    cropped = [
        f"{height} x {width}"
        for height, width in sorted(old_sizes)
        if height * wide != width * high
    ]
    notes = {}
    if cropped:
        kept = "square" if high == wide else f"part of the shape of {in_pixels(size)}"
        notes["images"] = f"are {' and '.join(cropped)}, of which the {kept} in the middle is kept"
    return Datasets(
        name=data.name,
        train=train_set,
        val=val_set,
        classes=classes,
        channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        holdout=holdout,
        notes=notes,
        sources=(train, val),
    )


def _build_item_datasets(
    recipe: Recipe,
    parts: Sequence[Any],
    names: Names,
) -> Datasets:
    """Build a data set of items that loader workers read."""
    data = recipe.data
    kind = tasks.find_task_class(recipe)
    shapes, spec, target = _inspect_items(parts[0], kind, names)
    if len(target.shape) > 1 and spec is None:
        shape = " x ".join(map(str, target.shape))
        raise RecipeError(
            f"data.name={data.name}: its targets, of {shape}, belong to pixels, but its images "
            "would be resized and the targets would not: return the images as float tensors, which "
            "stay as they are, or the whole set as two tensors"
        )
    train, val = (
        UserItems(
            part,
            f"{data.name}, {role}",
            Targets(kind, names, target),
            spec,
            recipe_pixel_range(data),
        )
        for part, role in zip(parts, ROLES, strict=True)
    )
    train.rows = _choose_items(recipe, parts[0], kind)
    if spec:
        return _build_tensor_datasets(data, train, val, names, spec, target)
    channels, size, notes = image_shape(recipe, shapes)
    if channels not in (1, 3) and (data.mean is None or data.std is None):
        raise RecipeError(
            f"data.name={data.name}: set data.mean and data.std of its {channels} channels"
        )
    mean, std = (statistics(each, channels) for each in IMAGENET)
    return Datasets(
        name=data.name,
        train=train,
        val=val,
        classes=names,
        channels=channels,
        image_size=size,
        mean=mean,
        std=std,
        holdout=SPLIT,
        notes=notes,
        targets=target,
    )


def _choose_items(
    recipe: Recipe,
    items: Any,
    kind: type[Task],
) -> Sequence[int]:
    """Return the indices of the training items that data.fraction keeps.

    Raises:
        RecipeError: data.fold is set, or data.fraction is below 1 and no attribute of `items` has
            their classes.
    """
    data = recipe.data
    if data.fold:
        raise RecipeError(
            f"data.fold={data.fold} holds out training images as they are, and the items of "
            f"data.name={data.name} may be varied by its own code: return tensors, or divide the "
            "items in its function"
        )
    if data.fraction == 1:
        return range(len(items))
    targets = list_classes(items)
    if kind.reads != "class":
        targets = torch.zeros(len(items))
    if targets is None:
        raise RecipeError(
            f"data.fraction={data.fraction} keeps the share of each class, but data.name="
            f"{data.name} does not say its classes unless all images are read: give its training "
            "set the attribute `targets`, or return a torch.utils.data.Subset of it"
        )
    return [*map(int, keep_fraction(recipe, targets))]


@dataclass(eq=False)
class UserItems:
    """A user's map-style data set as a `PhotoSource`.

    Attributes:
        items: the user's data set.
        name: name of the data set in messages.
        targets: task, names and shape of the targets.
        spec: shape and type of inputs that are not images, else None.
        pixel_range: the recipe's data.pixel_range.
        by_value: whether to pickle classes by value, because other processes cannot import them.
        rows: index in `items` of each sample, see `_choose_items`.
    """

    items: Any
    name: str
    targets: Targets
    spec: TensorSpec | None
    pixel_range: Range | None
    by_value: bool = False

    def __post_init__(self) -> None:
        self.rows: Sequence[int] = range(len(self.items))

    def __getstate__(self) -> dict[str, Any]:
        if self.by_value or pickling.has_unimportable_main():
            return {"packed": pickling.pickle_by_value(vars(self), "the data set")}
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "packed" in state:
            pickling.has_received_objects = True
            state = pickle.loads(state["packed"])
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """Return the name of an item for messages."""
        return f"{self.name}: item {self.rows[index]}"

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor | int]:
        """Return input and target of an item, as `PhotoSource.read` does."""
        item, label = split_item(self.items[self.rows[index]])
        item = as_input(item)
        target = self.targets.checked(label)
        if self.spec is None:
            return decode_item(item, channels, self.pixel_range), target
        inputs = to_float32(item)
        spec = TensorSpec.of(inputs[None])
        if spec != self.spec:
            raise ValueError(f"its input is {spec}, but other inputs are {self.spec}")
        return inputs, target


def to_float32(inputs: Tensor) -> Tensor:
    """Convert floating-point inputs to float32, the type of models. Return others unchanged."""
    return inputs.float() if inputs.is_floating_point() else inputs


def _inspect_items(
    items: Any, kind: type[Task], names: Sequence[str]
) -> tuple[list[Shape], TensorSpec | None, TensorSpec]:
    """Read some of a user's items.

    Items that cannot be read are skipped here. The error is reported when they are read later.

    Returns:
        (shapes, spec, target): (channels, height, width) of each image; the shape and type of the
        inputs if they are not images, else None; the shape and type of a target.
    """
    shapes = []
    specs = []
    targets = []
    for index in range(0, len(items), max(1, len(items) // ITEMS_INSPECTED)):
        with suppress(Exception):
            item, label = split_item(items[index])
            item = as_input(item)
            if isinstance(item, Image.Image):
                shapes.append(shape_of(item))
            elif item.dtype == torch.uint8:
                channels, height, width = item.shape
                shapes.append((channels, height, width))
            else:
                specs.append(TensorSpec.of(to_float32(item)[None]))
            targets.append(TensorSpec.of(target_of(label, kind, names)[None]))
    target = targets[0] if targets else CLASS
    if shapes or not specs:
        return shapes, None, target
    return shapes, specs[0], target


def _build_tensor_datasets(
    data: DataRecipe,
    train: Any,
    val: Any,
    names: Names,
    spec: TensorSpec,
    target: TensorSpec = CLASS,
    holdout: str = SPLIT,
) -> Datasets:
    """Build a data set whose inputs are not images."""
    return Datasets(
        name=data.name,
        train=train,
        val=val,
        classes=names,
        channels=spec.shape[0] if spec.shape else 1,
        image_size=spec.shape[-1] if spec.shape else 1,
        mean=(),
        std=(),
        holdout=holdout,
        targets=target,
        plain=spec,
    )


def measure_statistics(images: Tensor) -> tuple[Numbers, Numbers]:
    """Measure the mean and standard deviation of each channel over at most 20,000 images."""
    pixels = images[:: max(1, len(images) // 10_000)].double() / 255
    mean = pixels.mean((0, 2, 3))
    std = pixels.std((0, 2, 3)).clamp_min(1e-3)
    return tuple(mean.tolist()), tuple(std.tolist())
