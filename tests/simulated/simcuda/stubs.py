"""Everything of torch that asks for devices, answered by a simulated machine."""

from __future__ import annotations

import glob
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import (
    _flatten_dense_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)
from torch.nn.parallel import comm
from torch.utils import _foreach_utils as grouping

from tests.simulated.simcuda.collectives import on_its_stream
from tests.simulated.simcuda.functions import Functions, answers, index_of
from tests.simulated.simcuda.kernels import Kernels
from tests.simulated.simcuda.machine import Card, Machine
from tests.simulated.simcuda.order import Event, Stream
from tests.simulated.tape import wait_without_modes


@contextmanager
def simulated(cards: int | Sequence[Card] = 2) -> Iterator[Machine]:
    """Simulate devices cuda:0, cuda:1 and so on for torch in this process: a number of equal ones,
    or these.
    """
    machine = Machine([Card()] * cards if isinstance(cards, int) else cards)
    with ExitStack() as stack:
        for owner, stubs in _stubs(machine).items():
            for attribute, stub in stubs.items():
                stack.enter_context(mock.patch.object(owner, attribute, stub, create=True))
        environment = {
            key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"
        }
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(_modes(machine))
        yield machine


@contextmanager
def _modes(machine: Machine) -> Iterator[None]:
    """Both modes; they are a thread's own."""
    with Functions(machine), Kernels(machine):
        yield


def _stubs(machine: Machine) -> dict[Any, dict[str, Any]]:
    stubs: dict[Any, dict[str, Any]] = {
        torch.cuda: _cuda(machine),
        torch.accelerator: _accelerator(machine),
        torch: _autocast(),
        torch.autograd: {
            "_engine_run_backward": _in_functions(torch.autograd._engine_run_backward, machine)
        },
        comm: _between_devices(machine),
        dist: {
            "init_process_group": _gloo_for_nccl(dist.init_process_group),
            "is_nccl_available": lambda: True,
            "all_reduce": on_its_stream(dist.all_reduce, machine),
            "broadcast": on_its_stream(dist.broadcast, machine),
            "Reducer": _reducer(machine),
        },
        dist.Work: {"wait": wait_without_modes},
        torch._C: {
            "_cuda_getDeviceCount": lambda: machine.count,
            "_cuda_endAllocateToPool": machine.graphs.end_allocating,
            "_cuda_releasePool": lambda device, pool: None,
        },
        torch.version: {"cuda": torch.version.cuda or "13.0", "hip": None},
        glob: {"glob": _with_driver(glob.glob, machine.count)},
        time: {"perf_counter": machine.clock},
        torch.Tensor: answers(machine),
        threading.Thread: {"run": _in_modes(threading.Thread.run, machine)},
        torch.cuda.nccl: {"is_available": lambda _: False, "version": lambda: (2, 29, 0)},
    }
    original = grouping._group_tensors_by_device_and_dtype
    for module in list(sys.modules.values()):
        if vars(module).get("_group_tensors_by_device_and_dtype") is original:
            stubs.setdefault(module, {})["_group_tensors_by_device_and_dtype"] = _by_device
    return stubs


def _cuda(machine: Machine) -> dict[str, Any]:
    memory = machine.memory
    index = machine.index

    def on_device(device: Any) -> AbstractContextManager[None]:
        return machine.here.having("device", index(device))

    def limits(device: Any = None) -> tuple[int, int]:
        return machine.card(device).size - memory.allocated(index(device)), machine.card(
            device
        ).size

    def reset(device: Any = None) -> None:
        memory.peak[index(device)] = memory.allocated(index(device))

    def empty() -> None:
        machine.graphs.permit("giving memory back")
        machine.emptied += 1
        memory.empty_cache()

    def properties(device: Any = None) -> SimpleNamespace:
        name, size, (major, minor), _ = machine.card(device)
        return SimpleNamespace(
            name=name,
            total_memory=size,
            major=major,
            minor=minor,
            multi_processor_count=132,
            is_integrated=0,
        )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "device_count": lambda: machine.count,
        "current_device": lambda: machine.here.device,
        "set_device": lambda device: setattr(machine.here, "device", index(device)),
        "device": on_device,
        "Stream": lambda device=None, **_: Stream(machine, index(device)),
        "Event": lambda enable_timing=False, **_: Event(machine, enable_timing),
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": machine.current_stream,
        "default_stream": lambda device=None: machine.default[index(device)],
        "synchronize": machine.synchronize,
        **machine.graphs.stubs(),
        "_sleep": lambda cycles: machine.order.kernel(machine.current_stream()),
        "manual_seed_all": machine.seed_all,
        "get_rng_state": machine.generator,
        "set_rng_state": machine.set_generator,
        "memory_allocated": lambda device=None: memory.allocated(index(device)),
        "memory_reserved": lambda device=None: memory.reserved(index(device)),
        "max_memory_allocated": lambda device=None: memory.peak[index(device)],
        "reset_peak_memory_stats": reset,
        "empty_cache": empty,
        "mem_get_info": limits,
        "get_device_name": lambda device=None: machine.card(device).name,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: machine.card(device).capability,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90"],
        "can_device_access_peer": lambda device, peer: (
            machine.card(device).peers and machine.card(peer).peers
        ),
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or machine.card().capability >= (8, 0)
        ),
    }


