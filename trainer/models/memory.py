"""The memory that a training step needs on a device, counted on real, fake and meta tensors alike.

A plan asks it of a model of shapes alone, a pipeline of the blocks that it times.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

USABLE = 0.9  # of the memory there is: a device's context, libraries' workspaces and fragmentation take the rest
COPIES = 4  # of the weights where no optimizer is built yet: themselves, gradients, and what most optimizers keep


def room_in(memory: float, sharing: int = 1, resident: float = 0.0) -> float:
    """Bytes that a run may still take of a device's memory, which `sharing` ranks divide, beside what it holds."""
    return USABLE * memory / sharing - resident


def fewest(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest of 0 to `most` that fits, where more need less; else `most`."""
    return 0 if fits(0) else min(most, 1 + bisect_left(range(1, most), True, key=fits))


def size_of(*tensors: Tensor) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Resident(NamedTuple):
    """Bytes that a module holds from step to step."""

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int


def resident(module: nn.Module, optimizer: int, averaged: bool) -> Resident:
    """Of a model, or a stage of it; `optimizer` are the bytes of its state, `averaged` is for a moving average."""
    parameters = list(module.parameters())
    return Resident(
        size_of(*parameters),
        size_of(*(parameter for parameter in parameters if parameter.requires_grad)),
        optimizer,
        size_of(*parameters) + saved_buffers(module) if averaged else 0,
        size_of(*module.buffers()),
    )


def saved_buffers(module: nn.Module) -> int:
    """Bytes of the buffers that belong in a checkpoint."""
    saved = module.state_dict(keep_vars=True).keys()
    return size_of(*(buffer for name, buffer in module.named_buffers() if name in saved))


class Pass(NamedTuple):
    """Bytes of one forward and backward pass of a micro-batch, beyond what is resident."""

    saved: int  # between forward and backward, outputs included and inputs not
    forward: int  # most at once in the forward pass
    peak: int  # most at once over both
    received: int = 0  # of the inputs, where they come from another stage


def measure(
    forward: Callable[[], Tensor],
    known: Sequence[Tensor],
    cpu: bool = False,
) -> Pass:
    """The pass in which `forward` computes the output. What `known` tensors hold does not count.

    With `cpu`, what convolutions allocate for a moment on a CPU does.
    """
    with Allocations(known, cpu) as seen:
        out = forward()
        saved, most = seen.live, seen.peak
        gradient = torch.empty_like(out)
        if out.requires_grad:  # else all of it is frozen
            torch.autograd.backward(out, gradient)
    return Pass(saved, most, seen.peak)


def of_module(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor] = Tensor.float,
    known: Sequence[Tensor] = (),
    gradients: bool = True,
    cpu: bool = False,
) -> Pass:
    """The pass in which `run` takes the inputs through the module. Gradients that are there from the start do not
    count; without them those that come do."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if gradients else None
    there = [*module.parameters(), *module.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    measured = measure(lambda: loss(run(inputs)), [*there, inputs, *known], cpu)
    for leaf in (*parameters, inputs):
        leaf.grad = None
    return measured


def held(actions: Iterable[tuple[str, int, int]], stages: Sequence[Pass]) -> int:
    """Most bytes that a worker holds at once for activations, of all micro-batches that it has begun.

    `actions` are its own in their order, as `modes.pipeline.orders.Action`; `stages` has each stage's pass.
    """
    live = most = 0
    for kind, stage, _ in actions:
        needs = stages[stage]
        if kind == "F":
            most = max(most, live + needs.received + needs.forward)
            live += needs.received + needs.saved
        else:  # the weights' part of a backward pass needs what its inputs' part has left
            most = max(most, live + needs.peak - needs.saved)
            if kind != "I":
                live -= needs.received + needs.saved
    return most


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages that exist, and the most there were at once; those of `known` tensors do not count.

    Each storage is seen when it comes, and a weak reference tells when it goes.
    """

    def __init__(self, known: Sequence[Tensor], cpu: bool = False) -> None:
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

    def alive(self) -> list[torch.UntypedStorage]:
        """Storages that came and are there still."""
        kept = [seen() for seen in self._seen.values() if isinstance(seen, weakref.ref)]
        return [storage for storage in kept if storage is not None]

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
