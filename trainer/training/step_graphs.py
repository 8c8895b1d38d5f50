"""A training step on the device: its kernels launched one by one by Python, or recorded once and replayed.

Recorded are what has hundreds of kernels: a micro-batch's forward and backward pass (the first of a step, and one that
adds to its gradients, where there are several), and the optimizer's part, from the finite check to the new weights.
What changes with the step's number stays outside, or is a tensor: inputs, learning rate, moving average. So do
communication, timers and everything that ranks agree on. The first steps are launched: they choose kernels, compile,
and take memory. Recording computes nothing; what was recorded then does the last launched step again, from where that
began (`step_evidence`), and only a step that ends where that ended is replayed from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import NotRecorded, StepRecorder
from trainer.errors import is_out_of_memory
from trainer.models.host_state import changed_on_the_host, host_state, own_hook, settings
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import LearningRates
from trainer.recipe import Recipe
from trainer.recipe.checks import launched_because
from trainer.telemetry.device_memory import free_memory
from trainer.training.step_evidence import (
    Evidence,
    LaunchedPass,
    StepResult,
    copied,
    copies,
    difference,
    live_state,
    random_states,
    set_random_states,
    shape_of,
)

WARM = 4  # steps of a process before the first that is recorded
TIMED = 12  # steps of each kind that graphs=auto compares
FASTER = 1.03  # times that replayed ones have to be, for the memory that they take
TRIES = 8  # steps that may be of other shapes than the one before, until one is recorded
COPIES = 5  # of the state and of the gradients, at most, that the comparison needs for a moment


@dataclass
class RecordedPass:
    """A forward and backward pass, its memory, and what replays it."""

    inputs: Tensor
    targets: Tensor
    weight: float
    loss: Tensor
    replay: Callable[[], None]


@dataclass
class RecordedStep:
    """A step."""

    passes: dict[tuple[bool, object], RecordedPass] = field(default_factory=dict)  # by whether the first, and shape
    gradients: list[Tensor | None] = field(default_factory=list)  # of the optimizer's parameters: replays write there
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))  # that the optimizer's part looks at
    norm: Tensor | None = None  # of the gradient, where it is clipped
    update: Callable[[], None] | None = None  # None: launched
    made_for: dict[str, object] = field(default_factory=dict)  # addresses of all that is not its own, and settings


def _room(device: torch.device) -> int:
    """Free bytes, with those that torch keeps for later: a recording begins by giving them back."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return free_memory(device) + kept


