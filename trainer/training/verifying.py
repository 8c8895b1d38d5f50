"""Verify, while a run trains, that its devices compute correctly.

A faulty processor computes wrong numbers without an error (Hochschild et al., "Cores that don't
count", HotOS 2021; Dixit et al., "Silent Data Corruptions at Scale", arXiv:2102.11245).
"""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.errors import RecipeError, SetupError
from trainer.models.reachable import is_own
from trainer.models.undisturbed import find_change, restore_after
from trainer.modes.proofs import use_deterministic_kernels
from trainer.optim.optimizers import name_optimizer_state
from trainer.recipe.field_types import parse_duration
from trainer.training.replicas import ROUNDING, ReplicaComparison, compute_digests
from trainer.training.state import Resolved
from trainer.training.step_evidence import collect_live_state, copy_into


class Verifier:
    """Verification of a run before some of its steps, without an effect on the training.

    Weights and optimizer state of the replicas are compared. Then a step with a single micro-batch
    is computed twice from the same state, by deterministic kernels where torch has them. Loss,
    gradients, and the state after the update must be equal to the bit.
    """

    def __init__(self, resolved: Resolved, replicas: ReplicaComparison) -> None:
        """Prepare the verification at the intervals of `verify.every`."""
        self.resolved = resolved
        self.replicas = replicas
        self.every = resolved.recipe.verify.every
        # Infinite if the interval is a number of steps.
        self._interval = parse_duration(str(self.every)) or math.inf
        self._last_time = time.monotonic()
        # Whether to verify before the next step, because the interval is over on some rank.
        self.is_requested = False
        self._computes_twice = True
        # Last step after which the run was verified, or None.
        self._last_step: int | None = None

    def is_late(self) -> bool:
        """Return whether the time between two verifications is over on this rank."""
        return time.monotonic() - self._last_time >= self._interval

    def is_due(self, step: int) -> bool:
        """Return whether to verify the run before `step`."""
        return self.is_requested or (isinstance(self.every, int) and step % self.every == 0)

    def verify(self, batch: Batch, weight: float) -> None:
        """Verify the run before its next step. Collective.

        Args:
            batch: The first micro-batch of the step.
            weight: As for `Strategy.forward_backward`.

        Raises:
            SetupError: The replicas differ, or a step was not the same twice. Raised on every rank.
            RecipeError: A pass of the model changes state that cannot be restored.
        """
        observer = self.replicas.observer
        begun = time.monotonic()
        self.resolved.world.heartbeat()
        with observer.ledger.span("verification"), observer.timer.pause():
            self._compare_replicas()
            if self._computes_twice:
                self._compare_computations(batch, weight)
        self._last_time = time.monotonic()
        self.is_requested = False
        if self._last_step is None and self._computes_twice:
            seconds = self._last_time - begun
            observer.tracker.say(
                f"  verify: a step gave identical results twice, which took {seconds:.2g} s"
            )
        self._last_step = self.replicas.state.position.step

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
        # Different processors round differently.
        kind = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
        if world.device.type == "cuda":
            kind = torch.cuda.get_device_name(world.device)
        kinds = world.broadcast_object(world.gather(kind))
        allowed = 0.0
        if recipe.clip_grad_norm is not None or len(set(kinds)) > 1:
            allowed = ROUNDING
        name = self.replicas.find_difference(tensors, allowed)
        first = world.grid.ranks("replicas")[0]
        self._raise_any(
            name
            and f"{name} differs from that of rank {first}: one of the two devices is faulty, "
            "or the forward pass writes it from the rank's own images"
        )

    def _compare_computations(self, batch: Batch, weight: float) -> None:
        """Compute a step twice, and compare the results. Collective."""
        world = self.resolved.world
        step = self.replicas.state.position.step + 1
        name = self._find_difference(batch, weight)
        if not world.is_any(name is not None):
            return
        # If the kernels are not deterministic, a second attempt gives different results, too.
        if world.is_any(self._find_difference(batch, weight) is not None):
            self._computes_twice = False
            self.replicas.observer.tracker.say(
                f"WARNING: verify.every={self.every}: step {step} gave different results each time "
                f"it was computed ({name or 'on another rank'}): its kernels are not "
                "deterministic, or a device is faulty; from now on only replicas are compared"
            )
            return
        self._raise_any(
            name
            and f"{name} was different when step {step} was computed twice: the device or its "
            "memory is faulty, or that of a rank whose results it received"
        )

    def _find_difference(self, batch: Batch, weight: float) -> str | None:
        """Return the name of a result that differs between two computations, if any. Collective."""
        world = self.resolved.world
        try:
            first = world.all_or_none(lambda: self._compute_step(batch, weight))
            second = world.all_or_none(lambda: self._compute_step(batch, weight))
        except RecipeError as error:
            raise RecipeError(f"verify.every={self.every}: {error}; or verify.every=null") from None
        return find_change(first, second)

    def _raise_any(self, fault: str | None) -> None:
        """Raise an error on every rank if there is a fault on some rank. Collective."""
        world = self.resolved.world
        error = None
        if fault is not None:
            devices = []
            for device in world.local_devices:
                name = str(device)
                if device.type == "cuda":
                    properties = torch.cuda.get_device_properties(device)
                    name += f" {properties.name} {getattr(properties, 'uuid', '')}"
                devices.append(name)
            verified = "not verified before, so delete all checkpoints"
            if self._last_step is not None:
                verified = f"last verified after step {self._last_step}: delete later checkpoints"
            error = SetupError(
                f"rank {world.rank} ({', '.join(devices)}): {fault}. The run was {verified}, leave "
                "the device out, and resume with resume=auto"
            )
        world.raise_any(error)

    def _compute_step(self, batch: Batch, weight: float) -> dict[str, int]:
        """Compute a step, undo it, and return digests of its results by name.

        If passes contain no collective, the gradients are those of this rank alone, so that a wrong
        one shows on which rank it was computed.
        """
        strategy = self.replicas.state.strategy
        updater = self.replicas.state.updater
        optimizer = updater.optimizer
        watch = strategy.forward_watch
        strategy.forward_watch = None
        # A replay of the previous step keeps its gradients.
        updater.zero_grad()
        states = {p: dict(state) for p, state in optimizer.state.items()}
        groups = [{**group} for group in optimizer.param_groups]
        live = collect_live_state(strategy, updater)
        for number, group in enumerate(groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    live[f"{key} of group {number}"] = value
        # The copy is on the host, because a GPU may not have enough memory for it.
        saved = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live.items()}
        with (
            use_deterministic_kernels(),
            restore_after(strategy.modules(), *self.resolved.world.local_devices),
        ):
            try:
                is_local = strategy.has_local_passes
                loss = self.replicas.steps.launch(batch, weight, sync=not is_local)
                if not is_local:
                    strategy.reduce_gradients()
                results = {"loss": loss}
                for name, parameter in strategy.named_parameters().items():
                    if parameter.grad is not None:
                        results[f"gradient of {name}"] = parameter.grad
                digests = _digest(results)
                # An optimizer class of the user may have state that is not restored here.
                if not is_own(type(optimizer)):
                    updater.step(loss, strategy, False)
                    digests |= _digest(collect_live_state(strategy, updater))
            finally:
                copy_into(live, saved)
                optimizer.state.clear()
                optimizer.state.update(states)
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(values)
                updater.zero_grad()
                strategy.forward_watch = watch
        return digests


def _digest(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    digests: dict[str, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        named = {n: t for n, t in tensors.items() if t.device == device and t.numel()}
        digests |= zip(named, compute_digests(named.values(), device).tolist(), strict=True)
    return digests
