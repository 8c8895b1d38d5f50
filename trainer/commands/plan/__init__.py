"""The command `plan`: what a run needs and how fast it would be, without running it.

The model has shapes but no values, so a plan for eight GPUs takes seconds on a laptop. Only
`measured=here` starts processes, which compute for a few seconds. Arguments are checked before
torch is imported.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.commands.plan.planned_layout import lay_out
from trainer.errors import RecipeError
from trainer.launch import launching
from trainer.processes.terminal import say
from trainer.recipe import Recipe, split_arguments
from trainer.recipe.checks import check_names
from trainer.telemetry import readable

OWN_ARGUMENTS = ("nproc", "memory", "measured", "bandwidth")
JSON = "--json"


def command(words: Sequence[str]) -> int:
    """Run `python -m trainer plan` with the arguments `words` and return its exit code."""
    arguments = [word for word in words if word != JSON]
    options, recipe_arguments = split_arguments(arguments, ("recipe", "plugin", *OWN_ARGUMENTS))
    source = options.pop("recipe", None)
    recipe = recipes.load(source, *recipe_arguments)
    if "plugin" not in options:
        check_names(recipe)
    # A plan without mode= compares all modes.
    has_mode = any(word.startswith("mode=") for word in recipe_arguments)
    # The plan shows commands that start training, and training does not accept these options.
    # `list_commands` adds an `nproc=` of its own.
    training_arguments = [word for word in arguments if word.partition("=")[0] not in OWN_ARGUMENTS]
    content = plan(recipe, **options, every=not has_mode, words=training_arguments)
    if JSON in words:
        print(json.dumps(content, indent=2))
    else:
        from trainer.commands.plan.plan_page import render_page

        for note in recipes.notes_on_idle(source, *recipe_arguments):
            if has_mode or " with mode=" not in note:
                say(f"unused: {note}")
        say(render_page(content))
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
    """Compute what training a recipe needs, and how fast it would be.

    Args:
        recipe: what `train` accepts: a name, a YAML file, a run folder, a dictionary or a recipe.
            Its mode is planned.
        nproc: number of processes. None: as many as training would start on this machine.
        memory: memory of each device, in bytes or as in "24GiB". The devices are then GPUs, unless
            the recipe says `devices=[cpu]` or `measured` is set. None: the memory of this machine's
            devices.
        measured: "here" computes for a few seconds and predicts the speed from that. None: the
            speed is not predicted.
        bandwidth: bandwidth between devices, in bytes per second or as in "10GB/s". None: the
            measured bandwidth, if any.
        plugin: the user's own module, which registers models and data sets.
        every: whether to add a short plan of each mode on the same number of devices.
        words: arguments of the command line, for the commands that the plan shows.

    Returns:
        What `python -m trainer plan --json` prints: sizes in bytes, times in seconds. None means
        that a value is unknown, was not requested, or does not apply to the mode.

    Raises:
        RecipeError: training would refuse the recipe even on a machine that has the planned
            devices, or an argument is invalid.
        SetupError: a device to measure is missing, or the data cannot be read.
    """
    if recipe is None:
        raise RecipeError("plan() needs a recipe, as in plan('digits')")
    if not isinstance(recipe, Recipe):
        recipe = recipes.load(recipe)
    if recipe.model.probe:
        raise RecipeError(
            "plan counts passes through whole models, and model.probe=true trains one layer: type "
            "model.probe=false model.freeze=-1 for what an epoch without stored features needs"
        )
    for key, amount in (("memory", memory), ("bandwidth", bandwidth)):
        if not isinstance(amount, int | float | str | None):
            raise RecipeError(
                f"{key}= is a number, or text as in '24GiB', not {type(amount).__name__}"
            )
    if measured not in (None, "here"):
        raise RecipeError(
            f"measured={str(measured)[:80]} must be measured=here, which predicts the speed from "
            "this machine's"
        )
    if isinstance(memory, str):
        memory = int(readable.parse_amount("memory", memory))
    if isinstance(bandwidth, str):
        bandwidth = readable.parse_amount("bandwidth", bandwidth)
    layout = lay_out(recipe, nproc, gpus=memory is not None and measured is None)
    launching.load_plugin(plugin)
    # Imported only now: the module imports torch, which takes seconds.
    from trainer.commands.plan.summary import summarize

    return summarize(layout, nproc, memory, measured, bandwidth, plugin, every, words)
