"""`task.name=regression`: one number an image, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.tasks.classification import described
from trainer.tasks.task import Reads, Task, register_task

ROUNDING = 1e-12  # of a sum of squares, at most: equal values in batches of 1 to 256 gave up to 1e-13


@register_task("regression")
class Regression(Task):
    """Mean squared error over the values; their mean absolute error, and the share of their variance that is explained.

    R2 = 1 - sum of squared errors / sum of squared distances from the mean, the mean over the values that vary.
    """

    reads: ClassVar[Reads] = "values"
    tells: ClassVar[tuple[str, ...]] = ("loss", "mae", "r2")
    titles: ClassVar[Mapping[str, str]] = {"mae": "MAE", "r2": "R2"}

    def __init__(self, recipe: Recipe, names: Sequence[str], targets: Tensor | None = None) -> None:
        super().__init__(recipe, names, targets)
        if recipe.model.num_classes not in (None, len(self.names)):
            raise RecipeError(
                f"model.num_classes={recipe.model.num_classes}, but there are {len(self.names)} values to predict: "
                "leave it out"
            )

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """(N, values) float32; (N,) becomes (N, 1)."""
        if targets.dim() == 1:
            targets = targets[:, None]
        if targets.dim() != 2 or targets.shape[1] != len(names) or not names or targets.is_complex():
            raise ValueError(
                f"targets must be numbers, as of a table data.labels=FILE.csv, for each sample and each of the "
                f"{len(names)} names of values, found {described(targets)}"
            )
        targets = targets.to(torch.float32)
        if not torch.isfinite(targets).all():
            raise ValueError("targets must be finite numbers, found some that are not")
        return targets

    def outputs(self) -> int:
        return len(self.names)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of predictions (N, values) and targets (N, values)."""
        return mse_loss(outputs, targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs, targets = outputs.double(), targets.double()
        error = outputs - targets
        return {
            "squared": error.square().sum(0),
            "absolute": error.abs().sum(0),
            "targets": targets.sum(0),
            "targets2": targets.square().sum(0),
        }

    def metrics(self, sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
        squared = sums["squared"]
        spread = sums["targets2"] - sums["targets"].square() / count
        varies = spread > ROUNDING * sums["targets2"]  # else equal values seem to vary by what float64 rounds off
        explained = torch.where(varies, 1 - squared / spread, torch.nan)
        return {
            "loss": squared.mean().item() / count,
            "mae": sums["absolute"].mean().item() / count,
            "r2": explained.nanmean().item(),
        }

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """All values, in their own order."""
        return torch.arange(outputs.shape[1], device=outputs.device).expand_as(outputs), outputs
