"""CUDA graphs of a pipeline's pass in one process, which `training.step_graphs` replays.

If all stages are on one device, the pass is one graph, which forks into the stages' streams and
joins them again. The graph is launched once per pass, and its stages overlap as in eager steps.

Torch captures a graph with the memory pool and random generator of one device. If each stage has a
device of its own, every action (the forward or backward pass of one micro-batch on a stage) is
therefore a graph on its stage's device. The graphs are replayed in the order in which eager steps
issue the actions, and between them the same `Edge` objects copy tensors between devices. The graphs
of one device run one after another, because they share a memory pool.

The source and target of a copy are memory that only the captured pass uses. Graphs do not wait for
copies that are still running, so `Edge.order_passes` makes each pass wait for the copies of the
previous pass.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.devices.cuda_graphs import NotCapturable, StepRecorder
from trainer.modes.pipeline.orders import Action
from trainer.modes.pipeline.streams import StreamPipeline

Replay = Callable[[], None]


class RecordedActions:
    """CUDA graphs of one pass, one graph per action."""

    def __init__(
        self,
        pipeline: StreamPipeline,
        recorder: StepRecorder,
        batch: Batch,
        weight: float,
    ) -> None:
        """Capture a pass over `batch`.

        The caller writes new values into the batch's tensors before each replay.

        Raises:
            NotCapturable: some action cannot be captured.
        """
        lanes = pipeline.lanes
        self.pipeline = pipeline
        # Targets of the batch, and their copy on the last stage's device.
        self._targets = batch.targets
        self._last_targets = batch.targets.to(lanes[-1].device, copy=True)
        minibatch = pipeline.begin(batch.inputs, self._last_targets, weight)
        self._unit = minibatch.gradients[len(lanes) - 1, 0]
        # Each entry has an action, the function that replays its graph, and the (source, target) of
        # the copy that sends its result, or None instead of the pair if it sends no result.
        self._actions: list[tuple[Action, Replay, tuple[Tensor, Tensor] | None]] = []
        for action in pipeline.order(len(minibatch.targets)):
            kind, stage, m = action
            if kind == "B" and (stage, m) not in minibatch.gradients:
                # Skip this backward pass, for which there is no gradient: this stage and all stages
                # before it are frozen, or the next stage detaches its input.
                continue
            lane = lanes[stage]
            stage_recorder = recorder.get_recorder(lane.device)
            compute = partial(pipeline.compute, action, minibatch)
            replay, out = stage_recorder.record(compute, lane.stream)
            copied = None
            if out is not None:
                source = out.detach()
                moved = torch.empty_like(source, device=pipeline.edge(action).target.device)
                copied = source, moved.detach()
                pipeline.deliver(action, moved, out.requires_grad, minibatch)
            self._actions.append((action, replay, copied))
        # Updates of deferred BatchNorm statistics at the end of a pass.
        self._commits = []
        for stage, lane in enumerate(lanes):
            deferred = pipeline.deferred.get(pipeline.stages[stage])
            if deferred and deferred.layers:
                stage_recorder = recorder.get_recorder(lane.device)
                replay, _ = stage_recorder.record(deferred.commit, lane.stream)
                self._commits.append((lane, replay))
        self._losses = minibatch.losses
        self.loss = torch.zeros((), device=pipeline.device)

    def replay(self) -> None:
        pipeline = self.pipeline
        self._last_targets.copy_(self._targets, non_blocking=True)
        if pipeline.recipe.precision == "fp16":
            self._unit.copy_(pipeline.unit())
        for edge in pipeline.edges.values():
            edge.order_passes()
        with pipeline.overlapped(), pipeline.recorder.step():
            for action, replay, copied in self._actions:
                with pipeline.working(action):
                    replay()
                if copied is not None:
                    pipeline.edge(action).copy(*copied)
            for lane, replay in self._commits:
                with lane.working():
                    replay()
        self.loss.copy_(torch.stack(self._losses).sum(), non_blocking=True)


class CapturablePipeline(StreamPipeline):
    """A `StreamPipeline` whose passes can be captured in CUDA graphs."""

    def record_pass(
        self,
        recorder: StepRecorder,
        batch: Batch,
        weight: float,
        sync: bool,
    ) -> tuple[Replay, Tensor]:
        """Capture a pass: as one graph if all stages are on one device, else a graph per action."""
        devices = [lane.device for lane in self.lanes]
        if 1 < len(set(devices)) < len(devices):
            raise NotCapturable(
                "two stages share one of several devices, and with it a stream of random numbers"
            )
        captured: tuple[Replay, Tensor]
        try:
            if len(set(devices)) > 1:
                actions = RecordedActions(self, recorder, batch, weight)
                captured = actions.replay, actions.loss
            else:
                with self.recorder.off():
                    captured = super().record_pass(recorder, batch, weight, sync)
        except BaseException:
            for deferred in self.deferred.values():
                deferred.abandon()
            raise
        self.forget_figures()
        return captured
