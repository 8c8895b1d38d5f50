"""Conversion of users' arrays, lists and single numbers to tensors."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import RecipeError

# Signed types to which targets are converted, because torch supports few operations on unsigned
# numbers of 16 bits and more.
SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def as_tensor(value: Any) -> Tensor:
    """Convert an array, a list, a tensor or a number to a tensor, which shares memory if possible.

    Arrays may be flipped, strided, read-only or of another byte order.

    Raises:
        RecipeError: a tensor cannot hold the values, such as text, objects and missing values.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise RecipeError("values of a masked array are missing: fill them, as in array.filled(0)")
    try:
        if isinstance(value, np.ndarray | np.generic):
            value = np.require(value, value.dtype.newbyteorder("="), "C")
        # torch warns about read-only arrays, but this program never writes to these tensors.
        with warnings.catch_warnings(action="ignore"):
            if isinstance(value, Tensor):
                return value
            # Data stay on the CPU, whatever torch's default device is.
            return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        if isinstance(value, np.ndarray):
            kind += f" of {value.dtype}"
        elif isinstance(value, list | tuple):
            kind += f" ({error})"
        raise RecipeError(
            f"a tensor holds numbers, found {kind}: give names as their index in a list of names, "
            "and numbers of other types as float, int or bool"
        ) from None


def as_targets(value: Any) -> Tensor:
    """Convert targets as `as_tensor` does, and unsigned numbers of 16 bits and more to signed.

    Raises:
        RecipeError: a tensor cannot hold the values, or one of them is 2**63 or more.
    """
    targets = as_tensor(value)
    if targets.dtype not in SIGNED:
        return targets
    signed = targets.to(SIGNED[targets.dtype])
    if targets.dtype == torch.uint64 and (signed < 0).any():
        raise RecipeError("targets must be whole numbers below 2**63, found larger ones")
    return signed
