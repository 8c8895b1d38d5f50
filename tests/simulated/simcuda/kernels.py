"""Kernels on a simulated device: charged to a stream, checked for mixed devices, and with the
device's random generator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated.tape import EMPTY, aten, tensors_in

META = torch.Tensor.is_meta.__get__
SAME = "same"  # the device that a kernel's inputs are on
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class Kernels(TorchDispatchMode):
    def __init__(self, machine: Any) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in(args) + tensors_in(kwargs)
        if any(META(tensor) for tensor in inputs) or kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs)
        if func is aten._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                self.__torch_dispatch__(
                    aten.copy_.default,
                    (),
                    (target, source, *args[2:]),
                )
            return None
        where = self.machine.memory.device
        with self.machine.order.lock:
            if func is aten.copy_.default and where(args[0]) != where(args[1]):
                return self._copy(*args, **kwargs)
            device = self._device(func, args, kwargs, inputs)
            if device is None:
                return self._on_host(func, args, kwargs)
            if str(func).startswith("aten._foreach"):
                return self._foreach(func, args, kwargs, inputs)
            self.machine.graphs.launched(self.machine.current_stream(device), str(func))
            with self._generator(func, device):
                out = func(*args, **kwargs)
            self._charge(func, args, kwargs, inputs, out, device)
            self._wait(func, args, device)
            return out

    def _device(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
    ) -> int | None:
        """Return the device of a kernel.

        Numbers of the host may go along, and indices into what is on a device.
        """
        here = self.machine.here
        where = self.machine.memory.device
        if here.target != SAME:
            return here.target  # type: ignore[no-any-return]
        if not inputs:
            return here.hint  # type: ignore[no-any-return]
        actual = {where(tensor) for tensor in inputs if tensor.dim() or where(tensor) is not None}
        if func in INDEXED and len(actual) == 2 and None in actual and where(args[0]) is not None:
            self.machine.wait("a copy of indices", "H2D")
            actual.discard(None)
        if len(actual) > 1 and not str(func).startswith("aten._foreach"):
            names = ["cpu" if one is None else f"cuda:{one}" for one in sorted(actual, key=str)]
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got tensors on "
                f"{', '.join(names)}"
            )
        return max((one for one in actual if one is not None), default=None)

    def _charge(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], out: Any, device: int
    ) -> None:
        memory = self.machine.memory
        stream = self.machine.current_stream(device)
        known_names = {tensor.untyped_storage()._cdata for tensor in inputs}
        results = tensors_in(out)
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in known_names]
        for tensor in fresh:
            memory.place(tensor, stream)
        if results and not fresh and _is_view(func._schema):
            return
        written = self._written(func, args, kwargs)
        names = {id(tensor) for tensor in written}
        reads = (
            []
            if func in EMPTY
            else [t for t in inputs if id(t) not in names and memory.device(t) == device]
        )
        memory.use(
            stream,
            reads,
            written + ([] if func in EMPTY else fresh),
            fresh,
            str(func),
        )

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        written = []
        if func.namespace == "c10d":  # whose schemas do not say what is written
            return tensors_in(args)
        for argument, value in [
            *zip(func._schema.arguments, args, strict=False),
            *(
                (arg, kwargs[arg.name])
                for arg in func._schema.arguments[len(args) :]
                if arg.name in kwargs
            ),
        ]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors_in(value)
        return written

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self.machine.memory.pinned:
            for tensor in self._written(func, args, kwargs):
                self.machine.memory.host_writes(tensor, str(func))
        return out

    def _foreach(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
    ) -> Any:
        """Lists over several devices: torch then goes tensor by tensor, and so each place must
        agree.
        """
        where = self.machine.memory.device
        lists = [value for value in args if isinstance(value, list | tuple) and tensors_in(value)]
        for row in zip(*lists, strict=False):
            if (
                len({where(tensor) for tensor in row if tensor.dim() or where(tensor) is not None})
                > 1
            ):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {func} got several at one "
                    "place"
                )
        out = func(*args, **kwargs)
        results = out if isinstance(out, list | tuple) else []
        for n, result in enumerate(results):
            self.machine.memory.place(result, self.machine.current_stream(where(lists[0][n]) or 0))
        written = self._written(func, args, kwargs)
        names = {id(tensor) for tensor in written}
        for device in sorted({where(tensor) for tensor in inputs} - {None}):
            own = [tensor for tensor in inputs if where(tensor) == device]
            fresh = [tensor for tensor in results if where(tensor) == device]
            changed = [tensor for tensor in own if id(tensor) in names]
            reads = [tensor for tensor in own if id(tensor) not in names]
            self.machine.memory.use(
                self.machine.current_stream(device), reads, changed + fresh, fresh, str(func)
            )
        return out

    def _generator(self, func: Any, device: int) -> AbstractContextManager[None]:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return nullcontext()
        self.machine.graphs.draws(device)
        return self.machine.drawing(device)  # type: ignore[no-any-return]

    def _wait(self, func: Any, args: Any, device: int) -> None:
        """Wait if an operation needs a value on the host, or a shape that depends on values."""
        expected = (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
        )
        if expected and func in INDEXED:
            expected = any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
        if expected:
            self.machine.wait(str(func), "item")
            self.machine.order.host_waits([self.machine.current_stream(device)])

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Between devices, or between one and the host."""
        machine = self.machine
        memory = self.machine.memory
        there = memory.device(target)
        here = memory.device(source)
        if there is not None and here is not None:
            # Torch copies on the source's current stream, after the work of the target's
            # stream, which then waits for the copy.
            reading = machine.current_stream(here)
            writing = machine.current_stream(there)
            reading.wait_stream(writing)
            memory.use(reading, [source], [target], [], "copy_ between devices")
            target.copy_(source)
            writing.wait_stream(reading)
        elif there is not None:
            stream = machine.current_stream(there)
            number = memory.use(stream, [], [target], [], "copy_ from the host")
            target.copy_(source)
            if non_blocking and memory.is_pinned(source):
                memory.pinned[source.untyped_storage()._cdata].append((stream.id, number))
            elif source.dim():  # a number of the host is a kernel's argument
                machine.wait("a copy from the host", "H2D")
                machine.order.host_waits([stream])
        else:
            machine.graphs.permit("a copy to the host")
            stream = machine.current_stream(here)
            number = memory.use(stream, [source], [], [], "copy_ to the host")
            memory.host_writes(target, "copy_ to the host")
            if non_blocking:
                value = source.clone()
                alias = target.detach()
                machine.order.arrive_later(stream, number, lambda: alias.copy_(value))
                rubbish(target)
            else:
                machine.wait("a copy to the host", "D2H")
                machine.order.host_waits([stream])
                target.copy_(source)
        return target


def _is_view(schema: Any) -> bool:
    """Whether an operator only looks at its inputs' memory in another shape."""
    written = any(
        argument.alias_info and argument.alias_info.is_write for argument in schema.arguments
    )
    return not written and any(value.alias_info for value in schema.returns)


def rubbish(tensor: Tensor) -> None:
    """Fill memory with values that cannot be mistaken for results."""
    fill: Callable[[Any], Any] = tensor.detach().fill_
    fill(torch.nan if tensor.is_floating_point() else 1 if tensor.dtype is torch.bool else 113)
