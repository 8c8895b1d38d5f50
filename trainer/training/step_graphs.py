"""Training steps that are captured as CUDA graphs once, and replayed afterwards.

Work that consists of hundreds of kernels is captured: the forward and backward pass of a
micro-batch, and the update, from the finite check to the new weights. The first micro-batch of a
step has a graph of its own, because the passes of later micro-batches add to its gradients. Values
that depend on the number of the step stay outside the graphs or are tensors: inputs, learning rate,
moving average. Timers and everything that ranks agree on stay outside too.

If ranks exchange messages in a pass, all ranks capture the same step, and either all of them replay
a step, or none does. The graphs contain the collectives of `ddp` and `fsdp`, for which NCCL
requires it: see "Using NCCL with CUDA Graphs" in its user guide. Stages in several processes send
their messages between the graphs.

The first steps are eager: they choose kernels, compile, and allocate memory. A capture computes
nothing. Then a replay repeats the last eager step from its initial state (`step_evidence`), and
only if it ends in the same state are later steps replayed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import (
    NotCapturable,
    StepRecorder,
    read_device_states,
    set_device_states,
)
from trainer.errors import RecipeError, is_out_of_memory
from trainer.memory.device import free_memory
from trainer.memory.measuring import count_bytes
from trainer.models.host_state import find_own_hook, read_host_state, read_settings
from trainer.models.undisturbed import find_change
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import LearningRates
from trainer.recipe.optimizer_table import OPTIMIZERS
from trainer.training import step_tuning
from trainer.training.replaying_ranks import NO_MEMORY, ReplayingRanks
from trainer.training.step_evidence import (
    EagerPass,
    Evidence,
    StepResult,
    collect_live_state,
    copy_list,
    copy_named,
    find_difference,
    shape_of,
)
from trainer.training.step_tuning import StepTuner
from trainer.training.steps import EagerSteps

# Number of eager steps before the capture, which captures the work of the last one. With
# graphs=auto, TIMED_STEPS more steps are eager before the capture.
WARMUP_STEPS = 4
# If this number of steps in a row cannot be captured, because their micro-batches have other shapes
# than those of the step before, or because they are not finite, all later steps are eager.
MAX_TRIES = 8
# Maximum number of copies of state and gradients that exist at the same time while a replay is
# compared with an eager step. If a device has no memory for them, nothing is captured.
MAX_COPIES = 5


@dataclass
class CapturedPass:
    """A captured forward and backward pass.

    Attributes:
        batch: Inputs and targets that the graph reads, always at the same addresses.
        weight: Factor of each sample's loss: 1 / number of images of a step.
        loss: The loss, 0-dim. Each replay overwrites it.
        replay: Replays the graph.
    """

    batch: Batch
    weight: float
    loss: Tensor
    replay: Callable[[], None]


@dataclass
class CapturedStep:
    """A captured step.

    Attributes:
        passes: Captured passes. A key is `(is_first, exchanges, shape)`: whether the pass is the
            first of a step, whether ranks exchange gradients in it, and the result of `shape_of`
            for its micro-batch.
        gradients: Gradients of the optimizer's parameters, which replays write.
        loss: Loss that the captured update reads, 0-dim, always at the same address.
        norm: Norm of the gradient, which a captured update with clipping writes. Otherwise None.
        update: Replays the update. None if updates are eager.
        made_for: The addresses and settings that the graphs depend on, under the names that
            messages use.
    """

    passes: dict[tuple[bool, bool, object], CapturedPass] = field(default_factory=dict)
    gradients: list[Tensor | None] = field(default_factory=list)
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    norm: Tensor | None = None
    update: Callable[[], None] | None = None
    made_for: dict[str, object] = field(default_factory=dict)


def _free_memory(device: torch.device) -> int:
    """Return the free bytes, including those that torch caches, which a capture releases first."""
    cached = 0
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory(device) + cached


class GraphSteps(EagerSteps):
    """Training steps that are captured after a few eager steps, and replayed afterwards.

    If a step cannot be captured, or if graphs=auto and replays are not faster, all later steps are
    eager.
    """

    def __init__(self, strategy: Strategy, updater: Updater) -> None:
        recipe = strategy.recipe
        # Captures the passes and the update. None after the run has given up captures.
        self.recorder: StepRecorder | None = cuda_graphs.StepRecorder(strategy.device)
        # A graph belongs to one device, so the update of a model on several devices is eager. So is
        # the update of an optimizer that is not fused, because it may compute with numbers on the
        # host, such as the number of steps, which a replay would not change.
        self._devices = strategy.world.local_devices
        is_fused = OPTIMIZERS[recipe.optimizer.name].fused
        self._captures_update = is_fused and len(set(self._devices)) == 1
        super().__init__(strategy, updater)
        self._say = strategy.context.say
        strategy.is_timed_by_graphs = True
        # Reason why captures were given up, or None.
        self._reason: str | None = None
        # Value of `cuda_graphs.recoveries` when the step was captured.
        self._recoveries = 0
        self._tuner: StepTuner | None = None
        self._eager_steps = WARMUP_STEPS
        if recipe.graphs == "auto":
            self._tuner = StepTuner()
            self._eager_steps += step_tuning.TIMED_STEPS
        self._step_count = 0
        self._micro_step = 0
        self._tries = 0
        self._ranks = ReplayingRanks(strategy)
        # Whether ranks that replay together meet in the next call of `capture`.
        self._will_meet = False
        # Results of `shape_of` for the micro-batches of this step so far, and of the step before.
        self._shapes: list[tuple[object, ...]] = []
        self._shapes_before: list[tuple[object, ...]] = []
        # Evidence that this step collects, or that the previous step has collected. None for steps
        # without evidence.
        self._evidence: Evidence | None = None
        self.captured: CapturedStep | None = None
        # Whether this step is replayed, from its first pass on.
        self._replays = False

    def _set_rates(self) -> None:
        on_device = self.recorder is not None and self._captures_update
        self.rates = LearningRates(
            self.updater.optimizer, self.strategy.gradient_device if on_device else None
        )

    def check(self) -> None:
        """Check that the captured step is still valid. Collective.

        The loop calls this at the start of an epoch, and after an evaluation within it.

        Its tensors must be at the same addresses, and the settings that the model reads must be the
        same. Otherwise, or if another rank has given up captures, this rank gives them up.
        """
        super().check()
        if self.captured:
            changed = find_change(self.captured.made_for, self._addresses_and_settings())
            if changed is not None:
                self._reason = f"{changed} is not as it was at the capture"
            elif self.strategy.captures_exchange and self._is_generator_replaced:
                self._reason = "the capture of an evaluation failed"
        self._follow_ranks()

    @property
    def should_capture(self) -> bool:
        """Whether the previous step should be captured now."""
        if self.strategy.captures_exchange:
            return self._will_meet
        return self._evidence is not None and self._evidence.usual

    def capture(self) -> None:
        """Capture the previous step, whose results are known, and verify the capture.

        A step that is not finite is not captured. If a capture fails, all later steps are eager.
        Collective if ranks exchange messages in passes.

        Raises:
            RecipeError: ranks exchange messages in passes, and the capture failed on one of them.
        """
        evidence = self._evidence
        self._evidence = None
        if self.strategy.captures_exchange:
            self._will_meet = False
            self._follow_ranks()
            if self.recorder is None:
                return
        is_ready = evidence is not None and evidence.usual and evidence.is_finite()
        if self._ranks.is_any(not is_ready):
            return
        assert evidence
        self._attempt(lambda: self._capture_and_compare(evidence))

    def begin(self, lr: float) -> None:
        """Begin a step with learning rate `lr`.

        Choose whether to record the step's results as `Evidence`, with which a captured graph is
        compared.
        """
        self.rates.set(lr)
        self._micro_step = 0
        if self.recorder is None:
            return
        if self.captured and self._is_generator_replaced:
            if self.strategy.captures_exchange:
                raise RecipeError(
                    "graphs=true: another capture failed, and captured steps would no longer draw "
                    "random numbers in order: set graphs=false"
                )
            self.forget()
        self._shapes_before = self._shapes
        self._shapes = []
        self._replays = False
        self._evidence = None
        if self.captured or self._step_count < self._eager_steps - 1:
            return
        # Ranks that replay together have captured the step, or given up, on all ranks or on none.
        self._will_meet = self.strategy.captures_exchange
        if self._tries < MAX_TRIES:
            self._tries += 1
            self._attempt(lambda: self._start_evidence(lr))
        else:
            self._give_up(
                f"{MAX_TRIES} steps had micro-batches of other shapes than the one before, or were "
                "not finite"
            )

    def forward_backward(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        """Compute a micro-batch, by a replay if its pass was captured.

        Later replays do not change the returned loss.
        """
        micro_step = self._micro_step
        self._micro_step = micro_step + 1
        # A pass in which ranks exchange gradients waits for the slowest of them.
        exchanges = sync and self.strategy.captures_exchange
        watch = None if exchanges else self.strategy.forward_watch
        with watch or nullcontext():
            if self.recorder is None:
                return self.launch(batch, weight, sync)
            self._shapes.append(shape_of(batch))
            captured_pass = self._find_pass(micro_step, batch, weight, sync)
            if captured_pass:
                self._replays = True
                return self._replay(captured_pass, batch, micro_step)
            if self.captured and self.strategy.captures_exchange:
                raise RecipeError(
                    "graphs=true: a micro-batch has another shape than the captured one, and ranks "
                    "must replay a step together: set graphs=false"
                )
            # The gradients of an earlier replayed step still exist, and this eager step must not
            # add to them.
            if micro_step == 0 and self.captured:
                self.updater.zero_grad()
            if self._evidence:
                return self._observed_pass(self._evidence, batch, weight, sync)
            return self.launch(batch, weight, sync)

    def launch(self, batch: Batch, weight: float, sync: bool) -> Tensor:
        if self.recorder is None:
            return super().launch(batch, weight, sync)
        with self.recorder.use_side_stream():
            return super().launch(batch, weight, sync)

    def update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        """Update the weights as `EagerSteps.update` does, by a replay if the step is replayed."""
        if self.recorder is None:
            return super().update(loss, want_norm)
        self._step_count += 1
        captured = self.captured
        if self._replays and captured and captured.update:
            captured.loss.copy_(loss)
            captured.update()
            norm = None
            if captured.norm is not None:
                norm = captured.norm.clone()
            elif want_norm:
                # Until the next step, the gradients keep the values that the optimizer has read.
                norm = self.strategy.grad_norm()
        else:
            norm = self._eager_update(loss, want_norm)
        if not self._replays:
            self.updater.zero_grad()
        self._micro_step = 0
        if self._tuner and self._step_count >= WARMUP_STEPS:
            self._choose_faster(self._tuner)
        return norm

    @property
    def kind(self) -> str:
        return "launched" if self.captured is None else "replayed"

    @property
    def might_be_faster(self) -> bool:
        return self.captured is None and self.recorder is not None

    # Eager steps.

    def _start_evidence(self, lr: float) -> None:
        """Begin to collect evidence of this eager step."""
        if (hook := find_own_hook(self.strategy.modules())) is not None:
            raise NotCapturable(f"a {hook} would not be called by a replay")
        if self.strategy.is_recompute_random:
            raise NotCapturable(
                "recompute=true restores random states for its blocks, which a capture forbids"
            )
        state = collect_live_state(self.strategy, self.updater)
        needed = MAX_COPIES * count_bytes(*self.updater.parameters, *state.values())
        free = min(map(_free_memory, self._devices))
        if needed > free:
            raise NotCapturable(
                f"the comparison with a replay needs {needed / 2**30:.2f} GiB, and "
                f"{free / 2**30:.2f} GiB are free"
            )
        self._evidence = Evidence(lr, copy_named(state))

    def _observed_pass(self, evidence: Evidence, batch: Batch, weight: float, sync: bool) -> Tensor:
        """Compute an eager pass for the evidence, and give up captures if a replay would differ."""
        assert self.recorder
        before = self._host_state()
        random_before = read_device_states(self._devices)
        with self.recorder.use_side_stream(), self.recorder.collect_waits() as waits:
            loss = self.strategy.forward_backward(batch, weight, sync)
        random = random_before, read_device_states(self._devices)
        evidence.passes.append(EagerPass(batch, weight, sync, random, loss))
        if sync:
            evidence.usual = self._shapes == self._shapes_before
        changed = find_change(before, self._host_state())
        if waits:
            self._give_up(f"the model waits for the device, in {waits[0]}")
        elif changed is not None:
            self._give_up(f"the model decides on the host: each pass changes its {changed}")
        return loss

    def _host_state(self) -> dict[str, object]:
        device_types = {device.type for device in self._devices}
        return read_host_state(self.strategy.modules(), device_types)

    def _eager_update(self, loss: Tensor, want_norm: bool) -> Tensor | None:
        evidence = self._evidence
        recorder = self.recorder
        assert recorder
        if evidence is None:
            with recorder.use_side_stream():
                return self.updater.step(loss, self.strategy, want_norm)
        evidence.gradients = copy_list([p.grad for p in self.updater.parameters])
        with recorder.use_side_stream(), recorder.collect_waits() as waits:
            norm = self.updater.step(loss, self.strategy, want_norm)
        evidence.after = copy_named(collect_live_state(self.strategy, self.updater))
        if waits and self._captures_update:
            self._give_up(f"the optimizer waits for the device, in {waits[0]}")
        return norm

    # Captured steps.

    def _capture_and_compare(self, evidence: Evidence) -> None:
        """Capture the step of the evidence, and compare its replay with the evidence.

        During the capture, the learning rate and the images differ from those of the evidence. So
        the comparison also finds a graph that has captured these values as constants.
        """
        states = read_device_states(self._devices)
        try:
            self._ranks.do(lambda: self._capture_step(evidence))
            fault = find_difference(
                evidence,
                collect_live_state(self.strategy, self.updater),
                self.strategy.recipe.precision,
                lambda: self._replay_evidence(evidence),
                self._ranks,
            )
            reason = fault and f"a replay computes another step: the {fault}"
            if self.strategy.captures_exchange:
                reason = self._ranks.share_reason(reason)
            if reason:
                raise NotCapturable(reason)
        finally:
            set_device_states(self._devices, states)

    def _follow_ranks(self) -> None:
        """Give up captures if any rank has a reason to do so. Collective.

        NCCL allows no rank to replay a step that another one computes eagerly. Besides, a rank with
        eager steps would delay the others.
        """
        reason = self._ranks.share_reason(self._reason)
        if reason is not None and self.recorder:
            self._give_up(reason)

    def _capture_step(self, evidence: Evidence) -> None:
        assert self.recorder
        captured = CapturedStep()
        self.rates.set(evidence.lr / 2)
        for micro_step, eager in enumerate(evidence.passes):
            key = self._key(micro_step, eager.batch, eager.sync)
            if key not in captured.passes:
                captured.passes[key] = self._capture_pass(eager)
            # The capture of the first pass has allocated the gradients. All replays write to that
            # memory.
            if micro_step == 0:
                captured.gradients = [parameter.grad for parameter in self.updater.parameters]
        if self._captures_update:
            captured.loss = torch.zeros_like(evidence.passes[0].loss)
            captured.update, captured.norm = self.recorder.record(
                lambda: self.updater.step(captured.loss, self.strategy, False)
            )
        captured.made_for = self._addresses_and_settings()
        self.captured = captured
        self._recoveries = cuda_graphs.recoveries

    def _capture_pass(self, eager: EagerPass) -> CapturedPass:
        assert self.recorder
        inputs = torch.zeros_like(eager.batch.inputs)
        targets = torch.zeros_like(eager.batch.targets)
        before = self._host_state()
        batch = Batch(inputs, targets, eager.batch.count)
        replay, loss = self.strategy.record_pass(self.recorder, batch, eager.weight, eager.sync)
        if (changed := find_change(before, self._host_state())) is not None:
            raise NotCapturable(f"the model decides on the host: each pass changes its {changed}")
        return CapturedPass(batch, eager.weight, loss, replay)

    def _key(self, micro_step: int, batch: Batch, sync: bool) -> tuple[bool, bool, object]:
        return micro_step == 0, sync and self.strategy.captures_exchange, shape_of(batch)

    def _find_pass(
        self, micro_step: int, batch: Batch, weight: float, sync: bool
    ) -> CapturedPass | None:
        """Return the captured pass of a micro-batch, or None if the pass must be eager."""
        captured = self.captured
        if captured is None or (micro_step > 0 and not self._replays):
            return None
        captured_pass = captured.passes.get(self._key(micro_step, batch, sync))
        if captured_pass and captured_pass.weight == weight:
            return captured_pass
        return None

    def _replay(self, captured_pass: CapturedPass, batch: Batch, micro_step: int) -> Tensor:
        captured = self.captured
        assert captured
        if micro_step == 0:
            for parameter, gradient in zip(
                self.updater.parameters, captured.gradients, strict=True
            ):
                parameter.grad = gradient
        captured_pass.batch.inputs.copy_(batch.inputs, non_blocking=True)
        captured_pass.batch.targets.copy_(batch.targets, non_blocking=True)
        captured_pass.replay()
        # Return a copy, because the next replay overwrites the static loss.
        return captured_pass.loss.clone()

    def _replay_evidence(self, evidence: Evidence) -> StepResult:
        """Replay the step of the evidence with its micro-batches and random numbers."""
        captured = self.captured
        losses = []
        has_same_draws = True
        assert captured
        self.rates.set(evidence.lr)
        for micro_step, eager in enumerate(evidence.passes):
            random_before, random_after = eager.random
            set_device_states(self._devices, random_before)
            captured_pass = captured.passes[self._key(micro_step, eager.batch, eager.sync)]
            losses.append(self._replay(captured_pass, eager.batch, micro_step))
            states = read_device_states(self._devices)
            has_same_draws &= all(map(torch.equal, states, random_after))
        if self.strategy.captures_exchange:
            self.strategy.world.heartbeat()
        # Raise this after all passes, in which other ranks may wait for messages.
        if self._ranks.is_any(not has_same_draws):
            raise NotCapturable("a replay draws more or fewer random numbers")
        self.strategy.reduce_gradients()
        gradients = self._ranks.do(lambda: copy_list(captured.gradients))
        total = torch.stack(losses).sum()
        if captured.update:
            captured.loss.copy_(total)
            captured.update()
        else:
            self.updater.step(total, self.strategy, False)
        return StepResult(losses, gradients, collect_live_state(self.strategy, self.updater))

    # The choice between eager and captured steps.

    def _choose_faster(self, tuner: StepTuner) -> None:
        """Note the end of a step, and keep the faster kind of step once both have been timed."""
        # The update of this step may have given up captures.
        if self.recorder is None:
            return
        seconds = tuner.add(self.recorder.record_event(), self._replays)
        if seconds is None:
            return
        self._tuner = None
        eager = f"{1e3 * seconds.eager:.3g} ms"
        replayed = f"{1e3 * seconds.replayed:.3g} ms"
        if seconds.eager < step_tuning.MIN_SPEEDUP * seconds.replayed:
            self._give_up(f"a replayed step takes {replayed}, a launched one {eager}")
        else:
            self._say(f"  graphs: a replayed step takes {replayed} instead of {eager}")

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NotCapturable as reason:
            self._give_up(str(reason))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._give_up(NO_MEMORY)

    def _give_up(self, reason: str) -> None:
        """Give up captures for `reason`, and compute everything from now on eagerly.

        This is possible in the middle of a step too, because its gradients stay at their addresses.
        Ranks that replay together give up in their next meeting.
        """
        self._reason = reason
        if self._will_meet:
            self._evidence = None
            return
        self._say(f"  graphs: the step is launched kernel by kernel: {reason}")
        self.forget()
        self.close()

    def forget(self) -> None:
        """Drop the captured step, because other micro-batch shapes or other parameters follow.

        A later step may be captured again, unless captures were given up. All ranks call this
        before the same step.
        """
        self.captured = None
        self._evidence = None
        self._tries = 0
        # In the middle of a step the gradients are kept, because the remaining micro-batches add to
        # them.
        if self._micro_step == 0:
            self.updater.zero_grad()

    def close(self) -> None:
        if self.recorder:
            self.recorder.close()
            self.recorder = None

    @property
    def _is_generator_replaced(self) -> bool:
        """Whether a failed capture, such as that of an evaluation, has replaced a generator.

        Graphs that were captured before would still draw from the old state.
        """
        return self._recoveries != cuda_graphs.recoveries

    def _addresses_and_settings(self) -> dict[str, object]:
        """Return the addresses and settings that a captured step depends on, by name.

        These are the addresses of all tensors that it reads or changes, except the memory of its
        graphs, and the settings that the model reads.
        """
        tensors = collect_live_state(self.strategy, self.updater)
        tensors |= {f"rate {rate}": tensor for rate, tensor in self.rates.tensors.items()}
        addresses = {f"the place of {name}": t.data_ptr() for name, t in tensors.items()}
        return addresses | read_settings(self.strategy.modules())
