"""`python -m trainer plan`: what a run would take and how fast it would be, without running it.

The model is built of shapes alone, so a plan for eight GPUs takes seconds on a laptop. Nothing is launched, save by
`measured=here`, which computes for a few seconds. Wrong words are refused before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.commands.plan.planned_layout import lay_out
from trainer.errors import RecipeError
from trainer.launch import launching
from trainer.processes.terminal import say
from trainer.recipe import Recipe
from trainer.recipe.known_names import check_names
from trainer.recipe.recipe_files import split_words
from trainer.telemetry import readable

OWN = ("nproc", "memory", "measured", "bandwidth")
JSON = "--json"


def command(words: Sequence[str]) -> int:
    """Print the plan that the words ask for; its exit code."""
    typed = [word for word in words if word != JSON]
    given, rest = split_words(typed, ("recipe", "plugin", *OWN))
    chosen = recipes.load(given.get("recipe"), *rest)
    if "plugin" not in given:
        check_names(chosen)
    options = {key: given.get(key) for key in ("plugin", *OWN)}
    again = [word for word in typed if word.partition("=")[0] not in OWN]
    found = plan(chosen, **options, every=not any(word.startswith("mode=") for word in rest), words=again)
    if JSON in words:
        print(json.dumps(found, indent=2))
    else:
        from trainer.commands.plan.plan_page import page_of

        say(page_of(found))
    return 0


def plan(
    recipe: Recipe | str | Path | Mapping[str, Any],
    nproc: int | str | None = None,
    memory: int | str | None = None,
    measured: str | None = None,
    bandwidth: float | str | None = None,
    plugin: str | None = None,
    every: bool = False,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """What training the recipe would take.

    Args:
        recipe: with the mode to plan: as for `train`, a name, a YAML file, a run folder, a dictionary or a recipe.
        nproc: processes, as in training; without, as many as training would start here.
        memory: of each device, in bytes or as in "24GiB", which are GPUs where the recipe does not say `devices=[cpu]`
            and nothing measured says what computes; without, that of this machine's.
        measured: "here" computes for a few seconds, and predicts the speed from that.
        bandwidth: between devices, in bytes a second or as in "10GB/s"; without, as measured.
        plugin: the user's own module, which registers models and data sets.
        every: add a line for each mode on as many devices.
        words: of the command line, for the commands to type.

    Returns:
        What `python -m trainer plan --json` prints: sizes in bytes, times in seconds, None for what is not known.

    Raises:
        RecipeError: training would refuse it on a machine that has all the devices; or an amount makes no sense.
        SetupError: what is measured is not there, or training would miss it on every machine.
    """
    if recipe is None:
        raise RecipeError("plan() needs a recipe, as in plan('digits')")
    recipe = recipe if isinstance(recipe, Recipe) else recipes.load(recipe)
    for key, amount in (("memory", memory), ("bandwidth", bandwidth)):
        if not isinstance(amount, int | float | str | None):
            raise RecipeError(f"{key}= is a number, or text as in '24GiB', not {type(amount).__name__}")
    if measured not in (None, "here"):
        raise RecipeError(f"measured={str(measured)[:80]}: a speed is predicted from this machine's, by measured=here")
    room = int(readable.parse_amount("memory", memory)) if isinstance(memory, str) else memory
    speed = readable.parse_amount("bandwidth", bandwidth) if isinstance(bandwidth, str) else bandwidth
    layout = lay_out(recipe, nproc, gpus=room is not None and measured is None)
    launching.load_plugin(plugin)
    from trainer.commands.plan.summary import summarise

    return summarise(layout, nproc, room, measured, speed, plugin, every, words)
