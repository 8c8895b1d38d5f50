"""Choose the processes and devices of a planned run, and how it divides a batch.

The planned devices need not exist on this machine.
"""

import os
from itertools import chain

from trainer.devices.assignment import assign_devices, count_named_cards, number_devices
from trainer.errors import RecipeError
from trainer.launch.topology import choose_launch
from trainer.processes import resources
from trainer.recipe import TRAITS, Recipe, checks
from trainer.recipe.layout import Layout


def lay_out(recipe: Recipe, nproc: str | int | None = None, gpus: bool = False) -> Layout:
    """Assign the recipe to processes and devices.

    Args:
        recipe: recipe to plan.
        nproc: number of processes. None: as many as training would start on this machine.
        gpus: whether to plan for GPUs, even without a GPU here, if the recipe has devices=auto.

    Raises:
        RecipeError: training would refuse the recipe or `nproc`.
    """
    if nproc is not None:
        nproc = str(nproc)
    processes = choose_launch(os.environ, nproc, recipe).size
    checks.check_processes(recipe, processes)
    assigned = assign_devices(recipe, processes, _count_planned_gpus(recipe, processes, gpus))
    # A single process may use several devices; each of several processes uses one.
    return Layout(recipe, processes, tuple(number_devices(chain.from_iterable(assigned))))


def _count_planned_gpus(recipe: Recipe, processes: int, gpus: bool) -> int:
    """Return the number of GPUs that the planned machine has.

    If the recipe lists devices, the machine has just enough GPUs for them. With devices=auto, there
    is at least one GPU for each process or stage if this machine has a GPU or `gpus` is true, and
    none otherwise.
    """
    if recipe.devices != "auto":
        return count_named_cards(recipe.devices)
    available = max(resources.count_cuda_devices(), int(gpus))
    if not available:
        return 0
    needed = processes
    if recipe.traits.staged and processes == 1:
        needed = recipe.pipeline.stages or 2
    return max(available, needed)


def lay_out_modes(
    recipe: Recipe, nproc: str | int | None, gpus: bool = False
) -> dict[str, Layout | RecipeError]:
    """Return each mode's layout on the same devices, or the error of a mode that cannot run there.

    A mode that computes on a single device gets the first one.
    """
    available = resources.count_cuda_devices()
    # Use at least two devices: most modes differ from `single` only on several devices.
    count = max(2, recipe.pipeline.stages or 0, available)
    kind = "cuda" if gpus or available else "cpu"
    if recipe.devices != "auto":
        count = max(2, len(recipe.devices))
        kind = recipe.devices[0].partition(":")[0]
    if nproc is not None and str(nproc).isdigit():
        count = max(2, int(nproc))
    names = ["cpu"] * count
    if kind != "cpu":
        names = [f"cuda:{n}" for n in range(count)]
    layouts: dict[str, Layout | RecipeError] = {}
    for mode, traits in TRAITS.items():
        try:
            if kind == "cuda" and traits.shared_memory:
                raise RecipeError("computes in the CPU's memory only, and this plan is for GPUs")
            shares = None if "shares" in traits.refuses else recipe.shares
            devices = names[:1] if traits.single_device else names
            changed = recipe.replace(mode=mode, devices=devices, shares=shares)
            layouts[mode] = lay_out(changed, 1 if changed.processes == "one" else count)
        except RecipeError as error:
            layouts[mode] = error
    return layouts
