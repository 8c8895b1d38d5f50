"""Targets of samples that are read one by one, checked against the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.sets import PhotoSource, TensorSpec
from trainer.data.tensors import as_targets
from trainer.tasks import Classification, Task

MANY, SPARSE = 1000, 20  # numbers below the first are right; so many for each one in use are too many


def sparse(numbers: npt.NDArray[Any]) -> str:
    """A warning where hardly any of the class numbers (samples,) up to the highest is in use; empty where many are."""
    used, counts = np.unique(numbers[numbers >= 0], return_counts=True)
    if not len(used) or used[-1] < MANY or len(used) * SPARSE > used[-1]:
        return ""
    samples = f"{counts[-1]:,} sample{'s' if counts[-1] > 1 else ''}"
    return f"{len(used):,} classes are in use, and the number {used[-1]:,} ({samples}) makes them {used[-1] + 1:,}"


def target_of(target: Any, kind: type[Task], names: Sequence[str]) -> Tensor:
    """A sample's target as the task wants it. Raises ValueError."""
    try:
        return kind.checked(as_targets(target)[None], names)[0]
    except (TypeError, ValueError, RuntimeError) as error:
        label = f"its label is {target}, and " if isinstance(target, int) else ""
        raise ValueError(f"{label}{error}") from None


@dataclass(frozen=True)
class Targets:
    """Task, names and shape of a data set's targets."""

    kind: type[Task]
    names: tuple[str, ...]
    spec: TensorSpec

    @property
    def dense(self) -> bool:
        """Whether each pixel of an image has a target."""
        return len(self.spec.shape) > 1

    def checked(self, target: Any) -> Tensor | int:
        """A sample's target. Raises ValueError."""
        plain = self.kind.checked.__func__ is Classification.checked.__func__  # type: ignore[attr-defined]
        if plain and type(target) is int and 0 <= target < len(self.names):
            return target  # checking a tensor takes longer than reading a small image
        tensor = target_of(target, self.kind, self.names)
        if tensor.shape != self.spec.shape or torch.promote_types(tensor.dtype, self.spec.dtype) != self.spec.dtype:
            raise ValueError(f"its target is {TensorSpec.of(tensor[None])}, and that of others {self.spec}")
        return tensor

    def checked_image(self, image: Tensor, size: int | None) -> Tensor:
        """An image (C, H, W) that fits its target. Raises ValueError."""
        if self.dense and image.shape[-2:] != (size, size):
            height, width = image.shape[-2:]
            raise ValueError(f"its image is {height} x {width}, and those of others {size} x {size}")
        return image


class TaskSource:
    """A user's own source, whose targets are checked against the task; `labels` are known without reading."""

    labels: Any

    def __init__(self, source: PhotoSource, targets: Targets, size: int, labels: Tensor | None) -> None:
        """`labels` are those of all samples, where the source has them."""
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
        target = self.targets.checked(label) if known is None else torch.as_tensor(known[index])
        return self.targets.checked_image(image, self.size), target
