"""Verify, while a run trains, that its devices compute correctly.

A faulty processor computes wrong numbers without an error (Hochschild et al., "Cores that don't
count", HotOS 2021; Dixit et al., "Silent Data Corruptions at Scale", arXiv:2102.11245).
"""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.errors import RecipeError, SetupError
from trainer.models.reachable import is_own
from trainer.models.undisturbed import restore_after
from trainer.optim.optimizers import name_optimizer_state
from trainer.recipe.field_types import parse_duration
from trainer.training.replicas import ROUNDING, ReplicaComparison, compute_digests
from trainer.training.state import Resolved
from trainer.training.step_evidence import collect_live_state, copy_into


class Verifier:
    """Verification of a run before some of its steps, without an effect on the training.

    Weights and optimizer state of the replicas are compared. Then a step is computed twice from the
    same state, by deterministic kernels where torch has them. Losses, gradients, and the state
    after the update must be equal to the bit.
    """

    def __init__(self, resolved: Resolved, replicas: ReplicaComparison) -> None:
        """Prepare the verification at the intervals of `verify.every`."""
        self.resolved = resolved
        self.replicas = replicas
        self.every = resolved.recipe.verify.every
        # Infinite if the interval is a number of steps.
        self._interval = parse_duration(str(self.every)) or math.inf
        self._last_time = time.monotonic()
        # Whether to verify the next step, because the time of some rank is over.
        self.is_requested = False
        self._steps = 0
        # Number of verified steps, and the number of the last one.
        self._count = 0
        self._last_step = 0

    def is_late(self) -> bool:
        """Return whether the time between two verifications is over on this rank."""
        return time.monotonic() - self._last_time >= self._interval

    def is_due(self, step: int) -> bool:
        """Return whether to verify the run before `step`. Call this before every step.

        The second step of a process is verified too, because it shows whether the kernels are
        deterministic. The first one creates the optimizer's state.
        """
        self._steps += 1
        if self.every is None or self._steps == 1:
            return False
        if self._steps == 2 or self.is_requested:
            return True
        return isinstance(self.every, int) and step % self.every == 0

    def verify(self, batches: Iterator[Batch], weight: float) -> Iterator[Batch]:
        """Verify the run before its next step. Collective.

        Args:
            batches: The micro-batches that follow.
            weight: As for `Strategy.forward_backward`.

        Returns:
            The same micro-batches.

        Raises:
            SetupError: The replicas differ, or a step was not the same twice. Raised on every rank.
            RecipeError: A pass of the model changes state that cannot be restored.
        """
        observer = self.replicas.observer
        micro_batches = [*islice(batches, self.resolved.recipe.pieces)]
        begun = time.perf_counter()
        with observer.ledger.span("verification"), observer.timer.pause():
            self._compare_replicas()
            if self._count >= 0:
                self._compare_computations(micro_batches, weight)
        self._last_time = time.monotonic()
        self.is_requested = False
        if self._count == 1:
            seconds = time.perf_counter() - begun
            observer.tracker.say(f"  verify: a step was the same twice; this took {seconds:.2g} s")
        return chain(micro_batches, batches)

    def _compare_replicas(self) -> None:
        """Compare weights and optimizer state with those of the first replica. Collective."""
        state = self.replicas.state
        world = self.resolved.world
        if not state.strategy.has_equal_weights or world.grid.size("replicas") == 1:
            return
        recipe = self.resolved.recipe
        tensors = dict[str, Tensor](state.parameters)
        if "optimizer" not in recipe.traits.per_rank_state:
            tensors |= name_optimizer_state(state.updater.optimizer, state.parameters)
        allowed = 0.0
        if recipe.clip_grad_norm is not None:
            allowed = ROUNDING
        name = self.replicas.find_difference(tensors, allowed)
        first = world.grid.ranks("replicas")[0]
        self._raise_any(name, f"has another {name} than rank {first}")

    def _compare_computations(self, micro_batches: Sequence[Batch], weight: float) -> None:
        """Compute a step twice, and compare the results. Collective."""
        recipe = self.resolved.recipe
        if self.resolved.teacher:
            micro_batches = [*map(self.resolved.teacher.teach, micro_batches)]
        try:
            first = self._compute_step(micro_batches, weight)
            second = self._compute_step(micro_batches, weight)
        except RecipeError as error:
            raise RecipeError(f"verify.every={self.every}: {error}; or verify.every=null") from None
        name = None
        for key in dict.fromkeys((*first, *second)):
            if name is None and first.get(key) != second.get(key):
                name = key
        step = self.replicas.state.position.step + 1
        if self._count == 0 and self.resolved.world.is_any(name is not None):
            self._count = -1
            self.replicas.observer.tracker.say(
                f"WARNING: verify.every={self.every}: step {step} gave another {name} when it was "
                f"computed twice: {recipe.model.name} uses kernels that are not deterministic, or "
                "a device is faulty; from now on only the replicas are compared"
            )
            return
        self._raise_any(name, f"computed another {name} when it repeated step {step}")
        self._count += 1
        self._last_step = step

    def _raise_any(self, name: str | None, fault: str) -> None:
        """Raise an error on every rank if a tensor of some rank is wrong. Collective."""
        world = self.resolved.world
        error = None
        if name is not None:
            device = str(world.device)
            if world.device.type == "cuda":
                properties = torch.cuda.get_device_properties(world.device)
                device += f" ({properties.name}, {properties.uuid})"
            verified = "nothing was verified before"
            if self._last_step:
                verified = f"step {self._last_step} was verified last"
            error = SetupError(
                f"rank {world.rank} on {device} {fault}, so a device or its memory is faulty; "
                f"{verified}: remove the checkpoints of later steps, leave the device out, and "
                "continue with resume=auto"
            )
        world.raise_any(error)

    def _compute_step(self, micro_batches: Sequence[Batch], weight: float) -> dict[str, int]:
        """Compute a step, undo it, and return digests of its results by name.

        If passes contain no collective, the gradients are those of this rank alone, so that a wrong
        one shows on which rank it was computed.
        """
        strategy = self.replicas.state.strategy
        updater = self.replicas.state.updater
        optimizer = updater.optimizer
        last = len(micro_batches) - 1
        states = {p: dict(state) for p, state in optimizer.state.items()}
        groups = [{**group} for group in optimizer.param_groups]
        live = collect_live_state(strategy, updater)
        for number, group in enumerate(groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    live[f"{key} of group {number}"] = value
        # The copy is on the host, because a GPU may not have enough memory for it.
        saved = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live.items()}
        results: dict[str, Tensor] = {}
        with restore_after(strategy.modules(), *self.resolved.world.local_devices):
            try:
                with _deterministic(self.resolved.recipe.compile):
                    for number, batch in enumerate(micro_batches):
                        sync = number == last and not strategy.has_local_passes
                        loss = self.replicas.steps.launch(batch, weight, sync)
                        results[f"loss of micro-batch {number + 1}"] = loss
                    if not strategy.has_local_passes:
                        strategy.reduce_gradients()
                    total = torch.stack([*results.values()]).sum()
                    for name, parameter in strategy.named_parameters().items():
                        if parameter.grad is not None:
                            results[f"gradient of {name}"] = parameter.grad
                    digests = self._digest(results)
                    # The user's own optimizer may keep state elsewhere.
                    if not is_own(type(optimizer)):
                        updater.step(total, strategy, False)
                        digests |= self._digest(collect_live_state(strategy, updater))
            finally:
                copy_into(live, saved)
                optimizer.state.clear()
                optimizer.state.update(states)
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(values)
                updater.zero_grad()
        return digests

    def _digest(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        device = self.replicas.state.strategy.gradient_device
        named = {name: tensor.to(device) for name, tensor in tensors.items() if tensor.numel()}
        return dict(zip(named, compute_digests(named.values(), device).tolist(), strict=True))


@contextmanager
def _deterministic(is_compiled: bool) -> Iterator[None]:
    """Choose deterministic kernels, unless the model would then be compiled a second time."""
    if is_compiled:
        yield
        return
    mode = torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(), torch.backends.cudnn.flags(benchmark=False):
            # An operation without a deterministic kernel warns.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
