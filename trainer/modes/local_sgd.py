"""`local_sgd`: workers that train apart from each other on their own part of the data, and average their weights.

Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.data.sampling import contiguous_span
from trainer.models.blocks import frozen_norms
from trainer.modes.base import Communication, Context, Strategy
from trainer.recipe.shares import rows_of
from trainer.saving.tensor_files import Piece, StoredTensor
from trainer.telemetry.clocks import Stopwatch

BUCKET = 2**24  # elements, about: what travels in one all-reduce, so that its copy stays small beside the model


class OuterSGD:
    """SGD with Nesterov momentum that takes one step at each averaging.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105),
    algorithm 1. With the weights x of the last averaging, the workers' new average w and velocity v,

        g = x - w;   v = momentum * v + g;   x = x - lr * (g + momentum * v)

    and each worker goes on from x. It is `torch.optim.SGD(nesterov=True)` on the outer gradient g. SlowMo (Wang et al.,
    arXiv:1910.00643) has plain momentum in place of Nesterov's, and keeps it in units of the learning rate.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.weights: list[Tensor] = list(parameters.values())
        self._names = list(parameters)
        self.restart()

    def restart(self) -> None:
        """Take the weights as they are for those of the last averaging."""
        self.anchors = [weight.detach().clone() for weight in self.weights]
        self.velocities = [torch.zeros_like(anchor) for anchor in self.anchors] if self.momentum else []

    def step(self) -> None:
        """One step, with the average in the weights."""
        if not self.weights:
            return
        with torch.no_grad():
            gradients = self.weights  # for a moment: no more memory than the state
            torch._foreach_neg_(gradients)
            torch._foreach_add_(gradients, self.anchors)
            if self.velocities:
                torch._foreach_mul_(self.velocities, self.momentum)
                torch._foreach_add_(self.velocities, gradients)
                torch._foreach_add_(gradients, self.velocities, alpha=self.momentum)
            torch._foreach_add_(self.anchors, gradients, alpha=-self.lr)
            torch._foreach_copy_(self.weights, self.anchors)

    def moved(self) -> bool:
        """Whether the weights are others than after the last step; waits for the device."""
        return not all(map(torch.equal, self.weights, self.anchors))

    def state(self) -> dict[str, Tensor]:
        """Its live tensors as `parameter//key`."""
        kept = {f"{name}//anchor": tensor for name, tensor in zip(self._names, self.anchors, strict=True)}
        return kept | {f"{name}//velocity": tensor for name, tensor in zip(self._names, self.velocities, strict=False)}


class LocalSGD(Strategy):
    """Own weights, buffers, optimizer and moving average on every rank; averaged every `local_sgd.every` steps, and at
    every epoch's end.

    An average is over the workers, weighted by the images that each has in an epoch. Buffers of whole numbers
    (BatchNorm's counters) become rank 0's. Optimizer states are never averaged. With `local_sgd.outer_lr` and
    `outer_momentum` the trained weights go on from a step of `OuterSGD` towards the average. One worker trains as
    `single` does.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.averaging = Stopwatch(self.device)
        self.outer: OuterSGD | None = None

    def connect(self) -> None:
        super().connect()
        section = self.recipe.local_sgd
        if section.outer_copies and self.world.size > 1:
            trained = {name: p for name, p in self.named_parameters().items() if p.requires_grad}
            self.outer = OuterSGD(trained, section.outer_lr, section.momentum)

    def after_step(self, step: int) -> None:
        every = self.recipe.local_sgd.every
        if every is not None and step % every == 0:
            weights = self._weights()
            with self.averaging:
                self._average(weights, weights)
                if self.outer is not None:
                    self.outer.step()

    def after_epoch(self, averages: Mapping[str, Tensor]) -> None:
        tensors = [*self._weights(), *averages.values()]
        # A run that was stopped right here averages a second time, which must change nothing. Nor may momentum push
        # weights that no worker has trained since the last averaging.
        self._average(tensors, tensors, exact=True)
        if self.outer is not None and self.outer.moved():
            self.outer.step()

    def outer_state(self) -> dict[str, Tensor]:
        return {} if self.outer is None else self.outer.state()

    def load_outer_state(self, saved: Mapping[str, StoredTensor]) -> None:
        if saved:
            self.scatter(saved, self.outer_state())
        elif self.outer is not None:
            self.outer.restart()

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Piece]:
        """The workers' average, of optimizer states too, as copies: saving does not change the training."""
        copies = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in named.items()}
        self._average(list(named.values()), list(copies.values()), exact=True)
        return super().pieces(copies)

    def communication(self, steps: int, step_seconds: float, budget: float) -> Communication:
        return Communication(self.averaging.seconds() / max(1, steps))

    def notes(self) -> dict[str, str]:
        section = self.recipe.local_sgd
        every = section.every
        when = "every epoch" if every is None else f"every {every} step{'s' * (every > 1)}"
        rates = f"lr {section.outer_lr:g}, Nesterov momentum {section.momentum:g}"
        outer = f", and SGD steps to the average ({rates})" if self.outer is not None else ""
        return {"workers": f"each has its own weights and optimizer; weights are averaged {when}{outer}"}

    def _weights(self) -> list[Tensor]:
        """What differs from worker to worker: what is frozen stays as it is, to the last bit."""
        still = {id(buffer) for norm in frozen_norms(self.module) for buffer in norm.buffers()}
        buffers = [buffer for buffer in self.module.buffers() if id(buffer) not in still]
        return [*(p for p in self.module.parameters() if p.requires_grad), *buffers]

    def _average(self, sources: Sequence[Tensor], targets: Sequence[Tensor], exact: bool = False) -> None:
        """Write the average of each source into its target, which may be the same tensor.

        With `exact`, sums are in float64, and the average of what is equal on all ranks is that, to the last bit.
        """
        samples, share = self.context.samples, self.share
        rows = rows_of(self.recipe, share.count, numbers=share.numbers) if share.numbers else ()
        start, stop = contiguous_span(samples, share.index, share.count, rows)
        weight = (stop - start) / samples
        with torch.no_grad():
            for bucket in buckets(sources):
                sent = torch.cat([sources[i].reshape(-1) for i in bucket])
                if sent.is_floating_point():
                    sent = (sent.double() if exact else sent) * weight
                else:
                    sent = sent.long() * self.world.is_main
                if self.world.shared:  # NCCL wants a card for each rank
                    sent = sent.cpu()
                pieces = self.world.sum_(sent).split_with_sizes([sources[i].numel() for i in bucket])
                for i, piece in zip(bucket, pieces, strict=True):
                    targets[i].copy_(piece.view(targets[i].shape))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of the tensors that travel together: one data type, BUCKET elements and what the last adds to them."""
    filling: dict[torch.dtype, list[int]] = {}
    elements = dict.fromkeys((tensor.dtype for tensor in tensors), 0)
    for position, tensor in enumerate(tensors):
        filling.setdefault(tensor.dtype, []).append(position)
        elements[tensor.dtype] += tensor.numel()
        if elements[tensor.dtype] >= BUCKET:
            yield filling.pop(tensor.dtype)
            elements[tensor.dtype] = 0
    yield from filling.values()
