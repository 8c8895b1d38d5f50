"""One evaluation, for runs that train and runs that are trained: every sample counts exactly once. And what it shows
beside its figures: the worst predictions, and which class is taken for which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.errors import Interrupted, Preempted, TrainerError
from trainer.models.replayed_forward import ReplayedForward
from trainer.modes import Strategy
from trainer.processes.world import World
from trainer.tasks import Task
from trainer.training.wrong_labels import ROWS

WORST, BEST = 16, 3  # samples that are shown; predictions of each that are kept
CLASSES = 256  # up to which every pair is counted


class Sums:
    """A task's sums, in float64: added over batches and ranks, to be divided once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = 0
        self.parts: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}  # of all ranks, once `metrics` has been asked for

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
        self.whole = {name: piece.view(shape) for (name, shape), piece in zip(layout.items(), pieces, strict=True)}
        # A task of the user's own may differ in the last bits from rank to rank, and all must see the same best epoch.
        metrics: dict[str, float] = world.broadcast_object(self.task.metrics(self.whole, int(count)))
        return metrics, int(count)


def evaluate(
    strategy: Strategy,
    batches: Iterator[Batch],
    world: World,
    boundary: Callable[[int], None] = lambda done: None,
    look: Callable[[Tensor, Batch], None] | None = None,
    sums: Sums | None = None,
    forward: Callable[[Tensor], Tensor | None] | None = None,
) -> dict[str, float]:
    """The task's metrics of the model as it stands, its weights settled.

    Args:
        batches: this rank's share of the held-out set, full-shape batches of which `count` rows are real.
        boundary: called after every batch with the number done.
        look: called with every batch and its outputs, on ranks that have outputs.
        sums: empty ones, to be filled for whoever wants more of them than the metrics.
        forward: in place of the strategy's, as `replayed` gives it.

    Returns:
        The task's metrics as val_loss and so on (of a classification the mean cross-entropy, without label smoothing,
        val_top1 and val_top5, which are fractions), and val_samples.
    """
    strategy.train(False)
    sums = Sums(strategy.task) if sums is None else sums
    forward = strategy.forward if forward is None else forward
    for done, batch in enumerate(batches, 1):
        outputs = forward(batch.inputs)
        if outputs is not None:
            sums.add(outputs, batch.targets, batch.count)
            if look is not None:
                look(outputs, batch)
        boundary(done)
    metrics, count = sums.metrics(world)
    return {**{f"val_{name}": value for name, value in metrics.items()}, "val_samples": count}


def replayed(strategy: Strategy, say: Callable[[str], None]) -> ReplayedForward:
    """The strategy's forward pass, replayed where its mode and the recipe allow that."""
    traits = strategy.recipe.traits
    wanted = strategy.recipe.graphs is not False and "graphs" not in traits.refuses and not traits.staged
    return ReplayedForward(strategy.forward, strategy.modules(), strategy.device, wanted, say)


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """The task's metrics under its own names, from what `evaluate` returns."""
    return {key.removeprefix("val_"): value for key, value in values.items() if key != "val_samples"}


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Mistake:
    """A held-out sample: its place, its loss, its targets, and its predictions, best first, as (place, number)."""

    place: int
    loss: float
    label_probability: float | None  # None where it has not one class
    target: Tensor
    predicted: tuple[tuple[int, float], ...]