class Steps:
    """What a step has on the device, as the loop asks for it."""

    def __init__(self, recipe: Recipe, strategy: Strategy, updater: Updater, say: Callable[[str], None]) -> None:
        self.recipe, self.strategy, self.updater = recipe, strategy, updater
        self.optimizer, self._say = updater.optimizer, say
        possible = cuda_graphs.possible(strategy.device) and launched_because(recipe, strategy.world.size) is None
        self.recorder: StepRecorder | None = cuda_graphs.StepRecorder(strategy.device) if possible else None
        strategy.times_passes = possible
        self._tried = possible
        self._reason: str | None = None  # why steps are launched after all
        self._recoveries = 0  # of the generators, when the step was recorded
        # Of a model on several devices the optimizer's part is launched: a graph is one device's.
        self._one_device = len(set(strategy.world.drives)) == 1
        self.rates = LearningRates(self.optimizer, strategy.home if possible and self._one_device else None)
        self.auto = recipe.graphs == "auto"
        self.warm = WARM + TIMED * self.auto
        self._seen = self._micro = self._tries = 0
        self._shapes: list[tuple[object, ...]] = []  # of this step's micro-batches so far
        self._usual: list[tuple[object, ...]] = []  # of those of the step before
        self._evidence: Evidence | None = None  # of this step, or the one before
        self.recording: RecordedStep | None = None
        self._replays = False  # in this step, from its first pass on
        self._moments: tuple[list[Any], list[Any]] = [], []  # ends of launched and of replayed steps

    # The loop's calls, in this order.

    def check(self) -> None:
        """An epoch of training begins: what was recorded is for tensors that are where they were, and for a model that
        decides as it did. Collective where several ranks may record."""
        if self._tried and self.strategy.world.size > 1:  # where a rank launches its steps it would hold up the others
            world = self.strategy.world
            reasons: list[str | None] = world.broadcast_object(world.gather(self._reason))
            for rank, reason in enumerate(reasons):
                if reason is not None and self.recorder is not None:
                    self._give_up(f"{reason} (rank {rank})")
        if self.recording is None:
            return
        if (changed := changed_on_the_host(self.recording.made_for, self._as_it_is())) is not None:
            self._give_up(f"{changed} is not as it was an epoch before")

    @property
    def due(self) -> bool:
        """Whether the step before is to be recorded now."""
        return self._evidence is not None and self._evidence.usual

    def record(self) -> None:
        """Record the step before, which counts, and nothing of this one."""
        evidence, self._evidence = self._evidence, None
        assert evidence is not None
        if evidence.is_finite():
            self._attempt(lambda: self._record(evidence))

    def begin(self, lr: float) -> None:
        """A step begins, at this learning rate."""
        self.rates.set(lr)
        self._micro = 0
        if self.recorder is None:
            return
        if self.recording is not None and self._recoveries != cuda_graphs.recoveries:
            self._forget()
        self._usual, self._shapes, self._replays, self._evidence = self._shapes, [], False, None
        if self.recording is not None or self._seen < self.warm - 1:
            return
        if self._tries < TRIES:
            self._tries += 1
            self._attempt(lambda: self._watch(lr))
        else:
            self._give_up(f"{TRIES} steps had micro-batches of other shapes than the one before, or were not finite")

    def forward_backward(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        """As the strategy's; the result is the caller's own."""
        micro, self._micro = self._micro, self._micro + 1
        with (self.strategy.forward_watch if self._tried else None) or nullcontext():
            if self.recorder is None:
                return self.strategy.forward_backward(batch, weight, sync)
            self._shapes.append(shape_of(batch))
            recorded = self._recorded(micro, batch, weight)
            if recorded is not None:
                self._replays = True
                return self._replay(recorded, batch, micro)
            if micro == 0 and self.recording is not None:  # its gradients stay as they are
                self.optimizer.zero_grad()
            if self._evidence is not None:
                return self._watched(self._evidence, batch, weight, sync)
            with self.recorder.aside():
                return self.strategy.forward_backward(batch, weight, sync)

    def update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        """Reduced gradients to new weights; the gradient's norm before clipping, where it is clipped or wanted."""
        if self.recorder is None:
            norm = self.updater.step(loss, self.strategy, want_norm)
            self.optimizer.zero_grad()
            return norm
        self._seen += 1
        recording = self.recording
        if self._replays and recording is not None and recording.update is not None:
            recording.loss.copy_(loss)
            recording.update()
            norm = None if recording.norm is None else recording.norm.clone()
            if norm is None and want_norm:  # gradients are as the optimizer has found them, up to the next step
                norm = self.strategy.grad_norm()
        else:
            norm = self._launched_update(loss, want_norm)
        if not self._replays:
            self.optimizer.zero_grad()
        self._micro = 0
        self._note()
        return norm

    @property
    def way(self) -> Literal["launched", "replayed"] | None:
        """How steps are computed by now; None on a device that has no graphs."""
        if not cuda_graphs.possible(self.strategy.device):
            return None
        return "launched" if self.recording is None else "replayed"

    @property
    def undecided(self) -> bool:
        """Whether steps are launched without that a recording was tried, as the recipe says or in a short run."""
        return self.way == "launched" and (self.recorder is not None or not self._tried)

    # Launched steps.

    def _watch(self, lr: float) -> None:
        """This step, which is launched, leaves its evidence."""
        if (hook := own_hook(self.strategy.modules())) is not None:
            raise NotRecorded(f"a {hook} would not be called by a replay")
        if self.strategy.draws_anew:
            raise NotRecorded("recompute=true puts random states back for its blocks, which a recording forbids")
        state = live_state(self.strategy, self.updater)
        gradients = sum(p.numel() * p.element_size() for p in self.updater.parameters)
        need = COPIES * (gradients + sum(tensor.numel() * tensor.element_size() for tensor in state.values()))
        if need > (free := min(map(_room, self.strategy.world.drives))):
            wanted, there = need / 2**30, free / 2**30
            raise NotRecorded(f"the comparison with a replay needs {wanted:.2f} GiB, and {there:.2f} GiB are free")
        self._evidence = Evidence(lr, copied(state))

    def _watched(self, evidence: Evidence, batch: Batch, weight: float, sync: bool) -> Tensor:
        """Launched, with an eye on what a replay would not do."""
        assert self.recorder is not None
        drives, before = self.strategy.world.drives, self._host_state()
        drawn = random_states(drives)
        with self.recorder.aside(), self.recorder.rehearsal() as waits:
            loss = self.strategy.forward_backward(batch, weight, sync)
        launched = LaunchedPass(batch, weight, sync, (drawn, random_states(drives)), loss)
        evidence.passes.append(launched)
        if sync:
            evidence.usual = self._shapes == self._usual
            evidence.gradients = copies([p.grad for p in self.updater.parameters])
        changed = changed_on_the_host(before, self._host_state())
        if waits:
            self._give_up(f"the model waits for the device, in {waits[0]}")
        elif changed is not None:
            self._give_up(f"the model decides on the host: each pass changes its {changed}")
        return loss

    def _host_state(self) -> dict[str, object]:
        return host_state(self.strategy.modules(), {device.type for device in self.strategy.world.drives})

    def _launched_update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        evidence, recorder = self._evidence, self.recorder
        assert recorder is not None
        if evidence is None:
            with recorder.aside():
                return self.updater.step(loss, self.strategy, want_norm)
        evidence.reduced = evidence.gradients
        if self.strategy.exchanges_after_passes:
            evidence.reduced = copies([p.grad for p in self.updater.parameters])
        with recorder.aside(), recorder.rehearsal() as waits:
            norm = self.updater.step(loss, self.strategy, want_norm)
        evidence.after = copied(live_state(self.strategy, self.updater))
        if waits and self._one_device:
            self._give_up(f"the optimizer waits for the device, in {waits[0]}")
        return norm

    # Recorded steps.

    def _record(self, evidence: Evidence) -> None:
        """Record a step as the one before, and have it do that once more.

        It is recorded at another learning rate and on other images, so that what remembers these is found.
        """
        drives = self.strategy.world.drives
        drawn = random_states(drives)
        try:
            self._record_step(evidence)
            state = live_state(self.strategy, self.updater)
            found = difference(evidence, state, self.recipe.precision, lambda: self._again(evidence))
            if found is not None:
                raise NotRecorded(f"a replay is another step: the {found}")
        finally:
            set_random_states(drives, drawn)

    def _record_step(self, evidence: Evidence) -> None:
        assert self.recorder is not None
        recording = RecordedStep()
        self.rates.set(evidence.lr / 2)
        for micro, launched in enumerate(evidence.passes):
            key = micro == 0, shape_of(launched.batch)
            if key not in recording.passes:
                recording.passes[key] = self._record_pass(launched)
            if micro == 0:  # it has made gradients of its own, whose memory stays
                recording.gradients = [parameter.grad for parameter in self.updater.parameters]
        if self._one_device:
            recording.loss = torch.zeros_like(evidence.passes[0].loss)
            update = self.recorder.record(lambda: self.updater.step(recording.loss, self.strategy, False))
            recording.update, recording.norm = update
        self.recording, recording.made_for = recording, self._as_it_is()
        self._recoveries = cuda_graphs.recoveries

    def _record_pass(self, launched: LaunchedPass) -> RecordedPass:
        assert self.recorder is not None
        batch = launched.batch
        inputs, targets = torch.zeros_like(batch.inputs), torch.zeros_like(batch.targets)
        before = self._host_state()
        batch = Batch(inputs, targets, batch.count)
        replay, loss = self.strategy.record_pass(self.recorder, batch, launched.weight, launched.sync)
        if (changed := changed_on_the_host(before, self._host_state())) is not None:
            raise NotRecorded(f"the model decides on the host: each pass changes its {changed}")
        return RecordedPass(inputs, targets, launched.weight, loss, replay)

    def _recorded(self, micro: int, batch: Batch, weight: float) -> RecordedPass | None:
        """The recorded pass for this one, if it can be replayed after what this step has done so far."""
        recording = self.recording
        if recording is None or (micro > 0 and not self._replays):
            return None
        found = recording.passes.get((micro == 0, shape_of(batch)))
        return found if found is not None and found.weight == weight else None

    def _replay(self, recorded: RecordedPass, batch: Batch, micro: int) -> Tensor:
        recording = self.recording
        assert recording is not None
        if micro == 0:
            for parameter, gradient in zip(self.updater.parameters, recording.gradients, strict=True):
                parameter.grad = gradient
        recorded.inputs.copy_(batch.inputs, non_blocking=True)
        recorded.targets.copy_(batch.targets, non_blocking=True)
        recorded.replay()
        return recorded.loss.clone()  # the next replay writes there

    def _again(self, evidence: Evidence) -> StepResult:
        """The step of the evidence by replays, on its own micro-batches and random numbers."""
        recording, drives, losses = self.recording, self.strategy.world.drives, list[Tensor]()
        assert recording is not None
        self.rates.set(evidence.lr)
        for micro, launched in enumerate(evidence.passes):
            set_random_states(drives, launched.random[0])
            recorded = recording.passes[micro == 0, shape_of(launched.batch)]
            losses.append(self._replay(recorded, launched.batch, micro))
            if not all(map(torch.equal, random_states(drives), launched.random[1])):
                raise NotRecorded("a replay draws another number of random numbers")
        gradients = copies(recording.gradients)
        for gradient, reduced in zip(recording.gradients, evidence.reduced, strict=True):
            if gradient is not None and reduced is not None:
                gradient.copy_(reduced)
        total = torch.stack(losses).sum()
        if recording.update is not None:
            recording.loss.copy_(total)
            recording.update()
        else:
            self.updater.step(total, self.strategy, False)
        return StepResult(losses, gradients, live_state(self.strategy, self.updater))

    # The choice.

    def _note(self) -> None:
        """Where graphs=auto: go on in the faster way, once both have been timed."""
        if not self.auto or self.recorder is None or self._seen < WARM:
            return
        moments = self._moments[self._replays]
        moments.append(self.recorder.now())
        if not self._replays or len(moments) <= TIMED + 1:
            return
        launched, replayed = (
            median(cuda_graphs.seconds_between(a, b) for a, b in pairwise(part[-TIMED - 1 :])) for part in self._moments
        )
        self._moments = [], []
        self.auto = False
        if launched < FASTER * replayed:
            self._give_up(f"a replayed step takes {1e3 * replayed:.3g} ms, a launched one {1e3 * launched:.3g} ms")
        else:
            self._say(f"  graphs: a replayed step takes {1e3 * replayed:.3g} ms in place of {1e3 * launched:.3g} ms")

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NotRecorded as reason:
            self._give_up(str(reason))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._give_up("memory does not suffice to record it")

    def _give_up(self, reason: str) -> None:
        """From here on Python launches every kernel, in the middle of a step too: its gradients are where they were."""
        self._say(f"  graphs: the step is launched kernel by kernel: {reason}")
        self._reason = reason
        self._forget()
        assert self.recorder is not None
        self.recorder.close()
        self.recorder = None

    def forget(self) -> None:
        """Micro-batches have other shapes from here on: what was recorded is recorded anew."""
        if self.recorder is not None:
            self._forget()

    def _forget(self) -> None:
        self.recording = self._evidence = None
        self._tries = 0
        if self._micro == 0:  # between two steps
            self.optimizer.zero_grad()

    def _as_it_is(self) -> dict[str, object]:
        """Addresses of all that a recorded step reads and changes beside its own memory; what a model decides by."""
        state = live_state(self.strategy, self.updater)
        rates = {f"rate {rate}": tensor for rate, tensor in self.rates.tensors.items()}
        addresses = {f"the place of {name}": tensor.data_ptr() for name, tensor in (state | rates).items()}
        return {**addresses, **settings(self.strategy.modules())}
