"""`local_sgd`: workers train independently, each on its own shard of the data, and average weights.

Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.memory.needs import BUCKET
from trainer.models.blocks import list_frozen_norms
from trainer.modes.base import Strategy
from trainer.modes.flattening import flatten_tensors, unflatten_into, view_with_shapes
from trainer.recipe.schema import LocalSGDRecipe
from trainer.saving.tensor_files import Shard, StoredTensor
from trainer.telemetry.readable import format_count

if TYPE_CHECKING:
    from torch.distributed import Work


# Factor of a worker's own weights when a fragment arrives late (arXiv:2501.18512, section 2.2).
MIX = 0.5


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

    def __init__(self, parameters: Mapping[str, nn.Parameter], section: LocalSGDRecipe) -> None:
        self.lr = section.outer_lr
        self.momentum = section.momentum
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
            self._move(gradients)
            torch._foreach_copy_(self.weights, self.outer_weights)

    def _move(self, gradients: list[Tensor]) -> None:
        """Move the outer weights by the outer gradients, which this overwrites."""
        if self.velocities:
            torch._foreach_mul_(self.velocities, self.momentum)
            torch._foreach_add_(self.velocities, gradients)
            torch._foreach_add_(gradients, self.velocities, alpha=self.momentum)
        torch._foreach_add_(self.outer_weights, gradients, alpha=-self.lr)

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors themselves, not copies, by the name `parameter//key`."""
        tensors = {}
        for name, outer_weight in zip(self._names, self.outer_weights, strict=True):
            tensors[f"{name}//anchor"] = outer_weight
        # The lengths may differ (strict=False): the list of velocities is empty if momentum is 0.
        for name, velocity in zip(self._names, self.velocities, strict=False):
            tensors[f"{name}//velocity"] = velocity
        return tensors


class StreamingSGD(OuterSGD):
    """`OuterSGD` of one fragment of the weights. Training continues while it is exchanged.

    Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv:2501.18512),
    algorithm 2. At step t each worker sends x - w of its own weights. At step t + delay the outer
    weights make their step, and each worker continues from

        w = MIX * w + (1 - MIX) * x

    because w contains the steps that it has made since then. Without a delay it continues from x.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        section: LocalSGDRecipe,
        every: int,
        phase: int,
        world: World,
    ) -> None:
        """Create the outer optimizer of a fragment.

        Args:
            parameters: The fragment's parameters by plain name.
            section: Options of the mode.
            every: Steps between two exchanges of the fragment.
            phase: Step of the first exchange.
            world: All ranks.
        """
        self.section = section
        self.every = every
        self.phase = phase
        self.world = world
        super().__init__(parameters, section)

    def restart(self) -> None:
        super().restart()
        self._work: Work | None = None
        # Step at which the fragment was sent, if it has not been merged yet, or else 0. It is a
        # tensor, because checkpoints contain it.
        self.sent_at = torch.tensor(0)
        # The sum of all workers' outer gradients, and views of it with the weights' shapes.
        self._sum = torch.zeros_like(flatten_tensors(self.outer_weights))
        self._message = self._sum
        self._gradients = view_with_shapes(self._sum, self.weights)

    def is_sent_after(self, step: int) -> bool:
        """Return whether the fragment is sent after this step."""
        return step % self.every == self.phase % self.every

    def is_merged_after(self, step: int) -> bool:
        """Return whether the fragment is merged after this step."""
        sent_at = int(self.sent_at)
        return sent_at > 0 and step >= sent_at + self.section.delay

    def send(self, step: int, share: float) -> None:
        """Start to sum the workers' outer gradients. Collective.

        Args:
            step: Number of steps that are done.
            share: Fraction of an epoch's images that this worker trains on.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._gradients, self.outer_weights)
            torch._foreach_sub_(self._gradients, self.weights)
            self._sum.mul_(share)
        self._message = self._sum
        if self.section.compress == "bf16":
            self._message = self._sum.bfloat16()
        # NCCL raises an error if ranks share a GPU, so such ranks exchange messages on the CPU.
        if self.world.shared:
            self._message = self._message.cpu()
        self._work = self.world.start_sum(self._message)
        self.sent_at.fill_(step)

    def wait(self) -> None:
        """Wait until the sum has arrived, if the fragment is being exchanged."""
        if self._work is not None:
            self.world.wait(self._work)
            self._work = None
            self._sum.copy_(self._message)

    def merge(self) -> None:
        """Make the step of the outer weights, and merge them into this worker's weights."""
        self.wait()
        with torch.no_grad():
            self._move(self._gradients)
            kept = MIX if self.section.delay else 0.0
            torch._foreach_lerp_(self.weights, self.outer_weights, 1 - kept)
        self.sent_at.zero_()

    def state(self) -> dict[str, Tensor]:
        self.wait()
        first = self._names[0]
        return super().state() | {f"{first}//sum": self._sum, f"{first}//sent_at": self.sent_at}


