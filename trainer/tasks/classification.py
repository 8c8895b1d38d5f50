"""`task.name=classification`, one class an image, and `task.name=multilabel`, any number of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div, one_hot, pad

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.tasks.task import Reads, Task, register_task

TOP = 5  # classes in a prediction
FEW = 10  # of fewer classes, top-5 says little


def class_name(text: str) -> str:
    """A class's name as all have it: composed (NFC), for file systems and programs write one letter in two ways."""
    return unicodedata.normalize("NFC", text)


class OfClasses(Task):
    """A task with an output for each class."""

    def __init__(self, recipe: Recipe, names: Sequence[str], targets: Tensor | None = None) -> None:
        super().__init__(recipe, names, targets)
        given, self._weights = recipe.loss.class_weights, dict[torch.device, Tensor]()
        if given is None:
            return
        if given == "balanced" and targets is not None:
            own = self._balanced(targets).float()
        elif given == "balanced":
            raise RecipeError(
                f"loss.class_weights=balanced counts labels before the first step, and those of data.name="
                f"{recipe.data.name} are known only with its items: give the weights, loss.class_weights=[1,2,...]"
            )
        elif len(given) == len(names):
            own = torch.tensor(given, dtype=torch.float32)
        else:
            raise RecipeError(
                f"loss.class_weights has {len(given)} numbers, and the data {len(names)} classes "
                f"({', '.join(names[:6])}{', ...' * (len(names) > 6)}): give one for each"
            )
        self._weights[torch.device("cpu")] = pad(own, (0, self.outputs() - len(own)), value=1.0)

    def outputs(self) -> int:
        return self.recipe.model.num_classes or len(self.names)

    def weights(self, device: torch.device) -> Tensor | None:
        """(outputs,) float32; None where all count alike."""
        if not self._weights:
            return None
        if device not in self._weights:  # copied once, and waited for: any stream may use it
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        return self._weights[device]

    def _balanced(self, targets: Tensor) -> Tensor:
        """(names,): of loss.class_weights=balanced, from the training targets."""
        raise NotImplementedError


