"""`local_sgd`: workers train independently, each on its own shard of the data, and average weights.

Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError
from trainer.memory.needs import BUCKET
from trainer.models.blocks import list_frozen_norms
from trainer.modes.base import Strategy
from trainer.modes.flattening import flatten_tensors, unflatten_into
from trainer.saving.tensor_files import Shard, StoredTensor
from trainer.telemetry.readable import format_count


class OuterSGD:
    """SGD with Nesterov momentum that makes one step at each averaging.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (arXiv:2311.08105), algorithm 1. With the outer weights x of the last averaging, the workers'
    new average w and the velocity v,

        g = x - w;   v = momentum * v + g;   x = x - lr * (g + momentum * v)

    and each worker continues from x. This is `torch.optim.SGD(nesterov=True)` on the outer gradient
    g. SlowMo (Wang et al., arXiv:1910.00643) differs: it uses plain momentum instead of Nesterov's,
    and divides g by the workers' learning rate.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: float,
        momentum: float,
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.weights: list[Tensor] = list(parameters.values())
        self._names = list(parameters)
        self.restart()

    def restart(self) -> None:
        """Make the current weights the outer weights, with zero velocities."""
        self.outer_weights = [weight.detach().clone() for weight in self.weights]
        self.velocities: list[Tensor] = []
        if self.momentum:
            self.velocities = list(map(torch.zeros_like, self.outer_weights))

    def step(self) -> None:
        """Make one step. Before the call, the weights must be the average over the workers."""
        if not self.weights:
            return
        with torch.no_grad():
            # The memory of the weights is used for the outer gradients, so that a step allocates
            # nothing.
            gradients = self.weights
            torch._foreach_neg_(gradients)
            torch._foreach_add_(gradients, self.outer_weights)
            if self.velocities:
                torch._foreach_mul_(self.velocities, self.momentum)
                torch._foreach_add_(self.velocities, gradients)
                torch._foreach_add_(gradients, self.velocities, alpha=self.momentum)
            torch._foreach_add_(self.outer_weights, gradients, alpha=-self.lr)
            torch._foreach_copy_(self.weights, self.outer_weights)

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors themselves, not copies, by the name `parameter//key`."""
        tensors = {}
        for name, outer_weight in zip(self._names, self.outer_weights, strict=True):
            tensors[f"{name}//anchor"] = outer_weight
        # The lengths may differ (strict=False): the list of velocities is empty if momentum is 0.
        for name, velocity in zip(self._names, self.velocities, strict=False):
            tensors[f"{name}//velocity"] = velocity
        return tensors


class LocalSGD(Strategy):
    """Workers with their own weights, buffers, optimizer and moving average, one on each rank.

    Weights are averaged every `local_sgd.every` steps and at the end of every epoch. Each worker is
    weighted by the fraction of an epoch's images that it trains on. Integer buffers, such as the
    counters of BatchNorm, are copied from rank 0. Optimizer states are never averaged. With
    `local_sgd.outer_lr` and `outer_momentum`, `OuterSGD` moves the trained weights towards the
    average. A single worker trains like `single`.
    """

    outer: OuterSGD | None = None

    def connect(self) -> None:
        super().connect()
        section = self.recipe.local_sgd
        if section.outer_copies and self.world.size > 1:
            named = self.named_parameters().items()
            trained = {name: parameter for name, parameter in named if parameter.requires_grad}
            self.outer = OuterSGD(trained, section.outer_lr, section.momentum)

    def retrain(self) -> None:
        if self.outer:
            raise RecipeError(
                f"model.name={self.recipe.model.name} changes what trains (requires_grad), which "
                "local_sgd.outer_lr and outer_momentum cannot follow: leave them out, or use "
                "mode=ddp"
            )

    def after_step(self, step: int) -> None:
        every = self.recipe.local_sgd.every
        self.has_equal_weights = every is not None and step % every == 0
        if self.has_equal_weights:
            weights = self._weights()
            with self.averaging:
                self._average(weights, weights)
                if self.outer:
                    self.outer.step()

    def after_epoch(self, averages: Mapping[str, Tensor]) -> None:
        tensors = [*self._weights(), *averages.values()]
        # The average is exact, because a run that is stopped here averages a second time after it
        # is resumed, which must not change the weights. For the same reason there is no outer step
        # if no worker has trained since the last outer step.
        self._average(tensors, tensors, exact=True)
        outer = self.outer
        # The comparison waits for the device, so it is made once per epoch only, not in
        # `after_step`.
        if outer and not all(map(torch.equal, outer.weights, outer.outer_weights)):
            outer.step()
        self.has_equal_weights = True

    @contextmanager
    def average_for_evaluation(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        if self.has_equal_weights and not averages:
            yield
            return
        tensors = [*self._weights(), *averages.values()]
        own_values = [tensor.detach().clone() for tensor in tensors]
        self._average(tensors, tensors, exact=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, own_values, strict=True):
                    tensor.copy_(value)

    def outer_state(self) -> dict[str, Tensor]:
        if self.outer is None:
            return {}
        return self.outer.state()

    def load_outer_state(self, saved: Mapping[str, StoredTensor]) -> None:
        if saved:
            self.scatter(saved, self.outer_state())
        elif self.outer:
            self.outer.restart()

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Shard]:
        """Return the averages of `named` over the workers as shards to save. Collective.

        The averages are copies, so that saving does not change the training.
        """
        copies = {name: torch.empty_like(tensor) for name, tensor in named.items()}
        self._average(list(named.values()), list(copies.values()), exact=True)
        return super().pieces(copies)

    def notes(self) -> dict[str, str]:
        section = self.recipe.local_sgd
        interval = "epoch"
        if section.every is not None:
            interval = format_count(section.every, "step")
        note = f"each has its own weights and optimizer; weights are averaged every {interval}"
        if self.outer:
            rates = f"lr {section.outer_lr:g}, Nesterov momentum {section.momentum:g}"
            note += f", and SGD steps to the average ({rates})"
        return {"workers": note}

    def _weights(self) -> list[Tensor]:
        """Return the tensors that differ between workers.

        Frozen tensors are not averaged, so that they keep their exact values.
        """
        frozen: set[int] = set()
        for norm in list_frozen_norms(self.module):
            frozen.update(map(id, norm.buffers()))
        weights: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        weights += [buffer for buffer in self.module.buffers() if id(buffer) not in frozen]
        return weights

    def _average(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        exact: bool = False,
    ) -> None:
        """Average tensors over the workers.

        Args:
            sources: tensors of this worker.
            targets: tensors that receive the averages; may be the sources themselves.
            exact: True to sum in float64, so that values that are equal on all ranks keep their
                exact value.
        """
        samples = self.context.samples
        start, stop = self.share.compute_span(self.recipe, samples)
        weight = (stop - start) / samples
        with torch.no_grad():
            for bucket in group_buckets(sources):
                message = flatten_tensors(sources[i] for i in bucket)
                if message.is_floating_point():
                    if exact:
                        message = message.double()
                    message = message * weight
                else:
                    message = message.long() * self.world.is_main
                # NCCL raises an error if ranks share a GPU, so such ranks exchange messages on the
                # CPU.
                if self.world.shared:
                    message = message.cpu()
                unflatten_into(self.world.sum_(message), [targets[i] for i in bucket])


def group_buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Group tensors into messages of one data type and at least `BUCKET` elements.

    Yields:
        Indices of the tensors in one message. The last message of a data type may be smaller.
    """
    filling: dict[torch.dtype, list[int]] = {}
    elements = dict.fromkeys((tensor.dtype for tensor in tensors), 0)
    for position, tensor in enumerate(tensors):
        filling.setdefault(tensor.dtype, []).append(position)
        elements[tensor.dtype] += tensor.numel()
        if elements[tensor.dtype] >= BUCKET:
            yield filling.pop(tensor.dtype)
            elements[tensor.dtype] = 0
    yield from filling.values()
