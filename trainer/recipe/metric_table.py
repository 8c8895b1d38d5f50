"""Table of the metrics by name, which code reads instead of their names.

To add a metric, add a row here and its function to `trainer.tasks.metrics.FUNCTIONS`. A plugin adds
both with `register_metric`. The module does not import torch, so that a typo is reported at once.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from trainer.errors import RecipeError
from trainer.recipe.schema import Recipe
from trainer.recipe.text import find_nearest

ONE_CLASS = ("classification",)
LABELS = ("multilabel",)
CLASSES = ONE_CLASS + LABELS
VALUES = ("regression",)
# Names of top-k accuracy for any k.
TOP = re.compile(r"top([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class MetricTraits:
    """Properties of a metric.

    Attributes:
        title: name on the screen.
        tasks: names of the tasks that have the metric, and whose subclasses have it too.
        meaning: description for the guide.
        larger_is_better: True if the largest value is the best.
        is_fraction: True if the metric is shown in percent.
        needs_scores: True if the metric is computed from the outputs of all samples, and not from
            sums over samples. Its memory then grows with the number of samples.
    """

    title: str
    tasks: tuple[str, ...]
    meaning: str
    larger_is_better: bool = True
    is_fraction: bool = True
    needs_scores: bool = False


def _describe_top(count: str) -> MetricTraits:
    meaning = f"share of images whose class is one of the {count} most probable; any number works"
    if count == "1":
        meaning = "accuracy"
    return MetricTraits(f"top-{count}", ONE_CLASS, meaning)


METRICS = {
    "loss": MetricTraits(
        "loss",
        CLASSES + VALUES,
        "the task's loss, without class weights and label smoothing",
        larger_is_better=False,
        is_fraction=False,
    ),
    "top1": _describe_top("1"),
    "top5": _describe_top("5"),
    "balanced_accuracy": MetricTraits(
        "balanced", ONE_CLASS, "mean recall of the classes that have held-out images"
    ),
    "precision": MetricTraits("precision", LABELS, "over all labels (micro)"),
    "recall": MetricTraits("recall", LABELS, "over all labels (micro)"),
    "f1": MetricTraits("F1", LABELS, "over all labels (micro)"),
    "precision_macro": MetricTraits("prec. macro", CLASSES, "mean precision of the classes"),
    "recall_macro": MetricTraits("rec. macro", CLASSES, "mean recall of the classes"),
    "f1_macro": MetricTraits("F1 macro", CLASSES, "mean F1 of the classes"),
    "precision_weighted": MetricTraits(
        "prec. weighted", CLASSES, "the same, weighted by the images of each class"
    ),
    "recall_weighted": MetricTraits(
        "rec. weighted", CLASSES, "the same, weighted by the images of each class"
    ),
    "f1_weighted": MetricTraits(
        "F1 weighted", CLASSES, "the same, weighted by the images of each class"
    ),
    "mcc": MetricTraits(
        "MCC",
        CLASSES,
        "Matthews correlation, -1 to 1; of labels: over all decisions",
        is_fraction=False,
    ),
    "ece": MetricTraits(
        "ECE",
        ONE_CLASS,
        "expected calibration error of the highest probability, in 15 bins of equal width",
        larger_is_better=False,
    ),
    "auroc": MetricTraits(
        "AUROC",
        CLASSES,
        "mean over the classes of the area under the ROC curve, one class against the rest",
        needs_scores=True,
    ),
    "average_precision": MetricTraits(
        "avg. prec.",
        CLASSES,
        "mean over the classes of the average precision, one class against the rest (mAP)",
        needs_scores=True,
    ),
    "mae": MetricTraits(
        "MAE", VALUES, "mean absolute error", larger_is_better=False, is_fraction=False
    ),
    "rmse": MetricTraits(
        "RMSE",
        VALUES,
        "root of the mean squared error, averaged over the values",
        larger_is_better=False,
        is_fraction=False,
    ),
    "r2": MetricTraits("R2", VALUES, "share of the variance that is explained", is_fraction=False),
}


def find_traits(name: str) -> MetricTraits | None:
    """Return the row of a metric, or None if no metric has this name."""
    match = TOP.fullmatch(name)
    if match:
        return _describe_top(match[1])
    return METRICS.get(name)


def is_fraction(name: str) -> bool:
    """Return whether a metric is shown in percent."""
    traits = find_traits(name)
    return traits is not None and traits.is_fraction


def needs_scores(name: str) -> bool:
    """Return whether a metric is computed from the outputs of all samples."""
    traits = find_traits(name)
    return traits is not None and traits.needs_scores


def check_metrics(recipe: Recipe, known_names: Collection[str] | None = None) -> None:
    """Check the names in `task.metric` and `task.metrics`.

    Args:
        recipe: the whole recipe.
        known_names: names of the task's metrics. None: those that the table has for the task.

    Raises:
        RecipeError: the task has no metric of this name.
    """
    task = recipe.task
    if known_names is None:
        known_names = [name for name, row in METRICS.items() if task.name in row.tasks]
    typed_names = {"task.metrics": task.metrics or []}
    if task.metric is not None:
        typed_names["task.metric"] = [task.metric]
    for key, names in typed_names.items():
        for name in names:
            if name in known_names or (TOP.fullmatch(name) and "top1" in known_names):
                continue
            guess = find_nearest(name, known_names)
            hint = ""
            if guess:
                hint = f"did you mean {guess}? "
            raise RecipeError(
                f"{key}={name} is not a metric of task.name={task.name}; {hint}known: "
                f"{', '.join(known_names)} (your own: plugin=my_module)"
            )
