"""`pipeline` in one process: micro-batches overlap because everything that a stage does is asynchronous CUDA work.

One thread issues the actions of all stages in an order in which none waits for a later one. A stage has a stream of its
own on its device, and copies between neighbours have streams of theirs, so that a copy delays only the stage that needs
it. On CPU devices, stand-ins for tests, the same code does one action at a time. How all of it is recorded instead:
`recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from trainer.data import Batch
from trainer.devices.cuda_graphs import NotRecorded, StepRecorder
from trainer.models.partition import Traced
from trainer.modes.pipeline.orders import Action, issue_order
from trainer.modes.pipeline.recorded import RecordedActions
from trainer.modes.pipeline.stages import Staged
from trainer.modes.pipeline.tuning import Pipe, Plan
from trainer.recipe.checks import microbatch_counts

delay_cycles = 0  # of the GPU before each copy; tests raise it to show that who needs a copy waits for it


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StageStream:
    """A stage's device and the stream that the stage computes on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device) if device.type == "cuda" else None

    def working(self) -> AbstractContextManager[object]:
        """What is issued in here is this stage's work."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def follow(self) -> None:
        """Later work of this stage waits for what the device was given so far outside of it."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """Later work of the device outside of this stage waits for the stage."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Edge:
    """The way from one stage's device to a neighbour's."""

    def __init__(self, source: StageStream, target: StageStream) -> None:
        self.source, self.target = source, target
        if source.stream is not None:
            # On one device one: a recording that has forked into a stream has to join it.
            first = _stream(source.device)
            self.streams = (first, first if source.device == target.device else _stream(target.device))

    def copy(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """A detached copy on the target, whose stage waits for it; `tensor` was computed by the source's stage.

        `into`: memory on the target, which nothing uses any more that came before the pass (see `order_passes`).
        """
        tensor = tensor.detach()
        if self.source.stream is None or self.target.stream is None:
            return tensor.to(self.target.device) if into is None else into.copy_(tensor)
        ready = self.source.stream.record_event()
        for stream in self.streams:
            stream.wait_event(ready)
        # Between devices torch copies on the source's current stream, and on one device on the innermost of these.
        with torch.cuda.stream(self.streams[0]), torch.cuda.stream(self.streams[1]):
            if delay_cycles:
                torch.cuda._sleep(delay_cycles)  # type: ignore[no-untyped-call]
            moved = torch.empty_like(tensor, device=self.target.device) if into is None else into
            moved.copy_(tensor, non_blocking=True)
        for stream in self.streams:
            if stream.device == tensor.device:
                tensor.record_stream(stream)
        self.target.stream.wait_stream(self.streams[1])
        moved.record_stream(self.target.stream)
        return moved

    def order_passes(self) -> None:
        """Between passes that use the same memory: the next one's copies wait for those who read what they overwrite,
        and the source for the copies of what it computes anew."""
        if self.source.stream is not None and self.target.stream is not None:
            for stream in self.streams:
                stream.wait_stream(self.target.stream)
            self.source.stream.wait_stream(self.streams[0])


@dataclass
class UnderWay:
    """A mini-batch on its way, by stage and micro-batch."""

    targets: Sequence[Tensor]
    weight: float
    received: dict[tuple[int, int], Tensor]  # what stages compute on
    gradients: dict[tuple[int, int], Tensor]  # of what they sent
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


class StreamPipeline(Staged):
    """Stages on the devices of one process; 1F1B order, forward and backward."""

    def describe_pipe(self, rows: int) -> Pipe:
        workers = len(self.world.drives)
        return Pipe(workers, (("streams", workers),), rows, tuple(microbatch_counts(self.recipe, 1)))

    def setup(self, model: nn.Module) -> None:
        # Once for all plans that are tried: the allocator keeps memory for each stream there ever was.
        self.lanes = [StageStream(device) for device in self.world.drives]
        pairs = [(a, b) for a in range(len(self.lanes)) for b in (a - 1, a + 1) if 0 <= b < len(self.lanes)]
        self.edges = {(a, b): Edge(self.lanes[a], self.lanes[b]) for a, b in pairs}
        self.order = cache(lambda microbatches: issue_order(len(self.lanes), microbatches))
        super().setup(model)

    def build(self, traced: Traced, plan: Plan) -> None:
        self.deferred.clear()
        for index, (stage, lane) in enumerate(zip(traced.stages(plan.cuts), self.lanes, strict=True)):
            self.stages[index] = self.prepare_stage(stage, lane.device)

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        targets = batch.targets.to(self.lanes[-1].device, non_blocking=True)
        on = self.begin(batch.inputs, targets, weight)
        with self.overlapped(), self.recorder.step():
            for action in self.order(len(on.targets)):
                with self.working(action):
                    out = self.compute(action, on)
                if out is not None:
                    self.deliver(action, self.edge(action).copy(out), out.requires_grad, on)
        self.commit_statistics()
        return torch.stack(on.losses).sum().to(self.device, non_blocking=True)

    def begin(self, inputs: Tensor, targets: Tensor, weight: float) -> UnderWay:
        """Of inputs on the first stage's device and targets on the last one's; nothing is computed yet."""
        pieces, unit, last = self._pieces(targets), self.unit(), len(self.lanes) - 1
        received = {(0, m): piece for m, piece in enumerate(self._pieces(inputs))}
        return UnderWay(pieces, weight, received, {(last, m): unit for m in range(len(pieces))})

    def unit(self) -> Tensor:
        """The gradient of a loss, with which backward passes begin: 1 or fp16's scale, on the last stage's device."""
        one = torch.ones((), device=self.lanes[-1].device)
        return self.context.scale(one) if self.context.scale else one

    def compute(self, action: Action, on: UnderWay) -> Tensor | None:
        """Returns what a neighbour waits for: the next stage an activation, the one before a gradient."""
        kind, stage, m = action
        if kind == "F":
            out = self.run_stage(self.stages[stage], on.received[stage, m], len(on.targets[m]))
            last = stage + 1 == len(self.lanes)
            if last:
                out = self.weighted_loss(out, on.targets[m], on.weight)
                on.losses.append(out.detach())
            on.sent[stage, m] = out
            return None if last else out
        out, gradient = on.sent.pop((stage, m)), on.gradients.pop((stage, m), None)
        if gradient is not None:
            torch.autograd.backward(out, gradient)
        # None: the stages before are frozen, or their output is detached
        return on.received.pop((stage, m)).grad if stage else None

    def deliver(self, action: Action, moved: Tensor, differentiable: bool, on: UnderWay) -> None:
        """The neighbour has it."""
        kind, stage, m = action
        if kind == "F":
            on.received[stage + 1, m] = moved.requires_grad_(differentiable)
        else:
            on.gradients[stage - 1, m] = moved

    def edge(self, action: Action) -> Edge:
        """The way that the action's result takes."""
        return self.edges[action.stage, action.stage + (1 if action.kind == "F" else -1)]

    @contextmanager
    def working(self, action: Action) -> Iterator[None]:
        """What is issued in here is this action."""
        with self.lanes[action.stage].working(), self.recorder.action(action.stage, action):
            yield

    def record_pass(
        self, recorder: StepRecorder, batch: Batch, weight: float, sync: bool
    ) -> tuple[Callable[[], None], Tensor]:
        """As `recorded` says: one graph on one device, else one for each action."""
        devices = [lane.device for lane in self.lanes]
        if 1 < len(set(devices)) < len(devices):
            raise NotRecorded("two stages share one of several devices, and with it a stream of random numbers")
        try:
            if len(set(devices)) > 1:
                actions = RecordedActions(self, recorder, batch, weight)
                made: tuple[Callable[[], None], Tensor] = actions.replay, actions.loss
            else:
                with self.recorder.off():
                    made = super().record_pass(recorder, batch, weight, sync)
        except BaseException:
            for deferred in self.deferred.values():
                deferred.abandon()
            raise
        self.forget_figures()
        return made

    def outputs(self, inputs: Tensor) -> Tensor:
        """Forward only: micro-batch after micro-batch through all stages, which overlap on GPUs."""
        outputs = []
        with self.overlapped():
            for piece in self._pieces(inputs):
                for stage, lane in enumerate(self.lanes):
                    if stage:
                        piece = self.edges[stage - 1, stage].copy(piece)
                    with lane.working():
                        piece = self.run_stage(self.stages[stage], piece)
                outputs.append(piece)
        return torch.cat(outputs).to(self.device, non_blocking=True)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        for lane in self.lanes:
            lane.follow()
        yield
        for lane in self.lanes:
            lane.lead()

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """Micro-batches: of `split_size` images and a smaller last one, or as equal as they can be."""
        size = self.recipe.pipeline.split_size
        if size is not None:
            return torch.split(tensor, size)
        return tensor.tensor_split(min(self.plan.microbatches, len(tensor)))

    def split_size(self) -> int:
        wanted = self.recipe.pipeline.split_size
        return super().split_size() if wanted is None else min(wanted, self.pipe.rows)

    def notes(self) -> dict[str, str]:
        if self.device.type == "cuda":
            return super().notes()
        note = "on CPU devices one stage works at a time: for correctness, slower than unsplit; nproc=2 overlaps stages"
        return {**super().notes(), "note": note}
