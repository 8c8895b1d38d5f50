"""Evaluation of a model on the validation split. Every sample counts exactly once.

`evaluate` computes the metrics. `Mistakes` collects the worst predictions and a confusion matrix.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Batch
from trainer.distributed.world import World
from trainer.errors import Interrupted, Preempted
from trainer.models.replayed_forward import ReplayedForward
from trainer.modes import Strategy
from trainer.recipe.metric_table import needs_scores
from trainer.tasks import Task
from trainer.tasks.metrics import MetricInputs, compute

# No confusion matrix is collected for a model with more outputs than this number.
CLASSES = 1024
# Maximum number of outputs of a rank that `Scores` keeps on the device: 4 MiB.
MAX_SCORES_ON_DEVICE = 2**20
# File of the worst predictions in the run folder, and the maximum number of its rows.
WORST = "worst.csv"
ROWS = 10_000


class Sums:
    """Sums over samples in float64, from which a task computes its metrics.

    The metrics are computed once, from the sums over all batches and ranks.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = 0
        self.parts: dict[str, Tensor] = {}
        # Sums over all ranks; empty until `metrics` sets them.
        self.whole: dict[str, Tensor] = {}
        # Outputs and targets of all samples, if a metric needs them.
        self.scores = Scores() if any(map(needs_scores, task.measured)) else None
        # What the metrics were computed from; None until `metrics` sets it, and on ranks other than
        # 0.
        self.inputs: MetricInputs | None = None

    def add(self, outputs: Tensor, targets: Tensor, count: int) -> None:
        """Add the first `count` rows of a batch. The other rows are padding."""
        if not count:
            return
        self.count += count
        outputs = outputs[:count].float()
        targets = targets[:count]
        if self.scores:
            self.scores.add(outputs, targets)
        batch_sums = self.task.sums(outputs, targets)
        for name, batch_sum in batch_sums.items():
            total = self.parts.get(name)
            if total is None:
                self.parts[name] = batch_sum.double()
            else:
                self.parts[name] = total + batch_sum

    def metrics(self, world: World) -> tuple[dict[str, float], int]:
        """Compute the task's metrics over the samples of all ranks. Collective.

        Returns:
            `(metrics, count)`: The metrics by name and the number of samples, the same on every
            rank. All metrics are NaN if there is no sample.
        """
        # A rank without outputs has no sums, so it gets their names and shapes from other ranks.
        local_shapes = {name: part.shape for name, part in self.parts.items()}
        rank_shapes = world.gather(local_shapes)
        shapes: dict[str, torch.Size] = next(filter(None, rank_shapes), {})
        shapes = world.broadcast_object(shapes)
        world.heartbeat()
        values = []
        for name, shape in shapes.items():
            part = self.parts.get(name, torch.zeros(shape))
            values.append(part.cpu().double().flatten())
        values.append(torch.tensor([self.count], dtype=torch.float64))
        summed = world.sum_(torch.cat(values))
        count = int(summed[-1])
        if not count:
            names = *self.task.metric_names(), *self.task.measured
            return dict.fromkeys(names, math.nan), 0
        sizes = [shape.numel() for shape in shapes.values()]
        totals = torch.split(summed[:-1], sizes)
        named = zip(shapes, totals, strict=True)
        self.whole = {name: total.view(shapes[name]) for name, total in named}
        # The metrics of a user's task may differ in the last bits from rank to rank, but all ranks
        # must agree on the best epoch. So all ranks use rank 0's metrics.
        metrics = {**self.task.metrics(self.whole, count)}
        if self.task.measured:
            outputs_and_targets = self.scores.gather(world) if self.scores else ()

            def compute_measured() -> dict[str, float]:
                self.inputs = self.task.build_metric_inputs(self.whole, count, *outputs_and_targets)
                return compute(self.task.measured, self.inputs)

            # Only rank 0 has the outputs of all samples. A metric of a user may fail there, and
            # then all ranks must end.
            metrics |= world.on_main(compute_measured) or {}
        return world.broadcast_object(metrics), count


