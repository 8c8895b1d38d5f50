"""One evaluation, for runs that train and runs that are trained: every sample counts exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.modes import Strategy
from trainer.processes.world import World
from trainer.tasks import Task


class Sums:
    """A task's sums, in float64: added over batches and ranks, to be divided once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = 0
        self.parts: dict[str, Tensor] = {}

    def add(self, outputs: Tensor, targets: Tensor, count: int) -> None:
        """Count the first `count` rows of a batch; the rest is padding."""
        if not count:
            return
        self.count += count
        for name, part in self.task.sums(outputs[:count].float(), targets[:count]).items():
            before = self.parts.get(name)
            self.parts[name] = part.double() if before is None else before + part

    def metrics(self, world: World) -> tuple[dict[str, float], int]:
        """The task's metrics of all ranks' samples, and how many these are. Collective; the same on every rank."""
        # A rank without outputs does not know what there is to add up.
        layouts = world.gather({name: part.shape for name, part in self.parts.items()})
        layout: dict[str, torch.Size] = world.broadcast_object(next(filter(None, layouts), {}))
        world.heartbeat()
        mine = [self.parts[name].cpu() if name in self.parts else torch.zeros(shape) for name, shape in layout.items()]
        flat = torch.cat([*(part.double().flatten() for part in mine), torch.tensor([float(self.count)]).double()])
        *_, count = summed = world.sum_(flat)
        if not count:
            return dict.fromkeys(self.task.metric_names(), math.nan), 0
        pieces = torch.split(summed[:-1], [shape.numel() for shape in layout.values()])
        whole = {name: piece.view(shape) for (name, shape), piece in zip(layout.items(), pieces, strict=True)}
        # A task of the user's own may differ in the last bits from rank to rank, and all must see the same best epoch.
        metrics: dict[str, float] = world.broadcast_object(self.task.metrics(whole, int(count)))
        return metrics, int(count)


def evaluate(
    strategy: Strategy,
    batches: Iterator[Batch],
    world: World,
    boundary: Callable[[int], None] = lambda done: None,
    look: Callable[[Tensor, Tensor, int], None] = lambda outputs, targets, count: None,
) -> dict[str, float]:
    """The task's metrics of the model as it stands.

    Args:
        strategy: its weights already settled.
        batches: this rank's share of the held-out set, full-shape batches of which `count` rows are real.
        world: sums are added over its ranks, once.
        boundary: called after every batch with the number done.
        look: called with every batch's outputs, targets and number of real rows, on ranks that have outputs.

    Returns:
        The task's metrics as val_loss and so on (of a classification the mean cross-entropy, without label smoothing,
        val_top1 and val_top5, which are fractions), and val_samples.
    """
    strategy.train(False)
    sums = Sums(strategy.task)
    for done, batch in enumerate(batches, 1):
        outputs = strategy.forward(batch.inputs)
        if outputs is not None:
            sums.add(outputs, batch.targets, batch.count)
            look(outputs, batch.targets, batch.count)
        boundary(done)
    metrics, count = sums.metrics(world)
    return {**{f"val_{name}": value for name, value in metrics.items()}, "val_samples": count}


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """The task's metrics under its own names, from what `evaluate` returns."""
    return {key.removeprefix("val_"): value for key, value in values.items() if key != "val_samples"}