@register_task("classification")
class Classification(OfClasses):
    """Cross-entropy, with label smoothing and class weights where the recipe has them; top-1 and top-5 accuracy."""

    metric: ClassVar[str] = "top1"
    larger_is_better: ClassVar[bool] = True
    tells: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5")
    titles: ClassVar[Mapping[str, str]] = {"top1": "top-1", "top5": "top-5"}
    fractions: ClassVar[tuple[str, ...]] = ("top1", "top5")
    mixes: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("label_smoothing", "class_weights")

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
            raise ValueError(f"labels must be whole numbers, one for each sample, found {described(targets)}")
        check_range(targets, names)
        if len(names) < 2:
            raise ValueError(f"{len(names)} class names are given, and a classifier needs at least 2")
        return targets.to(torch.int64)

    def _balanced(self, targets: Tensor) -> Tensor:
        """All classes that have samples count alike, and a sample 1 on average: N / (classes x samples of the class),
        as scikit-learn does it."""
        counts = torch.bincount(targets, minlength=len(self.names)).double()
        return torch.where(counts > 0, counts.sum() / (counts.count_nonzero() * counts), 0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits (N, classes) and class indices (N,) or shares (N, classes).

        A sample's smoothed loss times the weight of its class; of shares the sum of those of its classes. torch weighs
        smoothing by the weights of all classes, and divides by the batch's weights, which differ in each of its parts.
        """
        smoothing, weights = self.recipe.loss.label_smoothing, self.weights(outputs.device)
        if weights is None:
            return cross_entropy(outputs, targets, label_smoothing=smoothing)
        shares = targets if targets.is_floating_point() else one_hot(targets, outputs.shape[1])
        weighted = shares * weights
        return cross_entropy(outputs, weighted.lerp(weighted.mean(1, keepdim=True), smoothing))

    def soft_loss(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """The Kullback-Leibler divergence of softened probabilities, whatever the weights of classes."""
        ours, theirs = ((logits / temperature).log_softmax(1) for logits in (outputs, taught))
        return temperature**2 * kl_div(ours, theirs, reduction="batchmean", log_target=True)

    def label_probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Small ones differ too, as a float32 could not."""
        return (-cross_entropy(outputs.float(), targets, reduction="none")).double().exp()

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The plain cross-entropy, without smoothing and weights, and how many of the best 1 and 5 are right.

        And how many samples are of each class, and are predicted as it.
        """
        own, places = outputs.gather(1, targets[:, None]), torch.arange(outputs.shape[1], device=outputs.device)
        before = ~(outputs <= own) | ((outputs == own) & (places < targets[:, None]))  # as in `largest`, unsorted
        rank = before.sum(1)
        none, ones = torch.zeros(outputs.shape[1], dtype=torch.int64, device=outputs.device), torch.ones_like(targets)
        return {
            "loss": cross_entropy(outputs, targets, reduction="sum"),
            "correct1": (rank == 0).sum(),
            "correct5": (rank < TOP).sum(),
            "actual": none.index_add(0, targets, ones),
            "predicted": none.index_add(0, outputs.argmax(1), ones),
        }

    def metrics(self, sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
        loss, correct1, correct5 = (sums[name].item() / count for name in ("loss", "correct1", "correct5"))
        return {"loss": loss, "top1": correct1, "top5": correct5}

    def shown(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        few = len(self.names) < FEW
        return super().shown({name: value for name, value in metrics.items() if not (few and name == "top5")})

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable classes with their probabilities."""
        best = largest(outputs, TOP)
        return best, outputs.softmax(1).gather(1, best)

    def shares(self, targets: Tensor) -> Tensor:
        return one_hot(targets, self.outputs()).float()


def largest(outputs: Tensor, count: int) -> Tensor:
    """The places of the largest outputs (N, classes), the largest first; of equal ones the first, as argmax has it."""
    return outputs.sort(dim=1, descending=True, stable=True).indices[:, :count]


def check_range(labels: Tensor, names: Sequence[str]) -> None:
    """Raises ValueError for labels (N,) that are not the place of a name."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
        raise ValueError(
            f"labels must be 0 to {len(names) - 1}, one for each of the {len(names)} class names, "
            f"found {int(labels.min())} to {int(labels.max())}"
        )


def described(targets: Tensor) -> str:
    return f"{targets.dtype} {tuple(targets.shape)}".removeprefix("torch.")


@register_task("multilabel")
class Multilabel(OfClasses):
    """Binary cross-entropy, the mean over the classes; F1 at probability 0.5, over all labels and a class at a time.

    F1 = 2 TP / (2 TP + FP + FN), and 0 where there is neither a label nor a prediction (van Rijsbergen, "Information
    Retrieval", 1979, chapter 7; macro: the mean over the classes).
    """

    reads: ClassVar[Reads] = "classes"
    metric: ClassVar[str] = "f1"
    larger_is_better: ClassVar[bool] = True
    tells: ClassVar[tuple[str, ...]] = ("loss", "f1", "f1_macro")
    titles: ClassVar[Mapping[str, str]] = {"f1": "F1", "f1_macro": "F1 macro"}
    fractions: ClassVar[tuple[str, ...]] = ("f1", "f1_macro")
    mixes: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("class_weights",)

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """(N, classes) float32 of 0 and 1; class indices (N,) become one label each."""
        if not names:
            raise ValueError("no class names are given, and it takes at least 1")
        if targets.dim() == 1 and not targets.is_floating_point() and targets.dtype != torch.bool:
            check_range(targets, names)
            targets = one_hot(targets.to(torch.int64), len(names))
        if targets.dim() != 2 or targets.shape[1] != len(names) or targets.is_complex():
            raise ValueError(
                f"labels must be 0 or 1 for each sample and each of the {len(names)} class names, "
                f"found {described(targets)}"
            )
        targets = targets.to(torch.float32)
        if not ((targets == 0) | (targets == 1)).all():
            raise ValueError(f"labels must be 0 or 1, found {targets.min():g} to {targets.max():g}")
        return targets

    def _balanced(self, targets: Tensor) -> Tensor:
        """A label counts as much as all absences together, where an absence counts 1; 1 where all samples have the
        label, or none."""
        labels = targets.double()
        ratio = (1 - labels).sum(0) / labels.sum(0)
        return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits (N, classes) and labels (N, classes) between 0 and 1."""
        weights = self.weights(outputs.device)
        weights = None if weights is None else self._of_names(weights)
        return binary_cross_entropy_with_logits(self._of_names(outputs), targets, pos_weight=weights)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs = self._of_names(outputs)
        predicted, labels = outputs > 0, targets > 0.5
        return {
            "loss": binary_cross_entropy_with_logits(outputs, targets) * len(targets),
            "both": (predicted & labels).sum(0),
            "either": predicted.sum(0) + labels.sum(0),
        }

    def metrics(self, sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
        both, either = sums["both"], sums["either"]
        micro = 2 * both.sum() / either.sum().clamp_min(1)
        macro = (2 * both / either.clamp_min(1)).mean()
        return {"loss": sums["loss"].item() / count, "f1": micro.item(), "f1_macro": macro.item()}

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable classes with the probability of each."""
        best = largest(self._of_names(outputs), TOP)
        return best, outputs.sigmoid().gather(1, best)

    def shares(self, targets: Tensor) -> Tensor:
        return targets

    def _of_names(self, outputs: Tensor) -> Tensor:
        """Without the outputs that a larger model.num_classes adds."""
        return outputs[..., : len(self.names)]
