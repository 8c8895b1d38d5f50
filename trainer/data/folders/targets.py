"""Targets of samples that are read one by one, checked against the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.sets import TensorSpec
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

    def checked(self, target: Any) -> Tensor | int:
        """A sample's target. Raises ValueError."""
        plain = self.kind.checked.__func__ is Classification.checked.__func__  # type: ignore[attr-defined]
        if plain and type(target) is int and 0 <= target < len(self.names):
            return target  # checking a tensor takes longer than reading a small image
        tensor = target_of(target, self.kind, self.names)
        if tensor.shape != self.spec.shape or torch.promote_types(tensor.dtype, self.spec.dtype) != self.spec.dtype:
            raise ValueError(f"its target is {TensorSpec.of(tensor[None])}, and that of others {self.spec}")
        return tensor
