"""Task `regression`: one or more numbers for each image."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.tasks.classification import described
from trainer.tasks.metrics import Sums
from trainer.tasks.task import Task, register_task

# A value counts as constant, and is left out of R2, if the variance of its targets is at most this
# fraction of their mean square. The variance of equal targets should be 0, but rounding in float64
# leads to fractions of up to 1e-13 (measured in batches of 1 to 256).
ROUNDING = 1e-12


@register_task("regression")
class Regression(Task):
    """Mean squared error; mean absolute error and R2 as metrics.

    R2 = 1 - sum of squared errors / sum of squared distances from the mean, averaged over the
    values that vary.
    """

    reads = "values"
    tells = ("loss", "mae", "r2")

    def __init__(
        self,
        recipe: Recipe,
        names: Sequence[str],
        targets: Tensor | None = None,
    ) -> None:
        super().__init__(recipe, names, targets)
        if recipe.model.num_classes not in (None, len(self.names)):
            raise RecipeError(
                f"model.num_classes={recipe.model.num_classes}, but there are {len(self.names)} "
                "values to predict: leave it out"
            )

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """Return finite targets (N, values) in float32; (N,) becomes (N, 1)."""
        if targets.dim() == 1:
            targets = targets[:, None]
        has_value_per_name = targets.dim() == 2 and targets.shape[1] == len(names)
        if not has_value_per_name or not names or targets.is_complex():
            raise ValueError(
                "targets must be numbers, as of a table data.labels=FILE.csv, for each sample and "
                f"each of the {len(names)} names of values, found {described(targets)}"
            )
        targets = targets.to(torch.float32)
        if not torch.isfinite(targets).all():
            raise ValueError("targets must be finite numbers, found some that are not")
        return targets

    def outputs(self) -> int:
        return len(self.names)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean squared error of predictions and targets, both (N, values)."""
        return mse_loss(outputs, targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        # Compute in float64: in float32, the difference of two large sums in `metrics` could lose
        # all significant digits.
        outputs = outputs.double()
        targets = targets.double()
        error = outputs - targets
        return {
            "squared": error.square().sum(0),
            "absolute": error.abs().sum(0),
            "targets": targets.sum(0),
            "targets2": targets.square().sum(0),
        }

    def metrics(
        self,
        sums: Sums,
        count: int,
    ) -> dict[str, float]:
        squared = sums["squared"]
        squared_sum = sums["targets"].square()
        spread = sums["targets2"] - squared_sum / count
        # Rounding in float64 can make the spread of equal values differ from 0.
        varies = spread > ROUNDING * sums["targets2"]
        explained = torch.where(varies, 1 - squared / spread, torch.nan)
        return {
            "loss": squared.mean().item() / count,
            "mae": sums["absolute"].mean().item() / count,
            "r2": explained.nanmean().item(),
        }

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index and the prediction of each value, in their original order."""
        indices = torch.arange(outputs.shape[1], device=outputs.device)
        return indices.expand_as(outputs), outputs
