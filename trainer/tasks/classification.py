"""Tasks `classification`, one class for each image, and `multilabel`, any number of classes."""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    one_hot,
    pad,
)

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.text import list_some
from trainer.tasks.metrics import Sums, compute, split_columns
from trainer.tasks.task import Task, register_task

# Number of most probable classes that `ranked` returns. If there are fewer classes, it returns all
# of them.
TOP_CLASSES = 5
# With fewer classes than this, top-5 accuracy is not printed: it would be high for any model.
MIN_CLASSES_FOR_TOP5 = 10
# Number of bins of the calibration error (Guo et al., arXiv:1706.04599, section 4).
BINS = 15


def class_name(text: str) -> str:
    """Normalize a class name to composed letters (Unicode NFC).

    Some file systems and programs store a letter with an accent as one character, others as two.
    """
    return unicodedata.normalize("NFC", text)


class ClassTask(Task):
    """Base of the tasks with one output for each class."""

    larger_is_better = True
    mixes = True
    # Names of the metrics that `metrics` returns in addition to the loss.
    _computed: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        recipe: Recipe,
        names: Sequence[str],
        targets: Tensor | None = None,
    ) -> None:
        super().__init__(recipe, names, targets)
        class_weights = recipe.loss.class_weights
        self._weights = dict[torch.device, Tensor]()
        if class_weights is None:
            return
        if class_weights == "balanced" and targets is not None:
            weights = self._balance_weights(targets).float()
        elif class_weights == "balanced":
            raise RecipeError(
                "loss.class_weights=balanced counts labels before the first step, and those of "
                f"data.name={recipe.data.name} are known only with its items: give the weights, "
                "loss.class_weights=[1,2,...]"
            )
        elif len(class_weights) == len(names):
            weights = torch.tensor(class_weights, dtype=torch.float32)
        else:
            raise RecipeError(
                f"loss.class_weights has {len(class_weights)} numbers, and the data {len(names)} "
                f"classes ({list_some(names)}): give one for each"
            )
        # The model has more outputs than names if model.num_classes is larger. The additional
        # outputs get weight 1.
        missing = self.outputs() - len(weights)
        padded = pad(weights, (0, missing), value=1.0)
        self._weights[torch.device("cpu")] = padded

    def outputs(self) -> int:
        return self.recipe.model.num_classes or len(self.names)

    def weights(self, device: torch.device) -> Tensor | None:
        """Return the class weights (outputs,) in float32; None without loss.class_weights."""
        if not self._weights:
            return None
        if device not in self._weights:
            cpu_weights = self._weights[torch.device("cpu")]
            # The copy blocks, because any stream may use the weights afterwards.
            self._weights[device] = cpu_weights.to(device)
        return self._weights[device]

    def _balance_weights(self, targets: Tensor) -> Tensor:
        """Compute the weights, (names,), of loss.class_weights=balanced from training targets."""
        raise NotImplementedError

    def metrics(
        self,
        sums: Sums,
        count: int,
    ) -> dict[str, float]:
        inputs = self.build_metric_inputs(sums, count)
        return {"loss": sums["loss"].item() / count, **compute(self._computed, inputs)}

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable classes and their probabilities, at most TOP_CLASSES each.

        Of equal outputs, the class with the lower index comes first, so the first class is the
        `argmax`.
        """
        # topk returns equal values in no defined order.
        order = self._select_named(outputs).sort(dim=1, descending=True, stable=True).indices
        best = order[:, :TOP_CLASSES]
        return best, self.to_probabilities(outputs).gather(1, best)

    def _select_named(self, outputs: Tensor) -> Tensor:
        """Return the outputs of the classes that can be predicted, (N, classes)."""
        return outputs


@register_task("classification")
class Classification(ClassTask):
    """Cross-entropy with optional label smoothing and class weights; top-1 and top-5 accuracy."""

    metric = "top1"
    _computed = ("top1", "top5")
    tells = ("loss", *_computed)
    uses = ("label_smoothing", "class_weights")

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        has_numbers = targets.is_floating_point() or targets.is_complex()
        if targets.dim() != 1 or has_numbers:
            raise ValueError(
                f"labels must be whole numbers, one for each sample, found {described(targets)}"
            )
        check_range(targets, names)
        if len(names) < 2:
            raise ValueError(
                f"{len(names)} class names are given, and a classifier needs at least 2"
            )
        return targets.to(torch.int64)

    def _balance_weights(self, targets: Tensor) -> Tensor:
        """Compute weights that are equal in total for all classes with samples.

        The weight is N / (number of classes with samples x samples of the class), as in
        scikit-learn's `compute_class_weight`.
        """
        counts = torch.bincount(targets, minlength=len(self.names)).double()
        present_classes = counts.count_nonzero()
        weights = counts.sum() / (present_classes * counts)
        # The weight of a class without samples would be infinite.
        return torch.where(counts > 0, weights, 0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the weighted cross-entropy with label smoothing.

        The smoothed loss of a sample is multiplied by the weight of its class. The loss of a mixed
        target is the sum over its classes. torch's own `weight` is not used, because it weights the
        smoothing by the weights of all classes, and divides by the weights of the batch, which
        differ between micro-batches.

        Args:
            outputs: logits (N, classes).
            targets: class indices (N,), or shares of the classes (N, classes).
        """
        smoothing = self.recipe.loss.label_smoothing
        weights = self.weights(outputs.device)
        if weights is None:
            return cross_entropy(outputs, targets, label_smoothing=smoothing)
        if targets.is_floating_point():
            shares = targets
        else:
            shares = one_hot(targets, outputs.shape[1])
        weighted = shares * weights
        mean_weight = weighted.mean(1, keepdim=True)
        smoothed = weighted.lerp(mean_weight, smoothing)
        return cross_entropy(outputs, smoothed)

    def soft_loss(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """Compute the Kullback-Leibler divergence of softened probabilities, without class weights.

        The factor temperature^2 keeps the gradients at the scale of the other loss (Hinton et al.,
        arXiv:1503.02531, section 2).
        """
        student = (outputs / temperature).log_softmax(1)
        teacher = (taught / temperature).log_softmax(1)
        divergence = kl_div(student, teacher, reduction="batchmean", log_target=True)
        return temperature**2 * divergence

    def label_probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the probability of each label, (N,)."""
        losses = cross_entropy(outputs.float(), targets, reduction="none")
        # Tiny probabilities remain distinct in float64, so that samples can be sorted by them.
        return (-losses).double().exp()

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Sum the cross-entropy without smoothing and weights, and count correct predictions.

        `actual` (outputs,) counts the samples of each class, `predicted` (outputs,) counts the
        predictions of each class, and `correct` (outputs,) those that are right. `ranks`
        (outputs + 1,) counts the samples by the position of their label among the predictions, 0
        for a right prediction. `calibration` (BINS,) sums the differences between hit (0 or 1) and
        highest probability over the samples of each bin.
        """
        label_logits = outputs.gather(1, targets[:, None])
        indices = torch.arange(outputs.shape[1], device=outputs.device)
        # Compute the position of the label in the order of `ranked`, without sorting. If logits
        # are equal, the class with the lower index comes first. A NaN comes before the label,
        # because NaN <= x is false.
        is_larger = ~(outputs <= label_logits)
        is_before = indices < targets[:, None]
        wins_tie = (outputs == label_logits) & is_before
        rank = (is_larger | wins_tie).sum(1)
        zeros = torch.zeros(outputs.shape[1], dtype=torch.int64, device=outputs.device)
        ones = torch.ones_like(targets)
        is_hit = rank == 0
        confidence = outputs.softmax(1).amax(1).double()
        # A bin contains its upper edge. A NaN falls into any bin, and makes the error NaN.
        gaps = is_hit.double() - confidence
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        return {
            "loss": cross_entropy(outputs, targets, reduction="sum"),
            "actual": zeros.index_add(0, targets, ones),
            "predicted": zeros.index_add(0, outputs.argmax(1), ones),
            "correct": zeros.index_add(0, targets, is_hit.long()),
            # If the output of the label itself is NaN, its rank is the number of classes.
            "ranks": pad(zeros, (0, 1)).index_add(0, rank, ones),
            # `index_add` of floats would add in another order in each run on a GPU.
            "calibration": (one_hot(bins, BINS) * gaps[:, None]).sum(0),
        }

    def shown(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        metrics = dict(metrics)
        typed = self.recipe.task
        is_selected = "top5" in (typed.metric, *(typed.metrics or ()))
        if len(self.names) < MIN_CLASSES_FOR_TOP5 and not is_selected:
            metrics.pop("top5", None)
        return super().shown(metrics)

    def split_classes(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        classes = torch.arange(outputs.shape[1])
        return split_columns(outputs.double().softmax(1), targets[:, None] == classes)

    def to_probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def average(self, views: Tensor) -> Tensor:
        return views.softmax(2).mean(0).log()

    def shares(self, targets: Tensor) -> Tensor:
        return one_hot(targets, self.outputs()).float()


def check_range(labels: Tensor, names: Sequence[str]) -> None:
    """Raise ValueError for labels (N,) that are not indices of `names`."""
    if not len(labels):
        return
    lowest = int(labels.min())
    highest = int(labels.max())
    if lowest < 0 or highest >= len(names):
        raise ValueError(
            f"labels must be 0 to {len(names) - 1}, one for each of the {len(names)} class names, "
            f"found {lowest} to {highest}"
        )


def described(targets: Tensor) -> str:
    """Format type and shape, as in `float32 (8, 1)`."""
    return f"{targets.dtype} {tuple(targets.shape)}".removeprefix("torch.")


@register_task("multilabel")
class Multilabel(ClassTask):
    """Binary cross-entropy, averaged over the classes; F1 at probability 0.5.

    F1 = 2 TP / (2 TP + FP + FN), and 0 if there are neither labels nor predictions (van Rijsbergen,
    "Information Retrieval", 1979, chapter 7). `f1` is computed from counts over all labels (micro),
    `f1_macro` is the mean of the F1 of each class.
    """

    reads = "classes"
    metric = "f1"
    _computed = ("f1", "f1_macro")
    tells = ("loss", *_computed)
    uses = ("class_weights",)

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """Return labels of 0 and 1, (N, classes) float32; class indices (N,) become one-hot."""
        if not names:
            raise ValueError("no class names are given, and it takes at least 1")
        is_integer = not targets.is_floating_point() and targets.dtype != torch.bool
        if targets.dim() == 1 and is_integer:
            check_range(targets, names)
            targets = one_hot(targets.to(torch.int64), len(names))
        has_label_per_name = targets.dim() == 2 and targets.shape[1] == len(names)
        if not has_label_per_name or targets.is_complex():
            raise ValueError(
                f"labels must be 0 or 1 for each sample and each of the {len(names)} class names, "
                f"found {described(targets)}"
            )
        targets = targets.to(torch.float32)
        is_label = (targets == 0) | (targets == 1)
        if not is_label.all():
            raise ValueError(f"labels must be 0 or 1, found {targets.min():g} to {targets.max():g}")
        return targets

    def _balance_weights(self, targets: Tensor) -> Tensor:
        """Compute weights that make the presence of each label count as much as its absence.

        An absence has weight 1. A label that all samples have, or that no sample has, gets weight
        1 too.
        """
        labels = targets.double()
        ratio = (1 - labels).sum(0) / labels.sum(0)
        return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of logits (N, outputs) and labels (N, classes) between 0 and 1."""
        weights = self.weights(outputs.device)
        if weights is not None:
            weights = self._select_named(weights)
        logits = self._select_named(outputs)
        return binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs = self._select_named(outputs)
        # A logit above 0 is a probability above 0.5.
        predicted = outputs > 0
        labels = targets > 0.5
        return {
            # `binary_cross_entropy_with_logits` returns the mean over samples and classes.
            # `metrics` needs a sum over samples.
            "loss": binary_cross_entropy_with_logits(outputs, targets) * len(targets),
            "actual": labels.sum(0),
            "predicted": predicted.sum(0),
            "correct": (predicted & labels).sum(0),
        }

    def to_probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def average(self, views: Tensor) -> Tensor:
        return views.sigmoid().mean(0).logit()

    def split_classes(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return split_columns(self._select_named(outputs), targets > 0.5)

    def shares(self, targets: Tensor) -> Tensor:
        return targets

    def _select_named(self, outputs: Tensor) -> Tensor:
        """Drop the outputs that a larger model.num_classes adds."""
        return outputs[..., : len(self.names)]
