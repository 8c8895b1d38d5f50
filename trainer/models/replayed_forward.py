"""Run a model's forward pass without gradients eagerly, or replay it as a CUDA graph.

The pass for one input shape is captured, after a few eager passes. All other shapes run eagerly. A
replay repeats the kernels of the captured pass on the same memory, so before a graph is used, the
outputs of a replay are compared with those of an eager pass. A model that also acts on the host
(waits for the device, draws random numbers, counts passes) runs eagerly.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import NotCapturable, StepRecorder
from trainer.errors import is_out_of_memory, read_text
from trainer.models.equivalence import NOISE, relative_error
from trainer.models.host_state import (
    find_own_hook,
    list_held_tensors,
    read_host_state,
    read_settings,
)
from trainer.models.undisturbed import find_change, restore_after

# Number of consecutive eager passes of a shape before it is captured.
WARMUP_PASSES = 3
# Passes are captured only if `begin` announces at least this number. For fewer passes, a capture
# takes longer than it saves.
MIN_PASSES = 36
Forward = Callable[[Tensor], Tensor | None]


class ReplayedForward:
    """Callable that runs `forward` or replays it. It must be called from one thread."""

    def __init__(
        self,
        forward: Forward,
        modules: Sequence[nn.Module],
        device: torch.device,
        wanted: bool,
        say: Callable[[str], None],
        warm: int = WARMUP_PASSES,
    ) -> None:
        """Prepare without capturing anything.

        Args:
            forward: Computes outputs (N, ...) from inputs (N, ...) on `device`.
            modules: The modules that `forward` runs.
            device: The device of inputs and outputs.
            wanted: Whether to capture passes. If False, all passes run eagerly.
            say: Prints why passes run eagerly although `wanted` is True. It is called at most once.
            warm: Number of consecutive eager passes of a shape before it is captured.
        """
        self._forward = forward
        self._modules = modules
        self._device = device
        self._say = say
        self._warm = warm
        # True if passes are never captured. Once it is True, it stays True.
        self._is_eager = not (wanted and cuda_graphs.has_cuda_graphs(device))
        self._is_paying = True
        self._recorder: StepRecorder | None = None
        # The captured shape, or the shape of the last pass if nothing is captured, and the number
        # of consecutive passes with this shape.
        self._shape: object = None
        self._passes = 0
        # Replays the pass for the given inputs, and returns the outputs, which the next replay
        # overwrites.
        self._replay: Callable[[Tensor], Tensor] | None = None
        self._fingerprint: object = None

    def begin(self, batches: int) -> None:
        """Prepare for `batches` passes.

        Fewer than `MIN_PASSES` passes are not captured, but may replay an earlier capture. A
        captured pass is kept if the modules, their attributes and hooks, and the memory addresses
        of their tensors are still the same. Weights may have other values, because a replay reads
        the current ones.
        """
        self._is_paying = batches >= MIN_PASSES
        if self._replay is not None and self._fingerprint != self._read_fingerprint():
            self.close()

    def __call__(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs. Later calls do not overwrite them."""
        shape = inputs.shape, inputs.stride(), inputs.dtype
        if self._replay is not None and shape == self._shape:
            return self._run_replay(inputs)
        if self._is_eager or self._replay is not None or not self._is_paying:
            return self._run_eagerly(inputs)
        self._passes = self._passes + 1 if shape == self._shape else 1
        self._shape = shape
        if self._passes <= self._warm:
            if self._recorder is None:
                self._recorder = cuda_graphs.StepRecorder(self._device)
            with self._recorder.use_side_stream():
                return self._forward(inputs)
        try:
            self._capture(inputs)
            return self._run_replay(inputs)
        except Exception as error:
            # The model's code may raise any error.
            if not isinstance(error, NotCapturable) and not is_out_of_memory(error):
                raise
            reason = read_text(error).partition("\n")[0]
        # Run the pass again outside the handler, in which the traceback would keep device memory
        # alive.
        self._give_up(reason)
        return self._forward(inputs)

    def close(self) -> None:
        """Release the graph's memory. Later passes may be captured again."""
        self._replay = None
        self._shape = None
        self._passes = 0
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _run_replay(self, inputs: Tensor) -> Tensor:
        assert self._replay is not None
        return self._replay(inputs).clone()

    def _run_eagerly(self, inputs: Tensor) -> Tensor | None:
        """Run a pass eagerly. If memory runs out, release the graph and run the pass again."""
        try:
            return self._forward(inputs)
        except Exception as error:
            if self._replay is None or not is_out_of_memory(error):
                raise
        self._give_up("memory does not suffice for eager passes next to the graph")
        return self._forward(inputs)

    def _give_up(self, reason: str) -> None:
        self._is_eager = True
        self.close()
        self._say(
            f"  graphs: forward passes without gradients are launched kernel by kernel: {reason}"
        )

    def _capture(self, inputs: Tensor) -> None:
        """Capture a pass and compare its replay with an eager pass.

        Raises:
            NotCapturable: The pass cannot be captured, or its replay computes other outputs. The
                state of the modules is restored.
        """
        recorder = self._recorder
        assert recorder is not None
        if (hook := find_own_hook(self._modules)) is not None:
            raise NotCapturable(f"a {hook} would not be called by a replay")
        with recorder.use_side_stream():
            expected = self._run_trial(lambda: self._forward(inputs), recorder.collect_waits())
        # The clone has the strides of the inputs, for which the pass is captured.
        own_inputs = inputs.clone()
        # The capture runs the model's Python code, which may change host state.
        with restore_after(self._modules, self._device, weights=True):
            replay, outputs = recorder.record(lambda: self._forward(own_inputs))
        assert outputs is not None

        def replay_with(inputs: Tensor) -> Tensor:
            own_inputs.copy_(inputs, non_blocking=True)
            replay()
            return outputs

        replayed = self._run_trial(lambda: replay_with(inputs), nullcontext([]))
        distances = {}
        for name, tensor in expected.items():
            if distance := relative_error(tensor, replayed[name]):
                distances[name] = distance
        if distances:
            # Two replays also differ if a kernel adds numbers up in a random order.
            again = self._run_trial(lambda: replay_with(inputs), nullcontext([]))
            for name, distance in distances.items():
                if not distance <= NOISE * relative_error(replayed[name], again[name]):
                    raise NotCapturable(f"replayed, {name} is {distance:.2g} of its norm apart")
        self._replay = replay_with
        self._fingerprint = self._read_fingerprint()

    def _run_trial(
        self,
        work: Callable[[], Tensor | None],
        rehearsal: AbstractContextManager[list[str]],
    ) -> dict[str, Tensor]:
        """Run and undo a pass.

        Args:
            work: Computes the outputs.
            rehearsal: Context that lists where the host waited for the device.

        Returns:
            Copies of the outputs, and of the tensors that the pass may have changed, under the
            names that messages use.

        Raises:
            NotCapturable: The pass has effects that a replay would not have.
        """
        with restore_after(self._modules, self._device, weights=True):
            before = self._read_host_state()
            with rehearsal as waits:
                outputs = work()
            after = self._read_host_state()
            if waits:
                raise NotCapturable(f"the model waits for the device, in {waits[0]}")
            if (name := find_change(before, after)) is not None:
                raise NotCapturable(f"a pass changes {name} on the host")
            if not isinstance(outputs, Tensor):
                raise NotCapturable(f"the model returns a {type(outputs).__name__}, not a tensor")
            copies = {"the output": outputs.clone()}
            for name, tensor in list_held_tensors(self._modules).items():
                copies[name] = tensor.clone()
            return copies

    def _read_host_state(self) -> dict[str, object]:
        """Return the state that an eager pass may change on the host, but a replay does not change.

        For each weight, the state is the number of times that it was written.
        """
        state = read_host_state(self._modules, {self._device.type})
        for number, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                # Inference tensors have no version, so it is not known whether they were written.
                if not parameter.is_inference():
                    state[f"weight {name} ({number})"] = parameter._version
        return state

    def _read_fingerprint(self) -> object:
        """Return the state on which the captured pass depends, to compare it with a later state."""
        tensors: list[Tensor] = []
        parts: list[nn.Module] = []
        for module in self._modules:
            tensors += module.parameters()
            parts += module.modules()
        tensors += list_held_tensors(self._modules).values()
        addresses = [tensor.data_ptr() for tensor in tensors]
        hooks = [[*part._forward_hooks, *part._forward_pre_hooks] for part in parts]
        settings = read_settings(self._modules)
        plain = {name: settings[name] for name in settings if not name.startswith("mode of")}
        return addresses, hooks, plain, parts, cuda_graphs.recoveries
