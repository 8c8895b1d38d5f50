"""Who would compute what: the processes, devices and shares of a batch of a planned run, on whatever machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainer.devices.assignment import assign_devices, numbered
from trainer.errors import RecipeError
from trainer.launch.topology import choose_launch
from trainer.processes import resources
from trainer.recipe import TRAITS, Recipe, checks
from trainer.recipe.shares import given, rows_of


@dataclass(frozen=True)
class Layout:
    """A recipe on its processes and devices."""

    recipe: Recipe  # its mode is the planned one
    processes: int  # ranks in all
    # that compute, in the order of ranks or of stages; cuda:0#1 is the second of several on one card
    devices: tuple[str, ...]

    @property
    def data_shares(self) -> int:
        """Parts of the global batch, or of the data."""
        return checks.data_shares(self.recipe, self.processes)

    @property
    def rows(self) -> int:
        """Images of one forward and backward pass of a shard: a pipeline cuts these into micro-batches."""
        return checks.most_rows(self.recipe, self.data_shares)

    @property
    def shares(self) -> list[int] | None:
        """The same of each rank, where the recipe gives them unequal parts."""
        return rows_of(self.recipe, self.processes) if given(self.recipe) else None

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.devices[0].partition(":")[0]

    @property
    def staged(self) -> bool:
        """Whether the model is in stages."""
        return self.recipe.traits.staged

    @property
    def schedule(self) -> str:
        return checks.schedule_of(self.recipe, self.processes)

    @property
    def workers(self) -> int:
        """Ranks or devices that hold one copy of a model in stages."""
        return checks.ranks_per_pipeline(self.recipe, self.processes) if self.processes > 1 else len(self.devices)

    @property
    def virtual(self) -> int:
        """Stages on each of them."""
        return checks.virtual_stages(self.recipe, self.schedule)

    @property
    def microbatches(self) -> list[int]:
        """The numbers of micro-batches that can be."""
        return checks.microbatch_counts(self.recipe, self.processes) if self.recipe.traits.micro_batches else [1]


def lay_out(recipe: Recipe, nproc: str | int | None = None, gpus: bool = False) -> Layout:
    """The recipe on `nproc` processes, or on as many as training would start here.

    `gpus`: where the recipe leaves devices open and none is here, on GPUs all the same. Raises RecipeError.
    """
    word = None if nproc is None else str(nproc)
    processes = choose_launch(os.environ, word, recipe, resources.cuda_count, resources.cores()).size
    checks.check_processes(recipe, processes)
    assigned = assign_devices(recipe, processes, _pretended(recipe, processes, gpus))
    names = assigned[0] if processes == 1 else [devices[0] for devices in assigned]
    return Layout(recipe, processes, tuple(numbered(names)))


def _pretended(recipe: Recipe, processes: int, gpus: bool) -> int:
    """GPUs that the planned machine has: those the recipe names, or where there are some, one a process or stage."""
    if recipe.devices == "auto":
        here = max(resources.cuda_count(), int(gpus))
        staged = recipe.traits.staged and processes == 1
        return max(here, (recipe.pipeline.stages or 2) if staged else processes) if here else 0
    if set(recipe.devices) == {"cpu"}:
        return 0
    return 1 + max((int(name.partition(":")[2] or 0) for name in recipe.devices if name != "cpu"), default=0)


def every_mode(recipe: Recipe, nproc: str | int | None = None, gpus: bool = False) -> dict[str, Layout | RecipeError]:
    """Each mode on the same number of devices, or why it cannot run like that."""
    here = resources.cuda_count()
    # One device says nothing of most modes.
    count, kind = max(2, recipe.pipeline.stages or 0, here), "cuda" if gpus or here else "cpu"
    if recipe.devices != "auto":
        count, kind = max(2, len(recipe.devices)), recipe.devices[0].partition(":")[0]
    if nproc is not None and str(nproc).isdigit():
        count = max(2, int(nproc))
    names = ["cpu"] * count if kind == "cpu" else [f"cuda:{n}" for n in range(count)]
    layouts: dict[str, Layout | RecipeError] = {}
    for mode, traits in TRAITS.items():
        try:
            if kind == "cuda" and traits.shared_memory:
                raise RecipeError("computes in the CPU's memory only, and this plan is for GPUs")
            shares = None if "shares" in traits.refuses else recipe.shares
            chosen = recipe.replace(mode=mode, devices=names[:1] if traits.single_device else names, shares=shares)
            layouts[mode] = lay_out(chosen, 1 if chosen.processes == "one" else count)
        except RecipeError as error:
            layouts[mode] = error
    return layouts
