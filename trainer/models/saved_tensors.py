"""What autograd keeps of a forward pass for the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes by storage that autograd keeps of what is computed meanwhile, without the model's parameters."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}  # views and in-place results of one tensor count once

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def activation_bytes(model: nn.Module, shape: Sequence[int]) -> int:
    """Bytes that autograd keeps for a batch of `shape` in fp32, from shapes alone.

    Raises:
        NotImplementedError: the model has an operator that cannot run on shapes alone.
    """
    probe = copy.deepcopy(model).to("meta").train()
    with counted(probe) as kept:
        probe(torch.empty(tuple(shape), device="meta"))
    return sum(kept.values())
