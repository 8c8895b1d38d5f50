"""Targets of samples that are read one by one, held against the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.sets import PhotoSource, TensorSpec
from trainer.tasks import Classification, Task

MANY, SPARSE = 1000, 20  # class numbers from here on are looked at; so many to one in use are too many


def sparse(numbers: npt.NDArray[Any]) -> str:
    """What to say of class numbers (samples,) of which hardly any is in use: one that is far too high makes a class of
    each number below it. Empty where all is well."""
    used, counts = np.unique(numbers[numbers >= 0], return_counts=True)
    if not len(used) or used[-1] < MANY or len(used) * SPARSE > used[-1]:
        return ""
    samples = f"{counts[-1]:,} sample{'s' if counts[-1] > 1 else ''}"
    return f"{len(used):,} classes are in use, and the number {used[-1]:,} ({samples}) makes them {used[-1] + 1:,}"


def target_of(target: Any, kind: type[Task], names: Sequence[str]) -> Tensor:
    """A sample's target as the task wants it.

    Raises:
        ValueError: it is none; the line says what is wanted.
    """
    try:
        return kind.checked(torch.as_tensor(target)[None], names)[0]
    except (TypeError, ValueError, RuntimeError) as error:
        told = f"its label is {target}, and " if isinstance(target, int) else ""
        raise ValueError(f"{told}{error}") from None


@dataclass(frozen=True)
class Targets:
    """What the targets of a data set are to be."""

    kind: type[Task]
    names: tuple[str, ...]
    spec: TensorSpec

    @property
    def dense(self) -> bool:
        """Whether they lie under the pixels of their images."""
        return len(self.spec.shape) > 1

    def one(self, target: Any) -> Tensor | int:
        """A sample's target.

        Raises:
            ValueError: it is no target of the task, or not as the others are.
        """
        plain = self.kind.checked.__func__ is Classification.checked.__func__  # type: ignore[attr-defined]
        if plain and type(target) is int and 0 <= target < len(self.names):
            return target  # checking a tensor takes longer than reading a small image
        found = target_of(target, self.kind, self.names)
        if found.shape != self.spec.shape or torch.promote_types(found.dtype, self.spec.dtype) != self.spec.dtype:
            raise ValueError(f"its target is {TensorSpec.of(found[None])}, and that of others {self.spec}")
        return found

    def beside(self, image: Tensor, size: int | None) -> Tensor:
        """An image (C, H, W) as it may stand beside its target.

        Raises:
            ValueError: the target lies under its pixels, and it has not `size` of them along each side.
        """
        if self.dense and image.shape[-2:] != (size, size):
            height, width = image.shape[-2:]
            raise ValueError(f"its image is {height} x {width}, and those of others {size} x {size}")
        return image


class TaskSource:
    """A user's own source, whose targets are held against the task; those that it tells beforehand stay that way."""

    labels: Any

    def __init__(self, source: PhotoSource, targets: Targets, size: int, labels: Tensor | None) -> None:
        """`labels` are those of all samples as the task wants them, where the source knows them."""
        self.source, self.targets, self.size = source, targets, size
        if labels is not None:
            self.labels = labels.numpy()

    def __len__(self) -> int:
        return len(self.source)

    def where(self, index: int) -> str:
        return self.source.where(index)

    def read(self, index: int, channels: int) -> tuple[Tensor, Tensor | int]:
        image, label = self.source.read(index, channels)
        known = getattr(self, "labels", None)
        target = self.targets.one(label) if known is None else torch.as_tensor(known[index])
        return self.targets.beside(image, self.size), target
