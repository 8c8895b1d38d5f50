"""One evaluation, for runs that train and runs that are trained: every sample counts exactly once. And what it shows
beside its figures: the worst predictions, and which class is taken for which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.errors import Interrupted, Preempted
from trainer.models.replayed_forward import ReplayedForward
from trainer.modes import Strategy
from trainer.processes.world import World
from trainer.tasks import Task

CLASSES = 256  # up to which every pair is counted
WORST, ROWS = "worst.csv", 10_000  # the worst predictions in the run folder, and how many at most


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
    """The task's metrics of the model as it stands, its weights synchronised.

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


@dataclass(frozen=True)
class Mistake:
    """A held-out sample with one class: its place, its class, what is predicted, and the probabilities of both."""

    place: int
    target: int
    predicted: int
    label_probability: float
    predicted_probability: float


class Mistakes:
    """Of a classification, collected by a rank that has outputs, on its device: nothing waits for it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.pairs: Tensor | None = None  # (actual, predicted) counts, of at most CLASSES classes
        self._worst: list[tuple[Tensor, ...]] = []  # probabilities of labels, and what else a `Mistake` has
        self._kept, self._possible = 0, True

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """The next batch. A task that has no classes, or a user's that fails, is left out."""
        if not batch.count or not self._possible:
            return
        try:
            self._take(outputs[: batch.count].float(), batch.targets[: batch.count], batch.samples)
        except (Interrupted, Preempted):
            raise
        except Exception:  # pictures are no reason to end a run
            self._possible = False

    def _take(self, outputs: Tensor, targets: Tensor, samples: Sequence[int] | None) -> None:
        of_labels = self.task.label_probabilities(outputs, targets)
        if of_labels is None or outputs.dim() != 2 or targets.dim() != 1:
            raise ValueError("no classes")
        classes, best = outputs.shape[1], outputs.argmax(1)
        if classes <= CLASSES:
            if self.pairs is None:
                self.pairs = torch.zeros(classes * classes, dtype=torch.int64, device=targets.device)
            self.pairs.index_add_(0, targets * classes + best, torch.ones_like(targets))
        if samples is None:
            return
        ranked, numbers = self.task.ranked(outputs)
        places = torch.as_tensor(samples).to(targets.device)
        self._worst.append((of_labels.detach(), places, targets, ranked[:, 0], numbers[:, 0]))
        self._kept += len(outputs)
        if self._kept > 2 * ROWS:
            self._worst = [self._of_all()]
            self._kept = len(self._worst[0][0])

    def _of_all(self) -> tuple[Tensor, ...]:
        """The worst of those kept, in one piece; of equal ones the first, and last what is no number."""
        whole = tuple(torch.cat(parts) for parts in zip(*self._worst, strict=True))
        keep = whole[0].nan_to_num(nan=2.0).argsort(stable=True)[:ROWS]
        return tuple(part[keep] for part in whole)

    def gathered(self, world: World) -> list[Mistake]:
        """All ranks' worst on rank 0, the worst first, ROWS of them; its counts are then of all ranks. Collective."""
        mine = None
        if self._possible and (self._worst or self.pairs is not None):
            pairs = None if self.pairs is None else self.pairs.cpu()
            mine = pairs, [part.tolist() for part in self._of_all()] if self._worst else []
        parts = [part for part in world.gather(mine) if part is not None]
        counted = [pairs for pairs, _ in parts if pairs is not None]
        self.pairs = torch.stack(counted).sum(0).view(math.isqrt(len(counted[0])), -1) if counted else None
        found = [
            Mistake(place, target, predicted, of_label, probability)
            for _, worst in parts
            for of_label, place, target, predicted, probability in zip(*worst, strict=True)
        ]
        # In the order of their places where they are equal; what is no number last.
        shares = [math.inf if math.isnan(mistake.label_probability) else mistake.label_probability for mistake in found]
        order = sorted(range(len(found)), key=lambda n: (shares[n], found[n].place))
        return [found[n] for n in order[:ROWS]]
