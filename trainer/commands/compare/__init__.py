"""The command `compare`: measure which mode is fastest on this machine.

Each mode runs in fresh processes, as a user would start it. Repeats of all modes are interleaved,
and a table shows which differences of speed are more than noise.
"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.compare import entries
from trainer.commands.compare.comparing import FILE, Comparison
from trainer.commands.trials.engine import claim_folder
from trainer.errors import RecipeError
from trainer.launch import launching
from trainer.processes.rank import read_place
from trainer.processes.terminal import say
from trainer.recipe import Recipe, parse_positive_integer, shipped_recipes, split_arguments
from trainer.recipe import load as load_recipe
from trainer.saving.files import write_atomically


def command(words: Sequence[str]) -> int:
    """Run `python -m trainer compare` with the arguments `words` and return its exit code.

    The exit code is 0 if any entry has a speed, else that of the first entry that failed.
    """
    options, recipe_arguments = split_arguments(words, entries.OWN_ARGUMENTS)
    report = compare(options.pop("recipe", ""), words=recipe_arguments, **options)
    exit_code = 0
    for row in report["entries"]:
        if row["samples_per_sec"]:
            return 0
        exit_code = exit_code or row["exit_code"]
    if not exit_code:
        raise RecipeError(
            "no run was long enough to have a speed: raise max_steps, epochs or steps"
        )
    return exit_code


def compare(
    recipe: Recipe | str | Path | Mapping[str, Any],
    modes: Sequence[str] | str | None = None,
    *,
    words: Sequence[str] = (),
    repeats: int | str | None = None,
    nproc: int | str | None = None,
    plugin: str | None = None,
    output: str | Path | None = None,
    resume: str | None = None,
    steps: int | str | None = None,
) -> dict[str, Any]:
    """Run every entry several times in fresh processes and return the content of compare.json.

    Args:
        recipe: what `train` accepts: a name, a YAML file, a run folder, a dictionary or a recipe.
        modes: one string per entry: a mode, then arguments for this entry alone, as in
            "pipeline pipeline.schedule=streams". None: the mode of `mode=` in `words`, else all.
        words: key=value arguments for the recipe of every entry.
        repeats: timed runs of each entry. None: 5, or up to 15 if noise may still hide a difference
            of 10 %.
        nproc: ranks of the modes that use several processes. None: one per device, two on the CPU.
        plugin: a Python file or module that every run imports.
        output: folder of the comparison. None: runs/compare-<recipe>-<time>.
        resume: "auto" resumes the comparison in `output` and keeps its finished repeats.
        steps: measured steps of a run, unless max_steps or epochs in `words` set its length. None:
            about as many as take 4 s.

    Returns:
        The report, with the keys of compare.json.

    Raises:
        RecipeError: an argument is wrong, or differs from the comparison that is resumed. An entry
            that cannot run on this machine raises nothing; the report names the reason.
        FolderInUseError: the folder already holds a comparison or something else, or another
            process uses it.
        Interrupted, Preempted: stopped by Ctrl-C or SIGTERM; the tables hold all finished runs.
    """
    if isinstance(modes, str):
        modes = entries.parse_modes(modes)
    if output is not None:
        output = str(output)
    ranks = parse_positive_integer("nproc", nproc)
    measured_steps = parse_positive_integer("steps", steps)
    if read_place().launched:
        raise RecipeError(
            "compare starts its processes itself: type python -m trainer compare ... without "
            "torchrun"
        )
    if recipe in (None, ""):
        raise RecipeError(
            f"compare needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}"
        )
    if resume not in (None, "auto") or (resume and not output):
        raise RecipeError(
            "resume=auto continues the comparison in a folder: say which with output="
        )
    rows = entries.build_entries(recipe, words, modes, ranks, plugin)
    for note in entries.find_unused(recipe, rows):
        say(f"unused: {note}")
    base = load_recipe(recipe, *words)
    launching.load_plugin(plugin)
    settings = base.replace(output=None, resume=None)
    recipe_file = None
    if isinstance(recipe, str | Path):
        recipe_file = str(recipe)
    asked = {
        "recipe": recipe_file or base.to_dict(),
        "modes": None if modes is None else list(modes),
        "words": sorted(words),
        "nproc": ranks,
        "plugin": plugin,
        "steps": measured_steps,
        "repeats": parse_positive_integer("repeats", repeats),
        "settings": settings.model_dump(mode="json"),
    }
    safe_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", base.name)
    default_folder = Path(f"runs/compare-{safe_name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with claim_folder(
        output,
        default_folder,
        "comparison",
        FILE,
        asked,
        free=("repeats",),
        resume=resume is not None,
    ) as folder:
        if recipe_file is None:
            # Each run is a command, which reads its recipe from a file. A recipe that was passed
            # from Python has no file yet.
            file = folder / f"{base.name}.yaml"
            write_atomically(file, settings.to_yaml())
            recipe_file = str(file)
        return Comparison(folder, base, rows, asked, recipe_file).run()
