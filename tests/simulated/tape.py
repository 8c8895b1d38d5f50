"""A stand-in for CUDA graphs on the CPU: a tape of operations with the memory that each of them
uses.

It is replayed on that very memory, without the Python that made it.

As with real graphs:

- Recording computes nothing: weights, buffers and random states are put back, and what was made is
  rubbish. It sends nothing to other ranks.
- Python's numbers are constants, and so is a tensor that the host makes meanwhile.
- An address is one, whatever becomes of the tensor that had it.
- A storage that is resized, as those of FSDP's gathered weights, gets other memory. A replay uses
  the memory that it had in the recording, whatever memory the storage has by then.
- All recordings of a recorder share one pool: memory that nobody held when its recording ended, or
  when a later one began, is rubbish after a replay of that.
- Waits of the host for the device cannot be recorded, nor draws of Python's and NumPy's generators.
- Random numbers of a replay go on where the device's generator is.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import NotCapturable, host_random_states, restore_random_states
from trainer.distributed.peers import translate_peer_errors

aten = torch.ops.aten
resize_storage = torch.UntypedStorage.resize_
wait_for_work = Work.wait
WAITS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # These functions call no operator.
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
}
EMPTY |= {aten.new_empty_strided.default}
FOREIGN = (str(Path(torch.__file__).parent), __file__, str(Path(__file__).parent / "simcuda"))


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        return [tensor for part in parts for tensor in tensors_in(part)]
    return []


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(part, change) for part in value)
    return (
        {name: mapped(part, change) for name, part in value.items()}
        if isinstance(value, dict)
        else value
    )


def key_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def whole(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _unsent(func: Any, args: Any) -> Any:
    """Return the result of a collective without its messages, which a capture does not send."""
    future: Any = torch.futures.Future()
    future.set_result(None)
    work = torch._C._distributed_c10d._create_work_from_future(future).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def spoil(memory: torch.UntypedStorage) -> None:
    """Fill memory with what is NaN in every floating type."""
    torch.empty(0, dtype=torch.uint8).set_(memory).fill_(0xFF)  # type: ignore[call-overload]


def wait_without_modes(work: Work, *given: Any) -> Any:
    """Wait for a collective. Then gloo copies what it has reduced, which NCCL does not do."""
    with without_modes():
        return wait_for_work(work, *given)


def waits(func: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func in WAITS or bool(tags & set(func.tags))


class Watch(TorchDispatchMode):
    """Calls `found` for what makes the host wait for a device."""

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self.found, self.reads = found, Reads(found)

    def __enter__(self) -> Any:
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if waits(func):
            self.found(str(func))
        return self.done(func, args, kwargs or {})

    def done(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)


class Reads(TorchFunctionMode):
    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func in READS:
            self.found(func.__name__)
        return func(*args, **(kwargs or {}))


class Pool:
    """Memory that captures have allocated, with their own aliases to it and to all other memory
    that they use.
    """

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}
        # For a resized storage, the memory of replays: other bytes than those of the storage.
        self.resized: dict[int, torch.UntypedStorage] = {}
        self._kept: list[Tensor] = []
        self._aliases: Counter[int] = Counter()

    def alias(self, tensor: Tensor) -> Tensor:
        """Another tensor at this address, whatever the first one is given later."""
        kept = tensor.detach()
        if key_of(tensor) in self.resized:
            memory = self.resized[key_of(tensor)]
            layout = tensor.storage_offset(), tensor.shape, tensor.stride()
            kept = torch.empty(0, dtype=tensor.dtype).set_(memory, *layout)  # type: ignore[call-overload]
        self._kept.append(kept)  # Captures that fail are kept, too.
        self._aliases[key_of(kept)] += 1
        return kept

    def free(self) -> list[int]:
        """Memory that only recordings have."""
        return self.gone(self.made)

    def gone(self, keys: Iterable[int]) -> list[int]:
        """Return the memory of captures that nobody else uses."""
        # The mode that counts is left out.
        counts = {key: torch._C._storage_Use_Count(key) - 1 for key in keys}
        return [key for key, count in counts.items() if count <= self._aliases[key]]

    def spoil(self, keys: list[int]) -> None:
        for key in keys:
            spoil(self.made[key].untyped_storage())


class Recording(Watch):
    """Record operations until it is closed, and undo their effects then."""

    def __init__(
        self,
        pool: Pool,
        refuse: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(refuse or self._refuse)
        # Memory that this recording takes, and leaves again.
        self.pool, self.given, self.lost = (
            pool,
            pool.free(),
            [],
        )
        self.operations: list[Any] = []
        # Existing memory with a copy of its contents.
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, None] = {}
        self.outside: set[int] = set()  # other memory that it uses
        self.weak: Any = lambda: None  # see `result`
        self._patches = ExitStack()

    def __enter__(self) -> Any:
        patches = [
            (torch.UntypedStorage, "resize_", lambda storage, size: self._resize(storage, size)),
            (Work, "wait", wait_without_modes),
        ]
        for owner, attribute, value in patches:
            self._patches.enter_context(mock.patch.object(owner, attribute, value))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Allocate or free the memory of a storage, here and in replays."""
        with without_modes():
            key = int(storage._cdata)
            if size:
                assert not storage.size(), "memory from before a recording changes its size"
                self.pool.resized[key] = torch.UntypedStorage(size)
            else:
                assert key in self.pool.resized, "memory from before a recording is freed"
            memory = self.pool.resized[key]
            self.operations.append((spoil, [memory], {}, []))
            if not size:
                del self.pool.resized[key]
            return resize_storage(storage, size)

    @staticmethod
    def _refuse(what: str) -> None:
        raise RuntimeError(
            f"operation not permitted when stream is capturing: {what}, in {_caller()}"
        )

    def done(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        known_names = {key_of(tensor) for tensor in inputs}
        with without_modes():
            for tensor in inputs:
                if key_of(tensor) in self.pool.resized:
                    continue
                if key_of(tensor) not in self.made and key_of(tensor) not in self._before:
                    self._before[key_of(tensor)] = whole(tensor), whole(tensor).clone()
                    self.outside.add(key_of(tensor))
        out = _unsent(func, args) if func.namespace == "c10d" else super().done(func, args, kwargs)
        with without_modes():
            self._keep(func, args, kwargs, known_names, out)
        return out

    def _keep(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        known: set[int],
        out: Any,
    ) -> None:
        args = mapped(list(args), self.pool.alias)
        kwargs = mapped(kwargs, self.pool.alias)
        outs = [
            (self.pool.alias(tensor), key_of(tensor) not in known) for tensor in tensors_in(out)
        ]
        for tensor, fresh in outs:
            if fresh and key_of(tensor) not in self.pool.made:
                self.pool.made[key_of(tensor)] = tensor
                self.made[key_of(tensor)] = None
        if func is aten._to_copy.default:
            kwargs.pop("device", None)  # the one there is, whatever a simulated one calls itself
        self.operations.append((func, args, kwargs, outs))

    def close(self) -> None:
        with torch.no_grad(), without_modes():
            for memory, copy in self._before.values():
                memory.copy_(copy)
            self._before.clear()
            self.pool.resized.clear()
            free = set(self.pool.free())
            self.lost = [key for key in self.made if key in free]
            self.pool.spoil([*self.made])
            # A CPU refuses -1 as an index when a later recording reads it, which a GPU that only
            # records does not do.
            for key in self.made:
                if not self.pool.made[key].is_floating_point():
                    self.pool.made[key].zero_()

    @property
    def result(self) -> Any:
        """Return the result of the work if somebody still refers to it."""
        return self.weak()

    @torch.no_grad()
    def replay(self) -> None:
        self.pool.spoil(self.given)
        for func, args, kwargs, outs in self.operations:
            if func in EMPTY:
                continue
            made = func(*args, **kwargs)
            if func is not spoil and func.namespace == "c10d":
                work = made[-1] if isinstance(made, list | tuple) else made
                with translate_peer_errors():
                    work.wait()
            for (target, fresh), computed in zip(outs, tensors_in(made), strict=True):
                if fresh:
                    target.copy_(computed)
        self.pool.spoil(self.lost)


class CpuRecorder:
    """A replacement for `cuda_graphs.StepRecorder`.

    Attributes:
        recordings: what was recorded.
        replays: how often one was replayed.
        last: the one that was replayed last.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, Pool()
        self.recordings: list[Recording] = []
        self.last: Recording | None = None
        self.replays = 0
        self.closed = False

    @contextmanager
    def use_side_stream(self) -> Iterator[None]:
        yield

    @contextmanager
    def collect_waits(self) -> Iterator[list[str]]:
        collected: list[str] = []
        with Watch(lambda what: collected.append(f"{_caller()} ({what})")):
            yield collected

    def record(
        self,
        work: Callable[[], Any],
        stream: Any = None,
    ) -> tuple[Callable[[], None], Any]:
        assert not self.closed
        drawn = host_random_states()
        state = torch.get_rng_state()
        recording = Recording(self.pool)
        try:
            with recording, mock.patch.object(cuda_graphs, "is_capturing", True):
                work_result = work()
        except Exception as error:
            raise NotCapturable(str(error).partition("\n")[0] or type(error).__name__) from error
        finally:
            recording.close()
            undrawn = restore_random_states(drawn)
            torch.set_rng_state(state)
        if not undrawn:
            raise NotCapturable(
                "it draws random numbers on the host, which a replay would not draw again"
            )
        self.recordings.append(recording)
        if isinstance(work_result, Tensor):
            recording.weak = weakref.ref(work_result)
        return lambda: self._replay(recording), work_result

    def _replay(self, recording: Recording) -> None:
        assert not self.closed, "its memory was given back"
        self.replays += 1
        self.last = recording
        recording.replay()

    def record_event(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        self.closed = True


def is_recording() -> bool:
    return any(isinstance(mode, Recording) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def without_modes() -> Iterator[None]:
    """Hide the operations of this block from all modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def outside(frame: Any) -> Any:
    """The innermost frame that is neither torch's nor a simulation's."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOREIGN):
        frame = frame.f_back
    return frame


def _caller() -> str:
    frame = outside(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def same_draws(kind: type[CpuRecorder]) -> type[CpuRecorder]:
    """A recorder with a generator that graphs do not know: each replay repeats the first random
    numbers.
    """

    class SameDraws(kind):  # type: ignore[misc, valid-type]
        def record(
            self, work: Callable[[], Any], stream: Any = None
        ) -> tuple[Callable[[], None], Any]:
            state = torch.get_rng_state()
            replay, created = super().record(work)

            def again() -> None:
                after = torch.get_rng_state()
                torch.set_rng_state(state)
                replay()
                torch.set_rng_state(after)

            return again, created

    return SameDraws


@contextmanager
def graphs_on_the_cpu(kind: type[CpuRecorder] = CpuRecorder) -> Iterator[list[CpuRecorder]]:
    """Give devices of the CPU graphs in this block. Yield the recorders that were made in it."""
    created: list[CpuRecorder] = []

    def recorder(device: torch.device) -> CpuRecorder:
        created.append(kind(device))
        return created[-1]

    with mock.patch.multiple(
        cuda_graphs, has_cuda_graphs=lambda device: True, StepRecorder=recorder
    ):
        yield created
