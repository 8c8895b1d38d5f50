"""Transforms of torchvision.transforms.v2 that a recipe names, seeded for each sample.

All draws of these transforms come from torch's CPU generator (torchvision 0.26 to 0.29). It is
seeded before the first transform of an image, so the result is that of

    torch.manual_seed(seed)
    image = v2.Compose(transforms)(image)

on a contiguous uint8 image (C, H, W). `check_transforms` refuses a transform that draws from
another generator.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from trainer.data import sampling
from trainer.data.sampling import Array
from trainer.errors import RecipeError, read_line
from trainer.recipe import AugmentRecipe
from trainer.recipe.image_sizes import ImageSize, sides
from trainer.recipe.text import format_yaml
from trainer.recipe.transform_names import check_transform_names, list_arguments

Transform = Callable[[Tensor], Tensor]

# Arguments whose values are members of an enumeration, which a recipe names by their values.
ENUMERATIONS: dict[str, Any] = {
    "interpolation": v2.InterpolationMode,
    "policy": v2.AutoAugmentPolicy,
}
# Number of seeds with which a transform is tried before the training.
TRIES = 8


class Transforms:
    """Transforms of a batch of samples.

    Each call seeds torch's default CPU generator, so call the object only inside
    `torch.random.fork_rng(devices=[])`.
    """

    def __init__(
        self,
        recipe: AugmentRecipe,
        seed: int,
        epoch: int,
        index: Array,
    ) -> None:
        """Build the transforms of `recipe`, and draw the seed of each sample in `index`."""
        self.transforms = build_transforms(recipe)
        self.seeds: list[int] = []
        if self.transforms:
            bits = sampling.draw_bits(seed, epoch, index, sampling.TRANSFORMS) >> np.uint64(1)
            self.seeds = bits.tolist()

    def __call__(self, row: int, image: Tensor) -> Tensor:
        """Apply the transforms to an image, with the seed of its sample.

        Args:
            row: position of the sample in the constructor's `index`.
            image: image (C, H, W) uint8.
        """
        if not self.transforms:
            return image
        torch.default_generator.manual_seed(self.seeds[row])
        # Noise is drawn in the order of memory, so it would depend on the memory format.
        image = image.contiguous()
        for transform in self.transforms:
            image = transform(image)
        return image


def build_transforms(recipe: AugmentRecipe) -> list[Transform]:
    """Build the transforms of a recipe.

    Raises:
        RecipeError: a name is unknown, or an argument is wrong.
    """
    check_transform_names(recipe.transforms)
    return [_build(name, values) for name, values in list_arguments(recipe.transforms)]


def _build(name: str, values: Any, **others: Any) -> Transform:
    """Build one transform.

    Args:
        name: name of the class.
        values: its arguments by name, or the value of its first argument.
        **others: arguments that replace those in `values`.
    """
    kind = getattr(v2, name)
    signature = inspect.signature(kind)
    typed = format_yaml({name: values})
    try:
        if isinstance(values, Mapping):
            arguments = signature.bind(**values).arguments
        else:
            arguments = signature.bind(values).arguments
        arguments |= others
        for key, enumeration in ENUMERATIONS.items():
            if isinstance(arguments.get(key), str):
                arguments[key] = enumeration(arguments[key])
        transform: Transform = kind(**arguments)
    # The constructors check few of their arguments, and can raise any exception.
    except Exception as error:
        raise RecipeError(
            f"augment.transforms: {typed} cannot be built ({read_line(error)}); write "
            f"{name}: {{{_describe_arguments(signature)}}}"
        ) from None
    return transform


def _describe_arguments(signature: inspect.Signature) -> str:
    """Return the names of all arguments, with their defaults."""
    descriptions = []
    for name, parameter in signature.parameters.items():
        default = parameter.default
        if name in ENUMERATIONS:
            choices = [member.value for member in ENUMERATIONS[name]]
            descriptions.append(f"{name}: {' or '.join(choices)}")
        elif default is parameter.empty:
            descriptions.append(f"{name}: required")
        else:
            descriptions.append(f"{name}: {format_yaml(_to_plain(default))}")
    return ", ".join(descriptions)


def _to_plain(value: Any) -> Any:
    """Convert tuples to lists, and objects to text, so that `value` can be written as YAML."""
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def check_transforms(
    recipe: AugmentRecipe,
    channels: int,
    size: ImageSize,
) -> None:
    """Try the transforms of a recipe on images of the run.

    Args:
        recipe: the section `augment`.
        channels: number of channels of the images.
        size: size of the images in pixels.

    Raises:
        RecipeError: a transform fails, returns another shape or type, leaves the image as it is, or
            draws from other generators than torch's.
    """
    with torch.random.fork_rng(devices=[]):
        for name, values in list_arguments(recipe.transforms):
            fault = _find_fault(name, values, channels, size)
            if fault and channels != 3 and not _find_fault(name, values, 3, size):
                fault = f"needs images of 3 channels, and these have {channels}"
            if fault:
                raise RecipeError(f"augment.transforms: {name} {fault}: remove it")


def _find_fault(
    name: str,
    values: Any,
    channels: int,
    size: ImageSize,
) -> str:
    """Return why a transform cannot be used on images, or an empty string if it can."""
    transform = _build(name, values)
    # A transform that acts rarely must show here what it does.
    if "p" in inspect.signature(type(transform)).parameters:
        transform = _build(name, values, p=1.0)
    has_effect = False
    for seed in range(TRIES):
        torch.default_generator.manual_seed(seed)
        # A transform that stretches the range of values has no effect on the full range.
        image = torch.randint(8, 248, (channels, *sides(size)), dtype=torch.uint8)
        results = []
        for _ in range(2):
            torch.default_generator.manual_seed(seed)
            try:
                results.append(transform(image.clone()))
            except Exception as error:
                return f"fails on images of {_describe(image)} ({read_line(error)})"
        first, second = results
        if not isinstance(first, Tensor):
            return f"returns {type(first).__name__} instead of one image"
        if first.shape != image.shape or first.dtype != image.dtype:
            return f"turns images of {_describe(image)} into {_describe(first)}"
        if not torch.equal(first, second):
            return "draws from other random generators than torch's, so no run could be repeated"
        has_effect = has_effect or not torch.equal(first, image)
    if not has_effect:
        return f"leaves images of {_describe(image)} as they are"
    return ""


def _describe(image: Tensor) -> str:
    shape: Sequence[int] = image.shape
    return f"{' x '.join(map(str, shape))} {str(image.dtype).removeprefix('torch.')}"