class Mistakes:
    """Collected by a rank that has outputs, on its device: nothing waits for it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.pairs: Tensor | None = None  # (actual, predicted) counts of a classification with at most CLASSES classes
        self.hits: Tensor | None = None  # of each class, how many of its samples are right
        self.counts: Tensor | None = None  # and how many there are
        self._worst: list[tuple[Tensor, ...]] = []  # losses, places, targets, and predictions with their numbers
        self._kept = 0
        self._most, self._one_class = WORST, False
        self._counting = True
        self._losses = type(task).losses is not Task.losses  # which computes one at a time

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """The next batch. A user's task that fails is left out."""
        count, samples = batch.count, batch.samples
        if not count:
            return
        outputs, targets = outputs[:count].float(), batch.targets[:count]
        if self._counting:
            self._counting = _possible(lambda: self._count(outputs, targets)) is not None
        if self._losses and samples is not None:
            self._losses = _possible(lambda: self._rank(outputs, targets, samples)) is not None

    def _count(self, outputs: Tensor, targets: Tensor) -> bool:
        if self.task.reads != "class" or outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
            raise ValueError("no classes")
        classes, best = outputs.shape[1], outputs.argmax(1)
        if self.counts is None:
            self.counts, self.hits = (torch.zeros(classes, dtype=torch.int64, device=targets.device) for _ in range(2))
            if classes <= CLASSES:
                self.pairs = torch.zeros(classes * classes, dtype=torch.int64, device=targets.device)
        assert self.hits is not None
        self.counts.index_add_(0, targets, torch.ones_like(targets))
        self.hits.index_add_(0, targets, (best == targets).long())
        if self.pairs is not None:
            self.pairs.index_add_(0, targets * classes + best, torch.ones_like(targets))
        return True

    def _rank(self, outputs: Tensor, targets: Tensor, samples: Sequence[int]) -> bool:
        probabilities = self.task.label_probabilities(outputs, targets)
        if probabilities is not None:
            self._most, self._one_class = ROWS, True
        losses = (self.task.losses(outputs, targets) if probabilities is None else -probabilities.log()).detach()
        places = torch.as_tensor(samples).to(losses.device)
        nothing = outputs.new_zeros(len(outputs), 0)
        ranked = _possible(lambda: self.task.ranked(outputs)) or (nothing.long(), nothing)
        self._worst.append((losses, places, targets, ranked[0][:, :BEST], ranked[1][:, :BEST]))
        self._kept += len(outputs)
        if self._kept > 2 * self._most:
            self._worst = [self._of_all()]
            self._kept = len(self._worst[0][0])
        return True

    def _of_all(self) -> tuple[Tensor, ...]:
        """The worst of those kept, in one piece; of equal ones the first."""
        whole = tuple(torch.cat(parts) for parts in zip(*self._worst, strict=True))
        keep = whole[0].nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)[: self._most]
        return tuple(part[keep] for part in whole)

    def gathered(self, world: World) -> list[Mistake]:
        """All ranks' worst, the worst first, on rank 0; the counts are then those of all ranks. Collective.

        They are WORST, and ROWS where each has a probability of its label.
        """
        mine = None
        if self._worst or self.counts is not None:
            counted = [None if part is None else part.cpu() for part in (self.pairs, self.hits, self.counts)]
            mine = (counted, [part.cpu() for part in self._of_all()] if self._worst else [], self._one_class)
        parts = [part for part in world.gather(mine) if part is not None]
        pairs, hits, counts = ([counted[n] for counted, *_ in parts if counted[n] is not None] for n in range(3))
        self.pairs, self.hits, self.counts = (sum(mistakes) if mistakes else None for mistakes in (pairs, hits, counts))
        if self.pairs is not None:
            self.pairs = self.pairs.view(math.isqrt(len(self.pairs)), -1)
        mistakes = [
            Mistake(place, loss, math.exp(-loss) if one_class else None, target, tuple(zip(*predicted, strict=True)))
            for _, worst, one_class in parts
            if worst
            for loss, place, target, *predicted in zip(
                worst[0].tolist(), worst[1].tolist(), worst[2], worst[3].tolist(), worst[4].tolist(), strict=True
            )
        ]
        most = ROWS if any(one_class for *_, one_class in parts) else WORST
        # In the order of their places where they are equal; what is no number last.
        return sorted(mistakes, key=lambda one: (math.inf if math.isnan(one.loss) else -one.loss, one.place))[:most]


def _possible(ask: Callable[[], Answer]) -> Answer | None:
    """What a task answers; None where it cannot: pictures are no reason to end a run."""
    try:
        return ask()
    except (Interrupted, Preempted):
        raise
    except (TrainerError, Exception):
        return None