class LocalSGD(Strategy):
    """Workers with their own weights, buffers, optimizer and moving average, one on each rank.

    Weights are averaged every `local_sgd.every` steps and at the end of every epoch. Each worker is
    weighted by the fraction of an epoch's images that it trains on. Integer buffers, such as the
    counters of BatchNorm, are copied from rank 0. Optimizer states are never averaged. With
    `local_sgd.outer_lr` and `outer_momentum`, `OuterSGD` moves the trained weights towards the
    average. With `local_sgd.fragments`, `delay` or `compress`, `StreamingSGD` does so for one
    fragment after the other, and buffers are averaged only at the end of an epoch. A single worker
    trains like `single`.
    """

    outer: Sequence[OuterSGD] = ()
    fragments: Sequence[StreamingSGD] = ()

    def connect(self) -> None:
        super().connect()
        section = self.recipe.local_sgd
        if not section.outer_copies or self.world.size == 1:
            return
        named = self.named_parameters().items()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        every = section.every
        if every is None or not section.streams:
            self.outer = [OuterSGD(trained, section)]
            return
        parts = split_evenly(trained, section.fragments)
        # The exchanges of the fragments are spread evenly over the steps between two of the same
        # fragment, and the last one is sent at multiples of `every`.
        self.fragments = [
            StreamingSGD(part, section, every, number * every // len(parts), self.world)
            for number, part in enumerate(parts, 1)
        ]
        self.outer = self.fragments

    def retrain(self) -> None:
        if self.outer:
            raise RecipeError(
                f"model.name={self.recipe.model.name} changes what trains (requires_grad), which "
                "the outer steps of local_sgd cannot follow: set local_sgd.outer_lr=1 "
                "local_sgd.outer_momentum=0 without fragments, delay and compress, or use mode=ddp"
            )

    def after_step(self, step: int) -> None:
        if self.fragments:
            self.has_equal_weights = False
            for fragment in self.fragments:
                if fragment.is_sent_after(step):
                    with self.averaging:
                        fragment.send(step, self._compute_share())
                if fragment.is_merged_after(step):
                    with self.averaging:
                        fragment.merge()
            return
        every = self.recipe.local_sgd.every
        self.has_equal_weights = every is not None and step % every == 0
        if self.has_equal_weights:
            with self.averaging:
                self._average(self._weights())
                for outer in self.outer:
                    outer.step()

    def after_epoch(self, averages: Mapping[str, Tensor]) -> None:
        for fragment in self.fragments:
            if fragment.sent_at:
                fragment.merge()
        tensors = [*self._weights(), *averages.values()]
        # The average is exact, because a run that is stopped here averages a second time after it
        # is resumed, which must not change the weights. For the same reason there is no outer step
        # if no worker has trained since the last outer step.
        self._average(tensors, exact=True)
        for outer in self.outer:
            # The comparison waits for the device, so it is made once per epoch only, not in
            # `after_step`.
            if not all(map(torch.equal, outer.weights, outer.outer_weights)):
                outer.step()
        self.has_equal_weights = True

    @contextmanager
    def average_for_evaluation(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        if self.has_equal_weights and not averages:
            yield
            return
        tensors = [*self._weights(), *averages.values()]
        own_values = [tensor.detach().clone() for tensor in tensors]
        self._average(tensors, exact=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, own_values, strict=True):
                    tensor.copy_(value)

    def outer_state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for outer in self.outer:
            tensors |= outer.state()
        return tensors

    def load_outer_state(self, saved: Mapping[str, StoredTensor]) -> None:
        if saved:
            self.scatter(saved, self.outer_state())
            return
        for outer in self.outer:
            outer.restart()

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Shard]:
        """Return the averages of `named` over the workers as shards to save. Collective.

        The averages are copies, so that saving does not change the training.
        """
        copies = {name: tensor.detach().clone() for name, tensor in named.items()}
        self._average(list(copies.values()), exact=True)
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
        if self.fragments:
            note += f", in {format_count(len(self.fragments), 'fragment')}"
            if section.delay:
                note += f" that arrive {format_count(section.delay, 'step')} later"
        return {"workers": note}

    def _compute_share(self) -> float:
        """Return the fraction of an epoch's images that this worker trains on."""
        samples = self.context.samples
        start, stop = self.share.compute_span(self.recipe, samples)
        return (stop - start) / samples

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

    def _average(self, tensors: Sequence[Tensor], exact: bool = False) -> None:
        """Average tensors over the workers, in place.

        Args:
            tensors: tensors of this worker.
            exact: True to sum in float64, so that values that are equal on all ranks keep their
                exact value.
        """
        weight = self._compute_share()
        with torch.no_grad():
            for bucket in group_buckets(tensors):
                message = flatten_tensors(bucket)
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
                unflatten_into(self.world.sum_(message), bucket)


def group_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors into messages of one data type and at least `BUCKET` elements.

    Yields:
        The tensors in one message. The last message of a data type may be smaller.
    """
    filling: dict[torch.dtype, list[Tensor]] = {}
    elements = dict.fromkeys((tensor.dtype for tensor in tensors), 0)
    for tensor in tensors:
        filling.setdefault(tensor.dtype, []).append(tensor)
        elements[tensor.dtype] += tensor.numel()
        if elements[tensor.dtype] >= BUCKET:
            yield filling.pop(tensor.dtype)
            elements[tensor.dtype] = 0
    yield from filling.values()


def split_evenly(
    parameters: Mapping[str, nn.Parameter], count: int
) -> list[dict[str, nn.Parameter]]:
    """Split parameters into at most `count` consecutive fragments of about equal sizes.

    A parameter is not split, so fragments are unequal if a few parameters are large.
    """
    fragments: dict[int, dict[str, nn.Parameter]] = {}
    total = 1 + sum(parameter.numel() for parameter in parameters.values())
    done = 0
    for name, parameter in parameters.items():
        middle = done + parameter.numel() / 2
        fragments.setdefault(int(count * middle / total), {})[name] = parameter
        done += parameter.numel()
    return list(fragments.values())
