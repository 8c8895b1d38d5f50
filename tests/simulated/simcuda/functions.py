"""Devices in arguments become tags of storages, and tags become devices if code asks for one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.simulated.simcuda.kernels import META
from tests.simulated.tape import tensors_in

DEVICE = torch.Tensor.device.__get__
# Made on the host, then copied.
VALUES = {
    torch.tensor,
    torch.as_tensor,
    torch.Tensor.new_tensor,
    torch.scalar_tensor,
}
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


def index_of(device: Any) -> int | None:
    """Return the number of a CUDA device, or None for the host."""
    if device is None or isinstance(device, int):
        return device
    device = torch.device(device) if isinstance(device, str) else device
    return (device.index or 0) if device.type == "cuda" else None


def is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu")
    )


def is_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(META(value))
    return isinstance(value, torch.device | str) and str(value) == "meta"


class Functions(TorchFunctionMode):
    def __init__(self, machine: Any) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device or func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) and not META(args[0]) else None
        if first is not None:
            own = getattr(self, "_" + getattr(func, "__name__", ""), None)
            if func in MOVES:
                return self._moved(func, first, args[1:], dict(kwargs))
            if own is not None and func is not torch.Tensor.data.__get__:
                answer = own(func, *args, **kwargs)
                if answer is not NotImplemented:
                    return answer
        return self._with_tags(func, args, kwargs)

    # Properties of a tensor, by the function's name.

    def _numpy(self, func: Any, tensor: Tensor, **_: Any) -> Any:
        if self.machine.memory.device(tensor) is not None:
            raise TypeError(
                f"can't convert cuda:{self.machine.memory.device(tensor)} device type tensor to "
                "numpy"
            )
        return NotImplemented

    ___array__ = _numpy

    def _tolist(self, func: Any, tensor: Tensor) -> Any:
        index = self.machine.memory.device(tensor)
        if index is not None:
            self.machine.wait("tolist", "item")
            self.machine.order.host_waits([self.machine.current_stream(index)])
        return NotImplemented

    def ___deepcopy__(self, func: Any, tensor: Tensor, memo: Any) -> Any:
        out = func(tensor, memo)
        index = self.machine.memory.device(tensor)
        if index is not None:
            self.machine.memory.place(out, self.machine.current_stream(index))
        return out

    def _pin_memory(self, func: Any, tensor: Tensor, *_: Any) -> Any:
        if self.machine.memory.device(tensor) is not None:
            raise RuntimeError("cannot pin a tensor on cuda: only dense CPU tensors can be pinned")
        return self.machine.memory.pin(tensor.clone())

    def _is_pinned(self, func: Any, tensor: Tensor, *_: Any) -> Any:
        return self.machine.memory.is_pinned(tensor)

    def _one_hot(self, func: Any, tensor: Tensor, num_classes: int = -1) -> Any:
        if self.machine.memory.device(tensor) is None or num_classes < 0:
            return NotImplemented
        # CUDA does not check the values, but the CPU does.
        return tensor.new_zeros(*tensor.shape, num_classes).scatter_(-1, tensor.unsqueeze(-1), 1)

    # Functions that create or move tensors.

    def _with_tags(self, func: Any, args: Any, kwargs: Any) -> Any:
        here = self.machine.here
        where = self.machine.memory.device
        values = (*args, *kwargs.values())
        arguments = [value for value in values if is_device(value) and not is_meta(value)]
        tensors = [tensor for tensor in tensors_in(args) + tensors_in(kwargs) if not META(tensor)]
        # A device in the arguments decides, as in torch.empty_like(meta, device="cuda").
        if not arguments and any(is_meta(value) for value in values):
            return func(*args, **kwargs)
        pinned = kwargs.get("pin_memory") is True
        if arguments or pinned:
            index = index_of(arguments[0]) if arguments else None
            on_cpu = torch.device("cpu")
            args, kwargs = tree_map(
                lambda value: on_cpu if is_device(value) else value, (list(args), kwargs)
            )
            kwargs = {
                name: value for name, value in kwargs.items() if name != "pin_memory" or not pinned
            }
            with here.having("target", index):
                out = func(*args, **kwargs)
            if func in VALUES and index is not None:
                self.machine.wait("a tensor of the host's numbers", "H2D")
            for tensor in tensors_in(out):
                if pinned:
                    self.machine.memory.pin(tensor)
                elif index is not None and not META(tensor):
                    self.machine.memory.place(tensor, self.machine.current_stream(index))
            return out
        seen = {where(tensor) for tensor in tensors} - {None}
        if len(seen) != 1:
            return func(*args, **kwargs)
        with here.having("hint", next(iter(seen))):
            return func(*args, **kwargs)

    def _moved(
        self,
        func: Any,
        tensor: Tensor,
        rest: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """`Tensor.to` and its kind."""
        if any(is_meta(value) for value in (*rest, *kwargs.values())):
            return func(tensor, *rest, **kwargs)
        device = kwargs.pop("device", None)
        dtype = kwargs.pop("dtype", None)
        flags = [value for value in rest if isinstance(value, bool)]
        non_blocking = bool(kwargs.pop("non_blocking", flags[0] if flags else False))
        copy = bool(kwargs.pop("copy", flags[1] if len(flags) > 1 else False))
        for value in rest:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                device = value.device
                dtype = value.dtype
            elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
                device = value
        if func is torch.Tensor.cpu:
            device = "cpu"
        elif func is torch.Tensor.cuda and device is None:
            device = self.machine.here.device
        out = tensor
        index = index_of(device)
        if device is not None and index != self.machine.memory.device(tensor):
            out = Copy.apply(tensor, self.machine, index, non_blocking)
            copy = False
        if kwargs.get("memory_format") is None:
            kwargs.pop("memory_format", None)
        if dtype is not None or kwargs or copy:
            out = torch.Tensor.to(out, dtype or out.dtype, copy=copy, **kwargs)
        return out


def answers(machine: Any) -> dict[str, Any]:
    """Return a property of a tensor's device.

    The mode is off during the answer, and hooks may run then.
    """

    def device(tensor: Tensor) -> torch.device:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's rows
        index = None if META(tensor) else machine.memory.device(tensor)
        return DEVICE(tensor) if index is None else torch.device("cuda", index)

    return {
        "device": property(device),
        "is_cuda": property(lambda tensor: device(tensor).type == "cuda"),
        "get_device": lambda tensor: -1 if device(tensor).index is None else device(tensor).index,
        "record_stream": lambda tensor, stream: machine.memory.record_stream(tensor, stream),
    }


class Copy(torch.autograd.Function):
    """Copy a tensor to another device; its gradient goes back to the first device."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, machine: Any, index: int | None, non_blocking: bool
    ) -> Tensor:
        ctx.machine, ctx.back, ctx.non_blocking = (
            machine,
            machine.memory.device(tensor),
            non_blocking,
        )
        return moved(tensor, machine, index, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return moved(gradient, ctx.machine, ctx.back, True), None, None, None


def moved(tensor: Tensor, machine: Any, index: int | None, non_blocking: bool) -> Tensor:
    with machine.here.having("target", index):
        out = torch.empty_like(tensor.detach())
    if not out.numel():
        if index is not None:
            machine.memory.place(out, machine.current_stream(index))
        return out
    return out.copy_(tensor.detach(), non_blocking)
