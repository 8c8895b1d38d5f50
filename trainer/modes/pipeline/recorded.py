"""A pipeline's pass in one process, recorded: see `training.step_graphs`.

With all stages on one device it is one graph, which forks into the stages' streams and joins them again: one launch, in
which stages overlap as they do launched.

A graph takes memory and random numbers of one device. So with each stage on a device of its own every action, that is
a stage's forward or backward pass of one micro-batch, is a graph of its stage's device. They are replayed in the order
in which they are launched otherwise, and what goes between devices is copied between them as ever, by the same edges
and events. A device's graphs follow each other, as those that share a pool of memory have to.

What a copy reads or writes belongs to the recording and is in no other use, for graphs know nothing of copies that are
still under way: from pass to pass `Edge.order_passes` orders them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.devices.cuda_graphs import StepRecorder
from trainer.modes.pipeline.orders import Action

if TYPE_CHECKING:
    from trainer.modes.pipeline.streams import StageStream, StreamPipeline


class RecordedActions:
    """A graph for each action."""

    def __init__(self, pipeline: StreamPipeline, recorder: StepRecorder, batch: Batch, weight: float) -> None:
        """`batch` is filled before each replay.

        Raises:
            NotRecorded: some action cannot be.
        """
        lanes, self.pipeline, self._targets = pipeline.lanes, pipeline, batch.targets
        self._there = batch.targets.to(lanes[-1].device, copy=True)  # the last stage's, filled anew too
        on = pipeline.begin(batch.inputs, self._there, weight)
        self._unit = on.gradients[len(lanes) - 1, 0]
        # Each action, what replays it, and for an edge what is copied and where to.
        self._actions: list[tuple[Action, Callable[[], None], tuple[Tensor, Tensor] | None]] = []
        for action in pipeline.order(len(on.targets)):
            kind, stage, m = action
            if kind == "B" and (stage, m) not in on.gradients:
                continue  # a stage that is frozen, as all before it
            lane = lanes[stage]
            replay, out = recorder.beside(lane.device).record(partial(pipeline.compute, action, on), lane.stream)
            copied = None
            if out is not None:
                moved = torch.empty_like(out.detach(), device=pipeline.edge(action).target.device)
                copied = out.detach(), moved.detach()
                pipeline.deliver(action, moved, out.requires_grad, on)
            self._actions.append((action, replay, copied))
        self._ends: list[tuple[StageStream, Callable[[], None]]] = []
        for stage, lane in enumerate(lanes):
            deferred = pipeline.deferred.get(pipeline.stages[stage])
            if deferred is not None and deferred.layers:
                self._ends.append((lane, recorder.beside(lane.device).record(deferred.commit, lane.stream)[0]))
        self._losses = on.losses
        self.loss = torch.zeros((), device=pipeline.device)

    def replay(self) -> None:
        pipeline = self.pipeline
        self._there.copy_(self._targets, non_blocking=True)
        if pipeline.context.scale:
            self._unit.copy_(pipeline.unit())
        for edge in pipeline.edges.values():
            edge.order_passes()
        with pipeline.overlapped(), pipeline.recorder.step():
            for action, replay, copied in self._actions:
                with pipeline.working(action):
                    replay()
                if copied is not None:
                    pipeline.edge(action).copy(*copied)
            for lane, replay in self._ends:
                with lane.working():
                    replay()
        self.loss.copy_(torch.stack(self._losses).sum(), non_blocking=True)
