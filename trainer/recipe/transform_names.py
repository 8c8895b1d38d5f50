"""Names of torchvision's transforms for `augment.transforms`, checked without importing torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.errors import RecipeError
from trainer.recipe.known_names import find_in_source
from trainer.recipe.text import find_nearest

# A transform as in the recipe: its name, or a mapping from its name to its arguments.
TypedTransform = str | dict[str, Any]

# What to do instead -> names of the classes of torchvision.transforms.v2 that it replaces.
_INSTEAD = {
    "type augment.cutmix=1.0": "CutMix",
    "type augment.mixup=0.2": "MixUp",
    "list its transforms, each with its own probability p": (
        "Compose RandomApply RandomChoice RandomOrder"
    ),
    "return the changed images from a data set of your own (register_dataset)": "Lambda",
    "pixels are normalized afterwards, by data.mean and data.std": (
        "LinearTransformation Normalize ToDtype ConvertImageDtype"
    ),
    "images are uint8 tensors already: remove it": (
        "ToTensor ToImage ToPILImage PILToTensor ToPureTensor"
    ),
    "type data.channels=3": "RGB",
    "set data.image_size, and augment.crop for random crops": (
        "Resize CenterCrop FiveCrop TenCrop Pad RandomResize RandomShortestSize RandomZoomOut "
        "ScaleJitter"
    ),
    "the images have no boxes, key points or frames: remove it": (
        "RandomIoUCrop ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat "
        "SanitizeBoundingBoxes SanitizeKeyPoints SetClampingMode UniformTemporalSubsample"
    ),
}
# Name of each refused class of torchvision.transforms.v2 -> what to do instead.
REFUSED: dict[str, str] = {}
for _advice, _names in _INSTEAD.items():
    REFUSED |= dict.fromkeys(_names.split(), _advice)
# Names in torchvision.transforms.v2 that begin with a capital letter but are no transforms.
_OTHER_CLASSES = {"AutoAugmentPolicy", "InterpolationMode", "Transform"}


def list_transforms() -> Sequence[str]:
    """Return the names of the transforms in torchvision.transforms.v2; empty if not installed."""
    names = find_in_source("torchvision", "transforms/v2/__init__.py", r"\b[A-Z]\w+")
    return sorted({*names} - _OTHER_CLASSES)


def list_arguments(transforms: Sequence[TypedTransform]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the arguments of each transform of a recipe.

    The arguments are a mapping, or the value of the first one. Without arguments, the mapping is
    empty.
    """
    for transform in transforms:
        if isinstance(transform, str):
            yield transform, {}
        else:
            yield from transform.items()


def check_transform_names(transforms: Sequence[TypedTransform]) -> None:
    """Check the names of the transforms of a recipe.

    Raises:
        RecipeError: torchvision has no such transform, or the transform is one of `REFUSED`.
    """
    known_names = list_transforms()
    for name, _ in list_arguments(transforms):
        if name in REFUSED:
            raise RecipeError(f"augment.transforms: {name} cannot be used here: {REFUSED[name]}")
        if known_names and name not in known_names:
            allowed_names = [other for other in known_names if other not in REFUSED]
            guess = find_nearest(name, allowed_names)
            hint = f"known: {', '.join(allowed_names)}"
            if guess:
                hint = f"did you mean {guess}?"
            raise RecipeError(
                f"augment.transforms: torchvision.transforms.v2 has no {name}; {hint}"
            )


def parse_transforms(value: Any) -> list[TypedTransform]:
    """Return a list of transforms in the form in which recipes store it.

    A transform with arguments is a mapping with one item. Without arguments it is a name.

    Raises:
        ValueError: `value` has another form.
    """
    if not isinstance(value, list):
        raise ValueError("must be a list, as in [RandomVerticalFlip, {RandomRotation: 15}]")
    transforms: list[TypedTransform] = []
    for item in value:
        name = item
        arguments = None
        if isinstance(item, Mapping) and len(item) == 1:
            ((name, arguments),) = item.items()
        is_name = isinstance(name, str) and name.isidentifier()
        if not is_name or not _is_storable(arguments):
            raise ValueError(
                "must have a name, or a name with its arguments, for each transform, as in "
                "[RandomVerticalFlip, {ColorJitter: {brightness: 0.4}}, {RandomRotation: 15}]"
            )
        if arguments in (None, {}):
            transforms.append(name)
        else:
            transforms.append({name: arguments})
    return transforms


def _is_storable(value: Any) -> bool:
    """Return whether `value` consists of numbers, booleans, null, names, and lists of these.

    The outermost value may be a mapping of arguments.
    """
    if isinstance(value, Mapping):
        values = list(value.values())
        has_names = all(isinstance(key, str) and key.isidentifier() for key in value)
        return (
            has_names
            and not any(isinstance(inner, Mapping) for inner in values)
            and all(map(_is_storable, values))
        )
    if isinstance(value, list):
        return all(map(_is_storable, value))
    if isinstance(value, str):
        return value.isidentifier()
    return value is None or isinstance(value, bool | int | float)
