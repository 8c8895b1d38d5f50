"""What operators allocate and free, on tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages that exist, and the most there were at once; those of `known` tensors do not count.

    Each storage is seen when it comes, and a weak reference tells when it goes.
    """

    def __init__(self, known: Sequence[Tensor], cpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._cpu = cpu
        self._known = [tensor.untyped_storage() for tensor in known]  # held, or another could get its address
        self._seen: dict[int, Any] = {storage._cdata: storage for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        if self._cpu and func is torch.ops.aten.convolution_backward.default:
            self.peak = max(self.peak, self.live + _scratch(args[1], args[2], args[9]))
        self.peak = max(self.peak, self.live)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.live += size


def _scratch(inputs: Tensor, weight: Tensor, groups: int) -> int:
    """What a convolution's backward pass allocates on a CPU for a moment, beyond its results.

    oneDNN computes the weight's gradient in blocks of 16 x 16 channels a group (3 x 3 depthwise ones apart), in 16-bit
    types with sums in fp32, and copies it to the weight's layout. Found by the profiler's memory events (AVX-512, torch
    2.15); it matters for depthwise convolutions of few images.
    """
    outs, ins = weight.shape[0] // groups, weight.shape[1]
    reordered = not (inputs.is_contiguous() and weight.is_contiguous())  # channels_last
    special = outs == ins == 1 and tuple(weight.shape[2:]) == (3, 3)
    blocked = 1.0
    if groups > 1 and reordered and not special:
        blocked = (-(-outs // 16) * 16) * (-(-ins // 16) * 16) / (outs * ins)
    if weight.element_size() == 2:
        return int(size_of(weight) * max(3 * blocked - 1, blocked + reordered))
    return int(size_of(weight) * (blocked + reordered))


def size_of(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()
