"""Flattening of many tensors into one tensor per data type, so that ranks send few messages."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def group_by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and data type."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the elements of tensors of one data type into a tensor of shape (n,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten_into(row: Tensor, tensors: list[Tensor]) -> None:
    """Copy the elements of a flat tensor back into tensors.

    Args:
        row: elements of shape (n,), in the order of `flatten_tensors`.
        tensors: targets, with n elements in total.
    """
    torch._foreach_copy_(tensors, view_with_shapes(row, tensors))


def view_with_shapes(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor that have the shapes of `tensors`."""
    sizes = [tensor.numel() for tensor in tensors]
    pairs = zip(torch.split(row, sizes), tensors, strict=True)
    return [flat.view(tensor.shape) for flat, tensor in pairs]


def view_with_strides(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor that have the shapes and strides of `tensors`.

    A copy between such a view and its tensor is a plain copy of memory, also with channels_last.
    The order of elements differs from `flatten_tensors`, so the two do not go together.
    """
    sizes = [tensor.numel() for tensor in tensors]
    pairs = zip(torch.split(row, sizes), tensors, strict=True)
    return [
        flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
        for flat, tensor in pairs
    ]


def apply_collective(tensors: Iterable[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
    """Apply a collective to tensors in place, with one message per device and data type.

    Args:
        tensors: tensors of any shapes and types.
        collective: function that returns the reduced or received flat tensor, from this rank's flat
            tensor.
    """
    for group in group_by_type(tensors):
        unflatten_into(collective(flatten_tensors(group)), group)