def _accelerator(machine: Machine) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: machine.count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: machine.here.device,
        "set_device_index": lambda device: setattr(machine.here, "device", machine.index(device)),
        "device_index": lambda device: machine.here.having("device", machine.index(device)),
        "current_stream": machine.current_stream,
        "synchronize": machine.synchronize,
    }


def _autocast() -> dict[str, Any]:
    """Autocast with CUDA's thread-local state, which is torch's (fp16 by default); the CPU's state
    follows it and has the effect.
    """
    enabled = torch.set_autocast_enabled
    dtype = torch.set_autocast_dtype

    def set_enabled(kind: Any, value: Any = None) -> None:
        enabled(kind, value)
        if kind == "cuda":
            dtype("cpu", torch.get_autocast_dtype("cuda"))
            enabled("cpu", value)

    def set_dtype(kind: str, value: torch.dtype) -> None:
        dtype(kind, value)
        if kind == "cuda":
            dtype("cpu", value)

    return {"set_autocast_enabled": set_enabled, "set_autocast_dtype": set_dtype}


def _between_devices(machine: Machine) -> dict[str, Any]:
    """Copy like `nn.DataParallel`, in Python, because torch's code is compiled for CUDA tensors."""

    def broadcast(
        tensors: Sequence[Tensor], devices: Sequence[Any], buffer_size: int = 0
    ) -> list[list[Tensor]]:
        copies: list[list[Tensor]] = [list(tensors)]
        for device in devices[1:]:
            # A second copy on the same card.
            own = index_of(device) == machine.memory.device(tensors[0])
            arrived: list[Tensor] = []
            # Copies are views of a flat one: not channels_last.
            for chunk in _take_tensors(tensors, buffer_size):
                flat = _flatten_dense_tensors(chunk).detach()
                flat = flat.to(f"cuda:{index_of(device)}", non_blocking=True, copy=own)
                arrived += _unflatten_dense_tensors(flat, chunk)
            copies.append(list(_reorder_tensors_as(arrived, tensors)))
        return copies

    def scatter(
        tensor: Tensor,
        devices: Sequence[Any],
        chunk_sizes: Any = None,
        dim: int = 0,
        streams: Any = None,
    ) -> tuple[Tensor, ...]:
        parts = (
            tensor.chunk(len(devices), dim)
            if chunk_sizes is None
            else tensor.split(list(chunk_sizes), dim)
        )
        return tuple(
            part.to(f"cuda:{index_of(device)}", non_blocking=True)
            for part, device in zip(parts, devices, strict=False)
        )

    def gather(
        tensors: Sequence[Tensor],
        dim: int = 0,
        destination: Any = None,
    ) -> Tensor:
        sizes = [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(sizes)
        out = torch.empty(shape, dtype=tensors[0].dtype, device=f"cuda:{index_of(destination)}")
        for part, tensor in zip(out.split(sizes, dim), tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        return out

    return {"broadcast_coalesced": broadcast, "scatter": scatter, "gather": gather}


def _by_device(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    collected: dict[Any, Any] = {}
    for position, first in enumerate(lists[0]):
        entry = collected.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for own, values in zip(entry[0], lists, strict=True):
            own += values[position : position + 1]  # a list may be empty
        entry[1].append(position)
    return collected


def _gloo_for_nccl(init: Callable[..., None]) -> Callable[..., None]:
    def join(
        backend: str,
        *args: Any,
        device_id: Any = None,
        **kwargs: Any,
    ) -> None:
        init("gloo" if "nccl" in backend else backend, *args, **kwargs)

    return join


def _reducer(machine: Machine) -> type:
    """Put DDP's buckets, which are made in C++, on the device of its parameters."""

    class Reducer(dist.Reducer):  # type: ignore[misc]
        def __init__(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
            self._where = machine.memory.device(parameters[0])
            with machine.here.having("hint", self._where):
                super().__init__(parameters, *args, **kwargs)

        def _rebuild_buckets(self) -> bool:
            with machine.here.having("hint", self._where):
                return bool(super()._rebuild_buckets())

    return Reducer


def _with_driver(
    real: Callable[..., list[str]],
    count: int,
) -> Callable[..., list[str]]:
    def found(pattern: str, **kwargs: Any) -> list[str]:
        nodes = [f"/dev/nvidia{index}" for index in range(count)]
        return nodes if str(pattern).startswith("/dev/nvidia") else real(pattern, **kwargs)

    return found


def _in_modes(
    run: Callable[[threading.Thread], None], machine: Machine
) -> Callable[[threading.Thread], None]:
    def simulating(thread: threading.Thread) -> None:
        with _modes(machine):
            run(thread)

    return simulating


def _in_functions(run: Callable[..., Any], machine: Machine) -> Callable[..., Any]:
    """A backward pass: its kernels' Python asks for devices too, and a mode is off while it answers
    for `backward`.
    """

    def backward(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if torch._C._len_torch_function_stack() else Functions(machine):
            return run(*args, **kwargs)

    return backward
