"""A training step on the device: its kernels launched one by one by Python, or recorded once and replayed.

Recorded are what has hundreds of kernels: a micro-batch's forward and backward pass (the first of a step, and one that
adds to its gradients, where there are several), and the optimizer's part, from the finite check to the new weights.
What changes with the step's number stays outside, or is a tensor: inputs, learning rate, moving average. So do
communication, timers and everything that ranks agree on. The first steps are computed as ever: they choose kernels,
compile, and take memory. Recording computes nothing; the step that records goes on with the first replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import NotRecorded, StepRecorder
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import LearningRates
from trainer.recipe import Recipe

Made = TypeVar("Made")
WARM = 4  # steps of a process before the first that is recorded
TIMED = 12  # steps of each kind that graphs=auto compares
FASTER = 1.03  # times that replayed ones have to be, for the memory that they take
VARIANTS = 4  # of a step, as micro-batches of unequal size need them


@dataclass
class RecordedPass:
    """A recorded forward and backward pass."""

    inputs: Tensor
    targets: Tensor
    loss: Tensor
    replay: Callable[[], None]


@dataclass
class RecordedUpdate:
    """The recorded optimizer's part, and the gradient's norm where it has one."""

    norm: Tensor | None
    replay: Callable[[], None]


class Steps:
    """What a step has on the device, as the loop asks for it."""

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        updater: Updater,
        optimizer: torch.optim.Optimizer,
        say: Callable[[str], None],
    ) -> None:
        self.strategy, self.updater, self.optimizer, self._say = strategy, updater, optimizer, say
        self.auto = recipe.graphs == "auto"
        self.recorder: StepRecorder | None = self._recorder(recipe)
        self.rates = LearningRates(optimizer, strategy.home if self.recorder else None)
        self.warm = WARM + TIMED * self.auto
        self._seen = self._micro = 0
        self._loss = torch.zeros((), device=strategy.device)  # that the optimizer's part looks at
        self._passes: dict[Hashable, RecordedPass] = {}
        self._updates: dict[Hashable, RecordedUpdate] = {}
        self._gradients: dict[Hashable, list[Tensor | None]] = {}
        self._home: Hashable = None  # the first pass of this step, whose gradients all others use
        self._addresses: list[int] = []
        self._moments: list[Any] = []

    def _recorder(self, recipe: Recipe) -> StepRecorder | None:
        """None where steps are not to be recorded."""
        world, refused = self.strategy.world, "graphs" in recipe.traits.refuses
        several = world.size > 1 and (recipe.tolerated or (self.auto and recipe.traits.exchanges == "gradients"))
        no = recipe.graphs is False or refused or several or not cuda_graphs.possible(self.strategy.device)
        return None if no else cuda_graphs.recorder(self.strategy.device)

    # The loop's calls, in this order.

    def check(self) -> None:
        """Between epochs, evaluations and saves: what was recorded is for tensors that are where they were."""
        if self._passes and self._where() != self._addresses:
            self._say("  graphs: weights or optimizer have moved in memory; the step is recorded anew")
            self._forget()

    def begin(self, lr: float) -> None:
        self.rates.set(lr)
        self._micro = 0

    def forward_backward(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        """As the strategy's; the result is the caller's own."""
        first, self._micro = self._micro == 0, self._micro + 1
        if self.recording:
            try:
                return self._replayed_pass(batch, weight, sync, first)
            except NotRecorded as reason:
                self._give_up(f"it cannot be recorded: {reason}")
        return self._ready(lambda: self._pass(batch, weight, sync, first))

    def update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        """Reduced gradients to new weights; the gradient's norm before clipping, where it is clipped or wanted."""
        self._seen += 1
        if self.recording_now:
            try:
                norm = self._replayed_update(loss, want_norm)
                self._note()
                return norm
            except NotRecorded as reason:
                self._give_up(f"it cannot be recorded: {reason}")
        norm = self._ready(lambda: self.updater.step(loss, self.strategy, want_norm))
        self.optimizer.zero_grad()
        self._note()
        return norm

    # How.

    @property
    def recording(self) -> bool:
        return self.recorder is not None and self._seen >= self.warm

    @property
    def recording_now(self) -> bool:
        """In the step that has just been counted."""
        return self.recorder is not None and self._home is not None

    def _ready(self, work: Callable[[], Made]) -> Made:
        """Computed at once; before a recording, where it will be made, and the last time watched for waits."""
        if self.recorder is None:
            return work()
        with self.recorder.aside():
            if self._seen < self.warm - 1:
                return work()
            with self.recorder.rehearsal() as waits:
                made = work()
        if waits:
            self._give_up(f"it waits for the device, in {waits[0]}")
        return made

    def _pass(self, batch: Batch, weight: float, sync: bool, first: bool) -> Tensor:
        if first:
            self.updater.begin(self.strategy)
        return self.strategy.forward_backward(batch, weight, sync)

    def _replayed_pass(self, batch: Batch, weight: float, sync: bool, first: bool) -> Tensor:
        own = tuple((part.shape, part.stride(), part.dtype) for part in (batch.inputs, batch.targets))
        key = own if first else (self._home, own)
        if key not in self._passes:
            self._record_pass(key, batch, weight, sync, first)
        if first and key != self._home:
            self._home = key
            for parameter, gradient in zip(self.updater.parameters, self._gradients[key], strict=True):
                parameter.grad = gradient
        kept = self._passes[key]
        kept.inputs.copy_(batch.inputs, non_blocking=True)
        kept.targets.copy_(batch.targets, non_blocking=True)
        with self.strategy.watched_forward():
            kept.replay()
        return kept.loss.clone()  # the next replay writes there

    def _record_pass(self, key: Hashable, batch: Batch, weight: float, sync: bool, first: bool) -> None:
        assert self.recorder is not None
        if len(self._passes) >= VARIANTS:
            raise NotRecorded("micro-batches have too many shapes")
        inputs, targets = batch.inputs.clone(), batch.targets.clone()  # of the same strides
        if first:
            self.optimizer.zero_grad()  # this pass makes gradients of its own, whose memory stays
            self._home = None
        watch, self.strategy.forward_watch = self.strategy.forward_watch, None  # events of a recording tell no time
        held = [(part, dict(part._buffers)) for part in self.strategy.module.modules()]
        try:
            replay, loss = self.recorder.record(
                lambda: self._pass(Batch(inputs, targets, batch.count), weight, sync, first)
            )
            for part, buffers in held:
                if any(part._buffers.get(name) is not buffer for name, buffer in buffers.items()):
                    raise NotRecorded(f"{type(part).__name__} replaces a buffer by another, which a replay would not")
        except NotRecorded:
            for part, buffers in held:
                part._buffers.update(buffers)
            if first:
                self.optimizer.zero_grad()
            raise
        finally:
            self.strategy.forward_watch = watch
        self._passes[key] = RecordedPass(inputs, targets, loss, replay)
        if first:
            self._gradients[key] = [parameter.grad for parameter in self.updater.parameters]
        self._addresses = self._where()

    def _replayed_update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        assert self.recorder is not None
        if self._home not in self._updates:
            replay, norm = self.recorder.record(lambda: self.updater.step(self._loss, self.strategy, False))
            self._updates[self._home] = RecordedUpdate(norm, replay)
        kept = self._updates[self._home]
        self._loss.copy_(loss)
        kept.replay()
        if not want_norm:
            return None
        # Gradients are as the optimizer has found them, up to the next step.
        return self.strategy.grad_norm() if kept.norm is None else kept.norm.clone()

    def _where(self) -> list[int]:
        """Addresses of all that a recorded step reads and changes beside its own memory."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.updater.parameters, *self.strategy.named_buffers().values(), *state]
        own = [self.updater.nonfinite, self.updater.bad, *self.updater.state().values(), *self.rates.tensors.values()]
        return [tensor.data_ptr() for tensor in (*tensors, *own) if isinstance(tensor, Tensor)]

    def _note(self) -> None:
        """Where graphs=auto: go on in the faster way, once both have been timed."""
        if not self.auto or self.recorder is None:
            return
        self._moments.append(self.recorder.now())
        eager, replayed = self._moments[WARM - 1 : self.warm], self._moments[self.warm + 1 :]
        if len(replayed) <= TIMED:
            return
        launched, played = (
            median(cuda_graphs.seconds_between(a, b) for a, b in pairwise(part))
            for part in (eager, replayed)
        )
        self._moments.clear()
        self.auto = False
        if launched < FASTER * played:
            self.optimizer.zero_grad()
            self._give_up(f"a replayed step takes {1e3 * played:.3g} ms, launched ones {1e3 * launched:.3g} ms")
        else:
            self._say(f"  graphs: a replayed step takes {1e3 * played:.3g} ms in place of {1e3 * launched:.3g} ms")

    def _give_up(self, reason: str) -> None:
        """From here on Python launches every kernel, in the middle of a step too: its gradients are where they were."""
        self._say(f"  graphs: the step is launched kernel by kernel: {reason}")
        self._forget()
        assert self.recorder is not None
        self.recorder.close()
        self.recorder = None

    def _forget(self) -> None:
        self._passes.clear()
        self._updates.clear()
        self._gradients.clear()
        self._home = None
