"""A model's forward pass without gradients: its kernels launched one by one by Python, or recorded once and replayed.

Recorded is one shape, after the model has computed it a few times; any other shape is launched. A replay does what the
pass did when it was recorded, on the same memory. So it is compared with launched passes before it counts, and a model
that does anything beside its kernels (waits, draws on the host, counts) is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import NotRecorded, StepRecorder
from trainer.errors import is_out_of_memory, text_of
from trainer.models.equivalence import NOISE, distance
from trainer.models.host_state import changed_on_the_host, held_tensors, host_state, own_hook, settings
from trainer.models.undisturbed import undisturbed

WARM = 3  # passes of a shape before it is recorded
PAYS = 36  # passes of a shape from which on a recording, which takes some more of them, gains
Forward = Callable[[Tensor], Tensor | None]


class ReplayedForward:
    """Calls `forward`, or replays it. Of one thread at a time."""

    def __init__(
        self,
        forward: Forward,
        modules: Sequence[nn.Module],
        device: torch.device,
        wanted: bool,
        say: Callable[[str], None],
        warm: int = WARM,
    ) -> None:
        """
        Args:
            forward: from inputs (N, ...) to outputs (N, ...) on `device`, by `modules`.
            wanted: False: every pass is launched.
            say: prints why passes are launched where recordings are wanted; called once.
            warm: passes of a shape in a row before it is recorded.
        """
        self._forward, self._modules, self._device, self._say, self._warm = forward, modules, device, say, warm
        self._launches = not (wanted and cuda_graphs.possible(device))  # for good
        self._paying = True
        self._recorder: StepRecorder | None = None
        self._shape: object = None  # of what is recorded, or of the last pass
        self._seen = 0  # passes of it
        self._replay: Callable[[], None] | None = None
        self._inputs, self._outputs = torch.empty(0), torch.empty(0)  # the recorded ones
        self._fitting: object = None

    def begin(self, batches: int) -> None:
        """So many passes follow. A recording stays if weights and modules are as they were and where they were."""
        self._paying = batches >= PAYS
        if self._replay is not None and self._fitting != self._as_it_is():
            self.close()

    def __call__(self, inputs: Tensor) -> Tensor | None:
        """The outputs, which are the caller's own."""
        shape = inputs.shape, inputs.stride(), inputs.dtype
        if self._replay is not None and shape == self._shape:
            return self._replayed(inputs)
        if self._launches or self._replay is not None or not self._paying:
            return self._launched(inputs)
        self._seen = self._seen + 1 if shape == self._shape else 1
        self._shape = shape
        if self._seen <= self._warm:
            with self._aside():
                return self._forward(inputs)
        try:
            self._record(inputs)
            return self._replayed(inputs)
        except Exception as error:  # the model's code may raise anything
            if not isinstance(error, NotRecorded) and not is_out_of_memory(error):
                raise
            reason = text_of(error).partition("\n")[0]
        self._give_up(reason)  # not within the handler, whose traceback holds memory
        return self._forward(inputs)

    def close(self) -> None:
        """Give the recording's memory back. Later passes are recorded anew."""
        self._replay, self._shape, self._seen = None, None, 0
        self._inputs, self._outputs = torch.empty(0), torch.empty(0)
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _aside(self) -> AbstractContextManager[None]:
        if self._recorder is None:
            self._recorder = cuda_graphs.StepRecorder(self._device)
        return self._recorder.aside()

    def _replayed(self, inputs: Tensor) -> Tensor:
        assert self._replay is not None
        self._inputs.copy_(inputs, non_blocking=True)
        self._replay()
        return self._outputs.clone()  # the next replay writes there

    def _launched(self, inputs: Tensor) -> Tensor | None:
        """Where memory does not suffice beside the recording, without that."""
        try:
            return self._forward(inputs)
        except Exception as error:
            if self._replay is None or not is_out_of_memory(error):
                raise
        self._give_up("memory does not suffice beside the recording")
        return self._forward(inputs)

    def _give_up(self, reason: str) -> None:
        self._launches = True
        self.close()
        self._say(f"  graphs: forward passes without gradients are launched kernel by kernel: {reason}")

    def _record(self, inputs: Tensor) -> None:
        """Raises NotRecorded; nothing was computed."""
        assert self._recorder is not None
        if (hook := own_hook(self._modules)) is not None:
            raise NotRecorded(f"a {hook} would not be called by a replay")
        with self._recorder.aside():
            launched = self._trial(lambda: self._forward(inputs), watched=True)
        own = inputs.clone()  # of the same strides
        with undisturbed(self._modules, self._device, weights=True):  # its Python runs in it
            replay, outputs = self._recorder.record(lambda: self._forward(own))
        assert outputs is not None

        def again() -> Tensor:
            own.copy_(inputs)
            replay()
            return outputs

        found = self._trial(again)
        far = {name: apart for name, value in launched.items() if (apart := distance(value, found[name]))}
        if far:
            other = self._trial(again)
            for name, apart in far.items():
                if not apart <= NOISE * distance(found[name], other[name]):
                    raise NotRecorded(f"replayed, {name} is {apart:.2g} of its norm apart")
        self._inputs, self._outputs, self._replay, self._fitting = own, outputs, replay, self._as_it_is()

    def _trial(self, work: Forward | Callable[[], Tensor | None], watched: bool = False) -> dict[str, Tensor]:
        """Outputs of a pass, and what it leaves on the device, as copies; nothing of it stays. By names."""
        assert self._recorder is not None
        with undisturbed(self._modules, self._device, weights=True):
            before = self._on_the_host()
            watch: AbstractContextManager[list[str]] = self._recorder.rehearsal() if watched else nullcontext([])
            with watch as waits:
                outputs = work()  # type: ignore[call-arg]
            after = self._on_the_host()
            if waits:
                raise NotRecorded(f"the model waits for the device, in {waits[0]}")
            if (changed := changed_on_the_host(before, after)) is not None:
                raise NotRecorded(f"a pass changes {changed} on the host")
            if not isinstance(outputs, Tensor):
                raise NotRecorded(f"the model gives a {type(outputs).__name__}, not a tensor")
            return {"the output": outputs.clone()} | {
                name: tensor.clone() for name, tensor in held_tensors(self._modules).items()
            }

    def _parts(self) -> list[nn.Module]:
        return [part for module in self._modules for part in module.modules()]

    def _on_the_host(self) -> dict[str, object]:
        """What a pass may change there, where a replay changes nothing; weights with how often they were written."""
        found = host_state(self._modules, {self._device.type})
        for number, module in enumerate(self._modules):
            written = ((name, p) for name, p in module.named_parameters() if not p.is_inference())
            found |= {f"weight {name} ({number})": parameter._version for name, parameter in written}
        return found

    def _as_it_is(self) -> object:
        """What a recording was made for: it stands as long as this does."""
        weights = chain.from_iterable(module.parameters() for module in self._modules)
        addresses = [tensor.data_ptr() for tensor in (*weights, *held_tensors(self._modules).values())]
        hooks = [[*part._forward_hooks, *part._forward_pre_hooks] for part in self._parts()]
        plain = {name: value for name, value in settings(self._modules).items() if not name.startswith("mode of")}
        return addresses, hooks, plain, self._parts(), cuda_graphs.recoveries
