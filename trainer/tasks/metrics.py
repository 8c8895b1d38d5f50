"""Functions of the metrics in `trainer.recipe.metric_table`, and `register_metric` for a user's.

Absent classes count as in scikit-learn: a precision, recall or F1 without a denominator is 0
(`zero_division=0`). Macro means are over the classes that occur as label or as prediction; in a
task with any number of labels, over all classes. AUROC is undefined for a class without positives
or without negatives, and average precision for a class without positives. Their means leave such a
class out, and are NaN if no class is left.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.errors import RecipeError, TrainerError, describe
from trainer.recipe.known_names import Registry
from trainer.recipe.metric_table import METRICS, TOP, MetricTraits
from trainer.recipe.text import format_value

# Names that a metric cannot have, because result.json has other values at `val_samples` and
# `best_epoch`.
RESERVED = ("samples", "epoch")
# `Task.sums`, totaled over all samples, by name: float64 tensors on the CPU.
Sums = Mapping[str, Tensor]


@dataclass(frozen=True)
class MetricInputs:
    """Values of all evaluated samples, from which metrics are computed.

    Attributes:
        sums: totals over the samples.
        count: number of samples.
        outputs: outputs of the model (N, ...) in float32; None if no metric needs them.
        targets: targets of the same samples (N, ...).
        has_one_class: whether each sample has exactly one class.
        split_classes: `Task.split_classes`.
    """

    sums: Sums
    count: int
    outputs: Tensor | None
    targets: Tensor | None
    has_one_class: bool
    split_classes: Callable[[Tensor, Tensor], Iterable[tuple[Tensor, Tensor]]]

    @cached_property
    def ranking(self) -> Tensor:
        """AUROC and average precision of each class, (2, classes)."""
        assert self.outputs is not None and self.targets is not None
        columns = []
        for scores, is_positive in self.split_classes(self.outputs, self.targets):
            auroc = compute_auroc(scores, is_positive)
            columns.append([auroc, compute_average_precision(scores, is_positive)])
        return torch.tensor(columns, dtype=torch.float64).T


def compute_auroc(
    scores: Tensor,
    is_positive: Tensor,
) -> float:
    """Return the area under the ROC curve, or NaN if there are no positives or no negatives.

    It is the share of pairs of a positive and a negative in which the positive has the higher
    score, and ties count half (Hanley and McNeil, Radiology 143, 1982).

    Args:
        scores: scores (N,) in float64.
        is_positive: labels (N,), bool.
    """
    positives = scores[is_positive]
    negatives = scores[~is_positive].sort().values
    pairs = len(positives) * len(negatives)
    if not pairs or scores.isnan().any():
        return torch.nan
    lower = torch.searchsorted(negatives, positives)
    not_higher = torch.searchsorted(negatives, positives, right=True)
    return (lower + not_higher).sum().item() / 2 / pairs


def compute_average_precision(
    scores: Tensor,
    is_positive: Tensor,
) -> float:
    """Return the mean of the precisions at the scores of the positives; NaN without positives.

    Samples with equal scores enter together, as in scikit-learn's `average_precision_score`. The
    arguments are those of `compute_auroc`.
    """
    total = int(is_positive.sum())
    if not total or scores.isnan().any():
        return torch.nan
    descending, order = scores.sort(descending=True)
    hits = is_positive[order].cumsum(0)
    # Only the last sample of each group of equal scores is a point of the curve.
    is_last = torch.ones_like(is_positive)
    is_last[:-1] = descending[1:] != descending[:-1]
    ends = is_last.nonzero().flatten()
    hit_counts = hits[ends].double()
    precision = hit_counts / (ends + 1)
    gained = hit_counts.diff(prepend=hit_counts.new_zeros(1))
    return (precision * gained).sum().item() / total


def _compute_precision(
    sums: Sums,
) -> Tensor:
    # All are counts, so a denominator of 0 has a numerator of 0.
    return sums["correct"] / sums["predicted"].clamp_min(1)


def _compute_recall(
    sums: Sums,
) -> Tensor:
    return sums["correct"] / sums["actual"].clamp_min(1)


def _compute_f1(
    sums: Sums,
) -> Tensor:
    return 2 * sums["correct"] / (sums["actual"] + sums["predicted"]).clamp_min(1)


# Metrics of each class, (classes,).
PER_CLASS = {"precision": _compute_precision, "recall": _compute_recall, "f1": _compute_f1}
# Sums of the samples of each class, from which they are computed.
COUNTS = {"actual", "predicted", "correct"}
PerClass = Callable[[Sums], Tensor]


def _average_micro(
    per_class: PerClass,
    inputs: MetricInputs,
) -> Tensor:
    return per_class({name: inputs.sums[name].sum() for name in COUNTS})


def _average_macro(
    per_class: PerClass,
    inputs: MetricInputs,
) -> Tensor:
    values = per_class(inputs.sums)
    if inputs.has_one_class:
        values = values[inputs.sums["actual"] + inputs.sums["predicted"] > 0]
    return values.mean()


def _average_weighted(
    per_class: PerClass,
    inputs: MetricInputs,
) -> Tensor:
    actual = inputs.sums["actual"]
    return (per_class(inputs.sums) * actual).sum() / actual.sum().clamp_min(1)


def _compute_balanced_accuracy(inputs: MetricInputs) -> Tensor:
    recall = _compute_recall(inputs.sums)
    return recall[inputs.sums["actual"] > 0].mean()


def _compute_mcc(inputs: MetricInputs) -> Tensor:
    """Return the correlation of labels and predictions, and 0 if either is constant.

    See Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient",
    Computational Biology and Chemistry 28, 2004.
    """
    actual = inputs.sums["actual"]
    predicted = inputs.sums["predicted"]
    correct = inputs.sums["correct"].sum()
    count = actual.sum()
    if not inputs.has_one_class:
        # Each decision about a label is a sample of two classes: absent and present.
        count = torch.tensor(float(inputs.count * len(actual)), dtype=torch.float64)
        actual = torch.stack([count - actual.sum(), actual.sum()])
        predicted = torch.stack([count - predicted.sum(), predicted.sum()])
        correct = count - actual[1] - predicted[1] + 2 * correct
    covariance = correct * count - actual @ predicted
    variance = count**2 - actual @ actual
    predicted_variance = count**2 - predicted @ predicted
    if not variance * predicted_variance:
        return torch.zeros(())
    return covariance / (variance.sqrt() * predicted_variance.sqrt())


def _compute_ece(inputs: MetricInputs) -> Tensor:
    return inputs.sums["calibration"].abs().sum() / inputs.count


def _compute_rmse(inputs: MetricInputs) -> Tensor:
    return (inputs.sums["squared"] / inputs.count).sqrt().mean()


def _compute_top(
    count: int,
    inputs: MetricInputs,
) -> Tensor:
    return inputs.sums["ranks"][:count].sum() / inputs.count


Function = Callable[[MetricInputs], Any]
FUNCTIONS: Registry[Function] = Registry(
    "register_metric",
    {
        "top1": partial(_compute_top, 1),
        "top5": partial(_compute_top, 5),
        "balanced_accuracy": _compute_balanced_accuracy,
        "mcc": _compute_mcc,
        "ece": _compute_ece,
        "auroc": lambda inputs: inputs.ranking[0].nanmean(),
        "average_precision": lambda inputs: inputs.ranking[1].nanmean(),
        "rmse": _compute_rmse,
    },
    taken=METRICS.keys,
)
for _name, _per_class in PER_CLASS.items():
    FUNCTIONS[_name] = partial(_average_micro, _per_class)
    FUNCTIONS[f"{_name}_macro"] = partial(_average_macro, _per_class)
    FUNCTIONS[f"{_name}_weighted"] = partial(_average_weighted, _per_class)


def compute(
    names: Iterable[str],
    inputs: MetricInputs,
) -> dict[str, float]:
    """Compute metrics by name.

    Raises:
        RecipeError: a function of a user fails, or does not return a number.
    """
    values = {}
    for name in names:
        match = TOP.fullmatch(name)
        function = partial(_compute_top, int(match[1])) if match else FUNCTIONS[name]
        try:
            values[name] = float(function(inputs))
        except TrainerError:
            raise
        # A user's function may raise any error.
        except Exception as error:
            raise RecipeError(f"the metric {name} fails ({describe(error)})") from error
    return values


def tabulate_classes(inputs: MetricInputs) -> dict[str, list[float]]:
    """Return the metrics of each class by name; empty if the task has no classes.

    `support` is the number of samples of a class. `auroc` and `average_precision` are there if the
    inputs has outputs.
    """
    # A task of a user may have sums of other meanings under some of these names.
    shapes = {inputs.sums[name].shape for name in COUNTS if name in inputs.sums}
    if not inputs.sums.keys() >= COUNTS or len(shapes) > 1 or shapes == {torch.Size()}:
        return {}
    columns = {name: per_class(inputs.sums).tolist() for name, per_class in PER_CLASS.items()}
    if inputs.outputs is not None:
        columns["auroc"], columns["average_precision"] = inputs.ranking.tolist()
    columns["support"] = inputs.sums["actual"].tolist()
    return columns


def register_metric(
    name: str,
    *,
    larger_is_better: bool,
    tasks: Sequence[str] = ("classification",),
    needs: Literal["outputs", "sums"] = "outputs",
    title: str | None = None,
    is_fraction: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a metric for `task.metric` and `task.metrics`; use it as a decorator.

    Args:
        name: name of the metric, of small letters, digits and _.
        larger_is_better: True if the largest value is the best.
        tasks: names of the tasks that have the metric. Tasks that subclass them have it too.
        needs: arguments of the function. With "outputs", it is called with the outputs of the model
            for all samples, (N, ...) in float32, and their targets, (N, ...), both on the CPU of
            rank 0. With "sums", it is called with the totals of the task's `sums`, and the number
            of samples.
        title: name on the screen; None: `name`.
        is_fraction: True to show the metric in percent.

    Raises:
        RecipeError: the name is invalid or taken, or another argument is invalid.
    """
    register = FUNCTIONS.register(name)
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or TOP.fullmatch(name) or name in RESERVED:
        raise RecipeError(
            f"register_metric('{format_value(name)}'): a name consists of small letters, digits "
            f"and _, and is not {', '.join(RESERVED)} or a top-k accuracy, as in 'kappa'"
        )
    if needs not in ("outputs", "sums"):
        raise RecipeError(
            f"register_metric('{name}'): `needs` must be 'outputs' or 'sums', not {needs!r}"
        )
    if isinstance(tasks, str):
        tasks = (tasks,)

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        def compute_own(inputs: MetricInputs) -> Any:
            if needs == "sums":
                return function(inputs.sums, inputs.count)
            return function(inputs.outputs, inputs.targets)

        register(compute_own)
        METRICS[name] = MetricTraits(
            title or name,
            tuple(tasks),
            "your own",
            larger_is_better,
            is_fraction,
            needs_scores=needs == "outputs",
        )
        return function

    return keep


def split_columns(
    scores: Tensor,
    is_positive: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores and labels of each class, from tensors (N, classes)."""
    yield from zip(scores.double().T, is_positive.T, strict=True)
