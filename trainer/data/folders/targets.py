"""Conversion and checks of the targets of samples that are read one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.sampling import Array
from trainer.data.sets import TensorSpec
from trainer.data.tensors import as_targets
from trainer.tasks import Classification, Task

# If the highest class number is below this one, `sparse` returns no warning.
MIN_SUSPICIOUS_NUMBER = 1000
# If the highest class number is at least this multiple of the number of used classes, `sparse`
# returns a warning.
MAX_NUMBERS_PER_CLASS = 20


def sparse(numbers: Array) -> str:
    """Return a warning if only few of the class numbers up to the highest one are used.

    Args:
        numbers: (samples,) class numbers; negative for no class.

    Returns:
        The warning, or an empty string.
    """
    used, counts = np.unique(numbers[numbers >= 0], return_counts=True)
    if not len(used) or used[-1] < MIN_SUSPICIOUS_NUMBER:
        return ""
    if len(used) * MAX_NUMBERS_PER_CLASS > used[-1]:
        return ""
    samples = f"{counts[-1]:,} sample{'s' if counts[-1] > 1 else ''}"
    return (
        f"{len(used):,} classes are in use, and the number {used[-1]:,} ({samples}) makes them "
        f"{used[-1] + 1:,}"
    )


def target_of(
    target: Any,
    kind: type[Task],
    names: Sequence[str],
) -> Tensor:
    """Convert a sample's target to the form that the task needs.

    Raises:
        ValueError: the task does not accept the target.
    """
    try:
        return kind.checked(as_targets(target)[None], names)[0]
    except (TypeError, ValueError, RuntimeError) as error:
        label = ""
        if isinstance(target, int):
            label = f"its label is {target}, and "
        raise ValueError(f"{label}{error}") from None


@dataclass(frozen=True)
class Targets:
    """Task, names and shape of a data set's targets.

    Attributes:
        kind: class of the task.
        names: names of the classes or values.
        spec: shape and type of a target.
    """

    kind: type[Task]
    names: tuple[str, ...]
    spec: TensorSpec

    def checked(self, target: Any) -> Tensor | int:
        """Convert a sample's target to the form that the task needs.

        Raises:
            ValueError: the task does not accept the target, or it has another shape or type than
                the targets of other samples.
        """
        is_plain = self.kind.checked.__func__ is Classification.checked.__func__  # type: ignore[attr-defined]
        if is_plain and type(target) is int and 0 <= target < len(self.names):
            # Return a valid class number at once. Its conversion to a tensor for the checks below
            # would take longer than reading a small image.
            return target
        tensor = target_of(target, self.kind, self.names)
        if (
            tensor.shape != self.spec.shape
            or torch.promote_types(tensor.dtype, self.spec.dtype) != self.spec.dtype
        ):
            raise ValueError(
                f"its target is {TensorSpec.of(tensor[None])}, but other samples have {self.spec}"
            )
        return tensor
