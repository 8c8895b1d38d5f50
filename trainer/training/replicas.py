"""Compare the replicas, and stop the run before it saves weights that have diverged.

Replicas start from the same weights and apply the same gradients, so their weights stay equal, up
to rounding if gradients are clipped. A model that changes its weights in the forward pass, based on
the images of one rank, makes the replicas diverge without an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import RecipeError
from trainer.models.equivalence import Sketch, relative_error, sketch_tensors
from trainer.models.norms import buffers_besides_statistics
from trainer.training.observer import Observer
from trainer.training.state import TrainState
from trainer.training.steps import EagerSteps

# Number of elements that are multiplied at a time: few enough to fit in the CPU's cache.
CHUNK = 2**17
# Minimum number of steps of this process, and minimum seconds of the run, before gradients are
# compared. In shorter runs the comparison might take more than 0.5 % of the time.
LONG_STEPS = 1000
LONG_SECONDS = 60.0
# Allowed difference between the weights of two replicas, relative to the norm of the tensor. When
# gradients are clipped, devices may sum their norm in a different order, so that clipped gradients
# differ by rounding.
ROUNDING = 1e-3


def compute_digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return an int64 digest of each tensor's bits, on the host.

    A changed sign, or two exchanged elements, change the digest.
    """
    # The factors are odd and do not grow linearly, so that changes of several elements are unlikely
    # to cancel each other.
    factors = torch.arange(1, 2 * CHUNK, 2, device=device) ** 7
    digests = [factors[:0]]
    for tensor in tensors:
        # Elements longer than 32 bits are viewed as several 32-bit integers. Otherwise, modulo
        # 2**64, the topmost bit times any odd factor would be the same number, so two changed signs
        # would cancel each other.
        integer = getattr(torch, f"int{8 * min(4, tensor.element_size())}")
        bits = tensor.detach().reshape(-1).view(integer)
        while len(bits) > 1:
            chunks = torch.split(bits, CHUNK)
            bits = torch.stack([(chunk * factors[: len(chunk)]).sum() for chunk in chunks])
        digests.append(bits.long())
    return torch.cat(digests).cpu()


@dataclass
class ReplicaComparison:
    """Comparison of this rank's replica with the first one, at growing intervals.

    Attributes:
        state: The state of the run, which has the weights.
        observer: Timer and warnings of the run.
        steps: Computes the steps of the run.
        next: Number of steps of this process after which the replicas are compared again.
    """

    state: TrainState
    observer: Observer
    steps: EagerSteps
    next: int = 1

    def compare_again(self) -> None:
        """Compare the weights of the replicas, and in a long run also their gradients. Collective.

        Raises:
            RecipeError: Weights or gradients differ by more than rounding. Raised on every rank.
        """
        strategy = self.state.strategy
        timer = self.observer.timer
        with self.observer.ledger.span("logging"), timer.pause():
            self.compare()
            if timer.seen < LONG_STEPS:
                return
            # CUDA graphs read gradients at fixed addresses, and a pass here would move them. So
            # gradients are compared only if no rank has captured a step. The ranks decide together,
            # because each of them captures its steps and counts seconds by itself.
            is_unfit = self.steps.kind == "replayed" or self.state.seconds() < LONG_SECONDS
            if not strategy.world.is_any(is_unfit):
                strategy.check_gradients()

    def compare(self) -> None:
        """Compare digests of this rank's weights with those of the first replica. Collective.

        Raises:
            RecipeError: A weight of some rank differs by more than rounding. Raised on every rank.
        """
        # The next comparison is due when the number of steps of this process reaches the next power
        # of ten.
        self.next = 10 ** len(str(self.observer.timer.seen))
        strategy = self.state.strategy
        world = strategy.world
        if not strategy.has_equal_weights:
            return
        if strategy.share.count > 1:
            self._compare_buffers()
        if world.grid.size("replicas") == 1:
            return
        weights = strategy.named_parameters().items()
        named = {name: weight for name, weight in weights if weight.numel()}
        error = None
        if (name := self.find_difference(named, ROUNDING)) is not None:
            error = RecipeError(
                f"model.name={strategy.recipe.model.name}: after step "
                f"{self.state.position.step} rank {world.rank} has another {name} than rank "
                f"{world.grid.ranks('replicas')[0]}. Probably the forward pass writes it from "
                "the rank's own images. This step was not saved: use mode=single, or write "
                "that weight before training"
            )
        world.raise_any(error)

    def find_difference(self, named: Mapping[str, Tensor], allowed: float) -> str | None:
        """Return the name of a tensor that differs from the first replica's, if any. Collective.

        Args:
            named: Tensors of this rank by name, with the same shapes on each replica.
            allowed: Largest relative error that is no difference.
        """
        strategy = self.state.strategy
        world = strategy.world
        device = strategy.gradient_device
        tensors = {name: tensor.detach().to(device) for name, tensor in named.items()}
        digests = compute_digests(tensors.values(), device)
        first_digests = world.broadcast_(digests.clone(), "replicas")
        if not world.max_((digests != first_digests).sum()):
            return None
        found = None
        for name, tensor in tensors.items():
            first = world.broadcast_(tensor.clone(), "replicas")
            if found is None and relative_error(first, tensor) > allowed:
                found = name
        return found

    def _compare_buffers(self) -> None:
        """Warn if a buffer that passes change differs between ranks. Collective.

        The passes of each rank see other images. Rank 0's buffers replace those of the other ranks,
        so a memory bank or a codebook would learn from only a part of each batch. BatchNorm's
        statistics are left out.
        """
        strategy = self.state.strategy
        announced = self.observer.noticed.announced
        buffers: dict[str, Tensor] = {}
        for module in strategy.modules():
            buffers |= buffers_besides_statistics(module)
        first: dict[str, Sketch] = {}
        for sketches in strategy.world.gather(sketch_tensors(buffers)):
            for name, sketch in sketches.items():
                is_different = first.setdefault(name, sketch) != sketch
                if is_different and "buffers" not in announced:
                    announced.add("buffers")
                    self.observer.tracker.say(
                        f"WARNING: each rank changes the buffer {name} of "
                        f"model.name={strategy.recipe.model.name} by its own images, and rank 0's "
                        "replaces the others', so it learns from a part of each batch; use "
                        "mode=single"
                    )
