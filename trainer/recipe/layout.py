"""Describe how a planned run divides its model and its batches over processes and devices."""

from dataclasses import dataclass

from trainer.recipe import checks
from trainer.recipe.schema import Recipe
from trainer.recipe.shares import count_rows, fixed_shares


@dataclass(frozen=True)
class Layout:
    """A recipe with the processes and devices of its run.

    Attributes:
        recipe: The recipe of the planned run.
        processes: Number of ranks.
        devices: Names of the devices, in the order of ranks or of stages. cuda:0#1 is the second
            rank or stage on cuda:0.
    """

    recipe: Recipe
    processes: int
    devices: tuple[str, ...]

    @property
    def data_shares(self) -> int:
        """Number of local batches in a global batch."""
        return checks.count_local_batches(self.recipe, self.processes)

    @property
    def rows(self) -> int:
        """Number of images in the largest micro-batch of any rank, before a pipeline divides it."""
        return checks.count_largest_rows(self.recipe, self.data_shares)

    @property
    def shares(self) -> list[int] | None:
        """Number of images in a micro-batch on each rank; None unless `recipe.shares` is a list."""
        if fixed_shares(self.recipe):
            return count_rows(self.recipe, self.processes)
        return None

    @property
    def kind(self) -> str:
        """Type of all devices: "cpu" or "cuda"."""
        return self.devices[0].partition(":")[0]

    @property
    def staged(self) -> bool:
        """Whether the model is cut into stages."""
        return self.recipe.traits.staged

    @property
    def schedule(self) -> str:
        return checks.resolve_schedule(self.recipe, self.processes)

    @property
    def workers(self) -> int:
        """Number of ranks, or of devices of a single process, that share the stages of a model."""
        if self.processes > 1:
            return checks.ranks_per_pipeline(self.recipe, self.processes)
        return len(self.devices)

    @property
    def virtual(self) -> int:
        """Number of stages on each worker."""
        return checks.virtual_stages(self.recipe, self.schedule)

    @property
    def microbatches(self) -> list[int]:
        """Numbers of micro-batches that the recipe allows."""
        if self.recipe.traits.micro_batches:
            return checks.microbatch_counts(self.recipe, self.processes)
        return [1]