class Scores:
    """Outputs in float32 and targets of all samples, for metrics that sums do not give.

    A rank keeps those of its own samples on the CPU, and `gather` copies all of them to rank 0.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []
        # Parts that are still on the device: moving each batch would wait for the device.
        self._recent: list[tuple[Tensor, Tensor]] = []
        self._recent_size = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        # The next batch may overwrite outputs of a CUDA graph, and targets in shared memory.
        self._recent.append((outputs.clone(), targets.clone()))
        self._recent_size += outputs.numel()
        if self._recent_size > MAX_SCORES_ON_DEVICE:
            self._move()

    def _move(self) -> None:
        if not self._recent:
            return
        outputs, targets = zip(*self._recent, strict=True)
        part = {"outputs": torch.cat(outputs).cpu(), "targets": torch.cat(targets).cpu()}
        self._parts.append(part)
        self._recent = []
        self._recent_size = 0

    def gather(self, world: World) -> tuple[Tensor, Tensor] | tuple[()]:
        """Return the outputs and targets of all ranks on rank 0, and () elsewhere. Collective."""
        self._move()
        local = {}
        if self._parts:
            for name in ("outputs", "targets"):
                local[name] = torch.cat([part.pop(name) for part in self._parts])
        # Ranks without outputs, such as the first stages of a pipeline, send nothing.
        by_rank = [part for part in world.gather_tensors(local) if part]
        if not by_rank:
            return ()
        outputs = torch.cat([part["outputs"] for part in by_rank])
        return outputs, torch.cat([part["targets"] for part in by_rank])


def evaluate(
    strategy: Strategy,
    batches: Iterator[Batch],
    sums: Sums,
    forward: Callable[[Tensor], Tensor | None],
    boundary: Callable[[int], None] = lambda done: None,
    look: Callable[[Tensor, Batch], None] | None = None,
) -> dict[str, float]:
    """Compute the task's metrics of the model on the validation split. Collective.

    Call `strategy.sync_weights` first, so that all ranks evaluate the same weights.

    Args:
        strategy: The mode that holds the model.
        batches: This rank's part of the validation split, in batches of full shape. The first
            `Batch.count` rows of a batch are samples, and the other rows are padding.
        sums: Empty sums to fill.
        forward: The mode's forward pass, as `build_forward` returns it.
        boundary: Called after every batch with the number of evaluated batches.
        look: Called with outputs and batch, on ranks that have outputs.

    Returns:
        The task's metrics under names with the prefix `val_`, and the number of samples as
        `val_samples`. The metrics of a classification are `val_loss`, the mean cross-entropy
        without label smoothing, and the fractions `val_top1` and `val_top5`.
    """
    strategy.train(False)
    for batches_done, batch in enumerate(batches, 1):
        outputs = forward(batch.inputs)
        if outputs is not None:
            sums.add(outputs, batch.targets, batch.count)
            if look:
                look(outputs, batch)
        boundary(batches_done)
    metrics, count = sums.metrics(strategy.world)
    figures: dict[str, float] = {f"val_{name}": value for name, value in metrics.items()}
    figures["val_samples"] = count
    return figures


def build_forward(strategy: Strategy, say: Callable[[str], None]) -> ReplayedForward:
    """Return the mode's forward pass.

    The pass replays a CUDA graph if the device, the mode and the recipe allow it.
    """
    recipe = strategy.recipe
    traits = recipe.traits
    # A pass without a backward pass leaves the root's weights gathered, which is state of Python's,
    # so evaluations of shards stay eager.
    refuses = "graphs" in traits.refuses or traits.staged or traits.exchanges == "shards"
    allowed = recipe.graphs is not False and not refuses
    return ReplayedForward(strategy.forward, strategy.modules(), strategy.device, allowed, say)


def strip_prefix(values: Mapping[str, float]) -> dict[str, float]:
    """Remove the prefix `val_` from the names of the metrics in a result of `evaluate`.

    The number of samples is left out.
    """
    return {
        key.removeprefix("val_"): value for key, value in values.items() if key != "val_samples"
    }


@dataclass(frozen=True)
class Mistake:
    """A validation sample and the model's prediction, which may be correct.

    Attributes:
        label_probability: Predicted probability of the sample's class.
        place: Index of the sample in the validation split.
        target: Index of the sample's class.
        predicted: Index of the predicted class.
        predicted_probability: Predicted probability of the predicted class.
    """

    label_probability: float
    place: int
    target: int
    predicted: int
    predicted_probability: float


class Mistakes:
    """Collector of the worst predictions of a classification, and of its confusion matrix.

    The worst predictions have the lowest probabilities of the sample's class. If a split has few
    wrong predictions, correct ones are among them.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        # Number of samples for each (actual, predicted) pair of classes: (classes * classes,) on
        # this rank, and (classes, classes) after `gathered`. None before the first batch, with more
        # than CLASSES classes, and after `gathered` on ranks other than 0.
        self.pairs: Tensor | None = None
        # Each entry has the samples of a batch, as one (samples,) tensor for each field of
        # `Mistake`. As soon as the entries have more than 2 * ROWS samples, they are replaced by a
        # single entry with the worst ROWS samples.
        self._worst: list[tuple[Tensor, ...]] = []
        self._row_count = 0
        self._possible = True

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add a batch.

        If the task has no classes, or a user's task raises an error, this rank adds nothing to the
        result of `gathered`.
        """
        if not batch.count or not self._possible:
            return
        try:
            targets = batch.targets[: batch.count]
            self._add(outputs[: batch.count].float(), targets, batch.samples)
        except (Interrupted, Preempted):
            raise
        # An error in the table of mistakes must not end the run.
        except Exception:
            self._possible = False

    def _add(self, outputs: Tensor, targets: Tensor, samples: Sequence[int] | None) -> None:
        label_probabilities = self.task.label_probabilities(outputs, targets)
        if label_probabilities is None or outputs.dim() != 2 or targets.dim() != 1:
            raise ValueError("the task has no classes")
        classes = outputs.shape[1]
        predicted = outputs.argmax(1)
        if classes <= CLASSES:
            if self.pairs is None:
                self.pairs = torch.zeros(
                    classes * classes, dtype=torch.int64, device=targets.device
                )
            pairs = targets * classes + predicted
            self.pairs.index_add_(0, pairs, torch.ones_like(targets))
        if samples is None:
            return
        ranked, probabilities = self.task.ranked(outputs)
        places = torch.as_tensor(samples).to(targets.device)
        label_probabilities = label_probabilities.detach()
        columns = label_probabilities, places, targets, ranked[:, 0], probabilities[:, 0]
        self._worst.append(columns)
        self._row_count += len(outputs)
        if self._row_count > 2 * ROWS:
            self._worst = [self._keep_worst()]
            self._row_count = len(self._worst[0][0])

    def _keep_worst(self) -> tuple[Tensor, ...]:
        # The sort is stable, so mistakes with equal probabilities keep their order. NaN sorts
        # behind probability 1.
        columns = tuple(torch.cat(parts) for parts in zip(*self._worst, strict=True))
        order = columns[0].nan_to_num(nan=2.0).argsort(stable=True)
        worst_rows = order[:ROWS]
        return tuple(column[worst_rows] for column in columns)

    def gathered(self, world: World) -> list[Mistake]:
        """Return on rank 0 the worst predictions of all ranks, and [] on other ranks. Collective.

        The list has at most ROWS predictions, the worst first. Afterwards `pairs` on rank 0 is a
        (classes, classes) matrix of the samples of all ranks, or None with more than CLASSES
        classes. On other ranks, `pairs` is then None.
        """
        local = None
        if self._possible and (self._worst or self.pairs is not None):
            pairs = None if self.pairs is None else self.pairs.cpu()
            columns = []
            if self._worst:
                columns = [column.tolist() for column in self._keep_worst()]
            local = pairs, columns
        rank_values = [values for values in world.gather(local) if values is not None]
        rank_pairs = [pairs for pairs, _ in rank_values if pairs is not None]
        self.pairs = None
        if rank_pairs:
            classes = math.isqrt(len(rank_pairs[0]))
            total = torch.stack(rank_pairs).sum(0)
            self.pairs = total.view(classes, -1)
        mistakes = []
        for _, columns in rank_values:
            for values in zip(*columns, strict=True):
                mistakes.append(Mistake(*values))

        def badness(mistake: Mistake) -> tuple[float, int]:
            # NaN comes last. Mistakes with equal probabilities are in the order of their samples.
            probability = mistake.label_probability
            if math.isnan(probability):
                probability = math.inf
            return probability, mistake.place

        return sorted(mistakes, key=badness)[:ROWS]
