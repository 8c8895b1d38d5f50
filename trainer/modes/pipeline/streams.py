"""`pipeline` in one process: micro-batches overlap because all work of the stages is asynchronous.

One thread issues the actions of all stages, in an order in which no action waits for a later one.
Each stage has a stream on its device. Copies between neighboring stages have streams of their own,
so that a copy delays only the stage that needs it. CPU devices stand in for GPUs in tests, and run
one action at a time. The module `recorded` captures a pass in CUDA graphs.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from trainer.data import Batch
from trainer.modes.pipeline.orders import Action, compute_issue_order
from trainer.modes.pipeline.stages import Staged
from trainer.modes.pipeline.tuning import Pipe, Plan
from trainer.recipe.checks import microbatch_counts

# Number of GPU cycles to wait before each copy. Tests raise it to prove that the order of
# operations does not depend on fast copies.
delay_cycles = 0


def _make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StageStream:
    """The device of a stage, and the CUDA stream on which the stage computes (None on a CPU)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = _make_stream(device)

    def working(self) -> AbstractContextManager[object]:
        """Return a context in which operations are issued to this stage's stream.

        On a CPU the context changes nothing.
        """
        if self.stream:
            return torch.cuda.stream(self.stream)
        return nullcontext()

    def follow(self) -> None:
        """Make this stage wait for the work that was issued to the device's current stream."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """Make the device's current stream wait for the work that was issued to this stage."""
        if self.stream:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Edge:
    """Connection that copies tensors from one stage's device to that of a neighboring stage."""

    def __init__(
        self,
        source: StageStream,
        target: StageStream,
    ) -> None:
        self.source = source
        self.target = target
        if source.stream:
            # If both stages are on one device, one copy stream serves both ends: a CUDA graph
            # capture must join every stream that it forks into, and `copy` joins the second only.
            first = _make_stream(source.device)
            second = first
            if source.device != target.device:
                second = _make_stream(target.device)
            self.streams = first, second

    def copy(
        self,
        tensor: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        """Copy a tensor to the target stage, whose later operations wait for the copy.

        Args:
            tensor: a result of the source stage.
            into: memory on the target device that no operation of an earlier pass still uses (see
                `order_passes`); by default new memory.

        Returns:
            The copy, detached. On CPU devices without `into`, it shares the memory of `tensor`.
        """
        tensor = tensor.detach()
        if self.source.stream is None or self.target.stream is None:
            if into is None:
                return tensor.to(self.target.device)
            return into.copy_(tensor)
        ready = self.source.stream.record_event()
        for stream in self.streams:
            stream.wait_event(ready)
        # Both copy streams become current: torch issues a copy between devices to the current
        # stream of the source device, and a copy within a device to the innermost of these streams.
        with torch.cuda.stream(self.streams[0]), torch.cuda.stream(self.streams[1]):
            if delay_cycles:
                torch.cuda._sleep(delay_cycles)  # type: ignore[no-untyped-call]
            if into is None:
                moved = torch.empty_like(tensor, device=self.target.device)
            else:
                moved = into
            moved.copy_(tensor, non_blocking=True)
        for stream in self.streams:
            if stream.device == tensor.device:
                tensor.record_stream(stream)
        self.target.stream.wait_stream(self.streams[1])
        moved.record_stream(self.target.stream)
        return moved

    def order_passes(self) -> None:
        """Make the next pass wait before it overwrites memory that the previous pass still uses.

        The next copies wait for the target stage, which reads the memory into which they write. The
        source stage waits for the previous copies, which read the memory into which it writes.
        """
        if self.source.stream and self.target.stream:
            for stream in self.streams:
                stream.wait_stream(self.target.stream)
            self.source.stream.wait_stream(self.streams[0])


@dataclass
class UnderWay:
    """State of a mini-batch in flight. Keys of the dictionaries are (stage, micro-batch)."""

    # Targets of each micro-batch.
    targets: Sequence[Tensor]
    # Factor of the summed loss.
    weight: float
    # Input of each stage.
    received: dict[tuple[int, int], Tensor]
    # Gradient of each stage's output.
    gradients: dict[tuple[int, int], Tensor]
    # Output of each stage, kept until its backward pass. The output of the last stage is the loss.
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # Loss of each micro-batch, 0-dim, detached.
    losses: list[Tensor] = field(default_factory=list)


class StreamPipeline(Staged):
    """Stages on the devices of one process, whose actions one thread issues in 1F1B order."""

    def describe_pipe(self, rows: int) -> Pipe:
        workers = len(self.world.local_devices)
        counts = tuple(microbatch_counts(self.recipe, 1))
        return Pipe(workers, (("streams", workers),), rows, counts)

    def setup(self, model: nn.Module) -> None:
        # The streams are created once and not for each trial, because torch's allocator keeps
        # memory for every stream that ever existed.
        self.lanes = [StageStream(device) for device in self.world.local_devices]
        self.edges: dict[tuple[int, int], Edge] = {}
        for left in range(len(self.lanes) - 1):
            right = left + 1
            for source, target in ((left, right), (right, left)):
                self.edges[source, target] = Edge(self.lanes[source], self.lanes[target])
        self.order = cache(lambda microbatches: compute_issue_order(len(self.lanes), microbatches))
        super().setup(model)

    def build(self, plan: Plan) -> None:
        self.deferred.clear()
        stages = self.traced.stages(plan.cuts)
        for index, (stage, lane) in enumerate(zip(stages, self.lanes, strict=True)):
            self.stages[index] = self.prepare_stage(stage, lane.device)

    def forward_backward(
        self,
        batch: Batch,
        weight: float,
        sync: bool = True,
    ) -> Tensor:
        targets = batch.targets.to(self.lanes[-1].device, non_blocking=True)
        minibatch = self.begin(batch.inputs, targets, weight)
        with self.overlapped(), self.recorder.step():
            for action in self.order(len(minibatch.targets)):
                with self.working(action):
                    out = self.compute(action, minibatch)
                if out is not None:
                    moved = self.edge(action).copy(out)
                    self.deliver(action, moved, out.requires_grad, minibatch)
        self.commit_statistics()
        loss = torch.stack(minibatch.losses).sum()
        return loss.to(self.device, non_blocking=True)

    def begin(
        self,
        inputs: Tensor,
        targets: Tensor,
        weight: float,
    ) -> UnderWay:
        """Cut a mini-batch into micro-batches, before any action is computed.

        Args:
            inputs: inputs on the first stage's device.
            targets: targets on the last stage's device.
            weight: factor of the summed loss.
        """
        target_chunks = self._cut(targets)
        unit = self.unit()
        last = len(self.lanes) - 1
        received = {(0, m): chunk for m, chunk in enumerate(self._cut(inputs))}
        gradients = {(last, m): unit for m in range(len(target_chunks))}
        return UnderWay(target_chunks, weight, received, gradients)

    def unit(self) -> Tensor:
        """Return the gradient of the loss with respect to itself, where backward passes begin.

        The value is 1, or the loss scale of fp16, on the last stage's device.
        """
        return self.context.scale(torch.ones((), device=self.lanes[-1].device))

    def compute(
        self,
        action: Action,
        minibatch: UnderWay,
    ) -> Tensor | None:
        """Compute one action.

        Returns:
            The tensor to send to a neighboring stage: an activation for the next stage, or a
            gradient for the previous one. None if there is nothing to send.
        """
        kind, stage, m = action
        if kind == "F":
            rows = len(minibatch.targets[m])
            out = self.run_stage(self.stages[stage], minibatch.received[stage, m], rows)
            is_last = stage + 1 == len(self.lanes)
            if is_last:
                out = self.weighted_loss(out, minibatch.targets[m], minibatch.weight)
                minibatch.losses.append(out.detach())
            minibatch.sent[stage, m] = out
            return None if is_last else out
        out = minibatch.sent.pop((stage, m))
        gradient = minibatch.gradients.pop((stage, m), None)
        if gradient is not None:
            torch.autograd.backward(out, gradient)
        if stage == 0:
            return None
        # The gradient is None if all earlier stages are frozen, or if their output is detached.
        return minibatch.received.pop((stage, m)).grad

    def deliver(
        self,
        action: Action,
        moved: Tensor,
        differentiable: bool,
        minibatch: UnderWay,
    ) -> None:
        """Store the result of an action for the neighboring stage.

        Args:
            action: the action that computed the result.
            moved: copy of the result on the neighbor's device.
            differentiable: True if the result requires a gradient.
            minibatch: the mini-batch in flight.
        """
        kind, stage, m = action
        if kind == "F":
            minibatch.received[stage + 1, m] = moved.requires_grad_(differentiable)
        else:
            minibatch.gradients[stage - 1, m] = moved

    def edge(self, action: Action) -> Edge:
        """Return the edge over which the result of `action` is sent."""
        if action.kind == "F":
            return self.edges[action.stage, action.stage + 1]
        return self.edges[action.stage, action.stage - 1]

    @contextmanager
    def working(self, action: Action) -> Iterator[None]:
        """Return a context in which operations are issued to the stream of the action's stage.

        The recorder times the operations in the context as `action`.
        """
        with self.lanes[action.stage].working(), self.recorder.action(action.stage, action):
            yield

    def outputs(self, inputs: Tensor) -> Tensor:
        """Run each micro-batch through all stages, without a backward pass.

        Stages overlap on GPUs.
        """
        outputs = []
        with self.overlapped():
            for chunk in self._cut(inputs):
                for stage, lane in enumerate(self.lanes):
                    if stage:
                        chunk = self.edges[stage - 1, stage].copy(chunk)
                    with lane.working():
                        chunk = self.run_stage(self.stages[stage], chunk)
                outputs.append(chunk)
        return torch.cat(outputs).to(self.device, non_blocking=True)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Return a context in which the stages work on their own streams.

        The streams wait for work that was issued before the context, and work that is issued after
        the context waits for the streams.
        """
        for lane in self.lanes:
            lane.follow()
        yield
        for lane in self.lanes:
            lane.lead()

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut a mini-batch into micro-batches.

        With `pipeline.split_size` the last micro-batch may be smaller. Otherwise the sizes of the
        micro-batches differ by at most 1.
        """
        size = self.recipe.pipeline.split_size
        if size is not None:
            return torch.split(tensor, size)
        return tensor.tensor_split(min(self.plan.microbatches, len(tensor)))

    def split_size(self) -> int:
        size = self.recipe.pipeline.split_size
        if size is None:
            return super().split_size()
        return min(size, self.pipe.rows)

    def notes(self) -> dict[str, str]:
        notes = super().notes()
        if self.device.type != "cuda":
            notes["note"] = (
                "on CPU devices one stage works at a time: for correctness, slower than unsplit; "
                "nproc=2 overlaps stages"
            )
        return notes
