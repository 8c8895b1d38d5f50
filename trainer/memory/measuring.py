"""Measure the memory of a forward and backward pass, with real, fake or meta tensors.

The command `plan` measures passes of a model on fake tensors. A pipeline measures the passes of the
blocks that it times.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def count_bytes(*tensors: Tensor) -> int:
    """Return the total size in bytes of the elements of `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Resident(NamedTuple):
    """Size in bytes of the tensors of a module that stay allocated from step to step.

    Attributes:
        parameters: Size of all parameters.
        gradients: Size of the gradients of the parameters that are trained.
        optimizer: Size of the optimizer's state.
        ema: Size of the moving average of parameters and saved buffers; 0 without an average.
        buffers: Size of all buffers.
    """

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int


def count_saved_buffers(module: nn.Module) -> int:
    """Return the size in bytes of the buffers that a checkpoint contains."""
    saved = module.state_dict(keep_vars=True).keys()
    buffers = [buffer for name, buffer in module.named_buffers() if name in saved]
    return count_bytes(*buffers)


class Pass(NamedTuple):
    """Memory in bytes that the pass of a micro-batch allocates on top of the resident tensors.

    Attributes:
        saved: Size of the outputs and of the activations that the backward pass reads. The inputs
            do not count.
        forward: Peak during the forward pass.
        peak: Peak during the forward and backward pass.
        received: Size of the inputs if another stage sent them, otherwise 0.
    """

    saved: int
    forward: int
    peak: int
    received: int = 0


def measure_pass(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor] = Tensor.float,
    known: Sequence[Tensor] = (),
    gradients: bool = True,
    cpu: bool = False,
) -> Pass:
    """Measure the memory of a forward and backward pass.

    Args:
        module: The module to measure. Its parameters and buffers do not count.
        run: Function that computes the module's outputs from `inputs`.
        inputs: A micro-batch (N, ...). It does not count.
        loss: Function that maps the outputs to the tensor where the backward pass starts.
        known: Further tensors that exist before the pass and do not count.
        gradients: Whether to allocate gradients before the pass, so that they do not count.
        cpu: Whether peaks include the scratch memory that oneDNN allocates for convolutions.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    existing = [*module.parameters(), *module.buffers(), inputs, *known]
    for parameter in parameters:
        parameter.grad = None
        if gradients:
            parameter.grad = torch.zeros_like(parameter)
            existing.append(parameter.grad)
    with Allocations(existing, cpu) as allocations:
        out = loss(run(inputs))
        saved = allocations.live
        forward_peak = allocations.peak
        gradient = torch.empty_like(out)
        # The output of a frozen module has no gradient, so there is no backward pass.
        if out.requires_grad:
            torch.autograd.backward(out, gradient)
    for leaf in (*parameters, inputs):
        leaf.grad = None
    return Pass(saved, forward_peak, allocations.peak)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that adds up the sizes of the storages that operations allocate.

    A storage counts from the first operation that returns a tensor with this storage until the
    storage is freed, which a weak reference reports. Storages of `known` tensors do not count.

    Attributes:
        live: Size in bytes of the storages that exist now.
        peak: Maximum of `live`.
    """

    def __init__(
        self,
        known: Sequence[Tensor],
        cpu: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._cpu = cpu
        # Keep the known storages alive, so that no new storage can get the address of one of them.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen: dict[int, Any] = {storage._cdata: storage for storage in self._known}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        if self._cpu and func is torch.ops.aten.convolution_backward.default:
            scratch = _estimate_scratch(inputs=args[1], weight=args[2], groups=args[9])
            self.peak = max(self.peak, self.live + scratch)
        self.peak = max(self.peak, self.live)
        return out

    def alive(self) -> list[torch.UntypedStorage]:
        """Return the storages that operations in this context allocated and that still exist."""
        return [
            storage
            for reference in self._seen.values()
            if isinstance(reference, weakref.ref) and (storage := reference()) is not None
        ]

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._seen:
            return

        def remove(_: Any) -> None:
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, remove)
        self.live += size


def _estimate_scratch(
    inputs: Tensor,
    weight: Tensor,
    groups: int,
) -> int:
    """Return the scratch memory in bytes of a convolution's backward pass on a CPU.

    oneDNN computes the weight's gradient in blocks of 16 x 16 channels per group (except 3 x 3
    depthwise convolutions), accumulates 16-bit gradients in fp32, and copies the result to the
    weight's layout. The formula fits the profiler's memory events (AVX-512, torch 2.15). For
    depthwise convolutions of few images, the scratch memory is a large fraction of the peak.
    """
    outs = weight.shape[0] // groups
    ins = weight.shape[1]
    # Tensors in the memory format channels_last are not contiguous, so oneDNN copies the gradient.
    is_reordered = not (inputs.is_contiguous() and weight.is_contiguous())
    is_depthwise_3x3 = outs == ins == 1 and tuple(weight.shape[2:]) == (3, 3)
    copies = 1.0
    if groups > 1 and is_reordered and not is_depthwise_3x3:
        padded_outs = -(-outs // 16) * 16
        padded_ins = -(-ins // 16) * 16
        copies = padded_outs * padded_ins / (outs * ins)
    total = copies
    if is_reordered:
        total += 1
    if weight.element_size() == 2:
        total = max(3 * copies - 1, total)
    return int(count_bytes(weight) * total)
