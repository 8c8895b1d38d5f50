"""`task.name=multilabel`: any number of classes an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from trainer.recipe import Recipe
from trainer.tasks.classification import TOP, check_range, described, given_weights, known
from trainer.tasks.task import OnDevices, Reads, Task, register_task


@register_task("multilabel")
class Multilabel(Task):
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

    def __init__(self, recipe: Recipe, names: Sequence[str], targets: Tensor | None = None) -> None:
        super().__init__(recipe, names, targets)
        weights = self._weights(targets)
        self.weights = None if weights is None else OnDevices(weights)

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """(N, classes) float32 of 0 and 1; class indices (N,) become one label each."""
        if not names:
            raise ValueError("no class names are given, and it takes at least 1")
        if targets.dim() == 1 and not targets.is_floating_point() and targets.dtype != torch.bool:
            check_range(targets, names)
            targets = one_hot(targets.to(torch.int64), len(names))
        if targets.dim() != 2 or targets.shape[1] != len(names):
            raise ValueError(
                f"labels must be 0 or 1 for each sample and each of the {len(names)} class names, "
                f"found {described(targets)}"
            )
        targets = targets.to(torch.float32)
        if not ((targets == 0) | (targets == 1)).all():
            raise ValueError(f"labels must be 0 or 1, found {targets.min():g} to {targets.max():g}")
        return targets

    def outputs(self) -> int:
        return self.recipe.model.num_classes or len(self.names)

    def _weights(self, targets: Tensor | None) -> Tensor | None:
        """(classes,): the weight of a label, beside 1 of its absence. `balanced`: as much as all absences together."""
        if self.recipe.loss.class_weights != "balanced":
            return given_weights(self.recipe, self.names)
        labels = known(self.recipe, targets).double()
        present = labels.sum(0)
        return ((len(labels) - present) / present.clamp_min(1)).float()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits (N, classes) and labels (N, classes) between 0 and 1."""
        weights = None if self.weights is None else self.weights.on(outputs.device)
        return binary_cross_entropy_with_logits(self._of_names(outputs), targets, pos_weight=weights)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self._of_names(outputs), targets, reduction="none").mean(1)

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
        best = self._of_names(outputs).sigmoid().topk(min(TOP, len(self.names)))
        return best.indices, best.values

    def shares(self, targets: Tensor) -> Tensor:
        return targets

    def _of_names(self, outputs: Tensor) -> Tensor:
        """Without the outputs that a larger model.num_classes adds."""
        return outputs[:, : len(self.names)]
