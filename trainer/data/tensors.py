"""Tensors of what users hold numbers in: arrays of any layout and type, lists, single numbers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import RecipeError

SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def as_tensor(value: Any) -> Tensor:
    """A tensor of the numbers in an array, a list or a tensor, or of one number; it shares memory where it can.

    Arrays may be flipped, strided, read-only or of another byte order.

    Raises:
        RecipeError: no tensor holds them, as text, objects and missing values.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise RecipeError("values of a masked array are missing: fill them, as in array.filled(0)")
    try:
        if isinstance(value, np.ndarray | np.generic):
            value = np.require(value, value.dtype.newbyteorder("="), "C")
        with warnings.catch_warnings(action="ignore"):  # of a read-only array, which nobody writes to
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind, why = type(value).__name__, f" ({error})" if isinstance(value, list | tuple) else ""
        kind += f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        raise RecipeError(
            f"a tensor holds numbers, found {kind}{why}: give names as their index in a list of names, and numbers of "
            "other types as float, int or bool"
        ) from None


def as_targets(value: Any) -> Tensor:
    """The same for targets: unsigned numbers of 16 bits and more become signed, as torch hardly computes with them."""
    targets = as_tensor(value)
    if targets.dtype not in SIGNED:
        return targets
    signed = targets.to(SIGNED[targets.dtype])
    if targets.dtype == torch.uint64 and (signed < 0).any():
        raise RecipeError("targets are whole numbers below 2**63, found larger ones")
    return signed
