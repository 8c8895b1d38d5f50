"""Which mode is fastest on this machine: every mode in fresh processes, repeats interleaved, and an honest table.

Each mode runs as a user would start it, in a process of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.compare import entries
from trainer.commands.compare.comparing import FILE, Comparison
from trainer.commands.trials.engine import claim
from trainer.errors import RecipeError
from trainer.launch import launching
from trainer.processes.rank import place
from trainer.recipe import Recipe, shipped_recipes
from trainer.recipe import load as load_recipe
from trainer.recipe.recipe_files import positive_integer, split_words
from trainer.saving.files import write_atomically


def command(words: Sequence[str]) -> int:
    """`python -m trainer compare words...`: 0, or the exit code of the first row where no row has a speed."""
    options, rest = split_words(words, entries.OWN_WORDS)
    report = compare(options.pop("recipe", ""), words=rest, **options)
    if any(row["samples_per_sec"] for row in report["entries"]):
        return 0
    codes = [row["exit_code"] for row in report["entries"] if row["exit_code"]]
    if not codes:
        raise RecipeError("no run was long enough to have a speed: raise max_steps, epochs or steps")
    return int(codes[0])


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
    """Run every entry several times in fresh processes and return what compare.json holds.

    Args:
        recipe: as for `train`: a name, a YAML file, a run folder, a dictionary or a recipe.
        modes: the entries, a mode each, words of its own after it: "pipeline pipeline.schedule=streams". None: the one
            of `mode=` in words, else all.
        words: key=value of the recipe, for every entry.
        repeats: of each entry; None: 5, and up to 15 as long as a difference of 10 % could hide in their spread.
        nproc: ranks of the modes that have several; None: a rank a device, two on the CPU.
        output: the comparison's folder; None: runs/compare-<recipe>-<time>.
        resume: "auto" continues the comparison in `output`: finished repeats stay.
        steps: measured ones of a run; None: about as many as take 4 s, or what max_steps and epochs in words say.

    Raises:
        RecipeError: nothing could run with these words.
        FolderInUseError: the folder holds a comparison, or another run writes there.
        Interrupted, Preempted: Ctrl-C, SIGTERM; the tables hold what was done before.
    """
    modes = entries.parse_modes(modes) if isinstance(modes, str) else modes
    output = None if output is None else str(output)
    ranks, measured = positive_integer("nproc", nproc), positive_integer("steps", steps)
    if place().launched:
        raise RecipeError("compare starts its processes itself: type python -m trainer compare ... without torchrun")
    if recipe in (None, ""):
        raise RecipeError(f"compare needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}")
    if resume not in (None, "auto") or (resume and not output):
        raise RecipeError("resume=auto continues the comparison in a folder: say which with output=")
    rows = entries.entries(recipe, words, modes, str(ranks) if ranks else None, plugin)
    base = load_recipe(recipe, *words)
    launching.load_plugin(plugin)
    named = isinstance(recipe, str | Path)
    asked = {
        "recipe": str(recipe) if named else base.to_dict(),
        "modes": list(modes) if modes is not None else None,
        "words": sorted(words),
        "nproc": ranks,
        "plugin": plugin,
        "steps": measured,
        "repeats": positive_integer("repeats", repeats),
        "settings": base.replace(output=None, resume=None).model_dump(mode="json"),
    }
    stem = f"runs/compare-{re.sub(r'[^A-Za-z0-9_.-]+', '-', base.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    with claim(output, Path(stem), "comparison", FILE, asked, free=("repeats",), resume=resume is not None) as folder:
        file = folder / f"{base.name}.yaml"
        if not named:  # of the Python API: as a file, for the command line
            write_atomically(file, base.replace(output=None, resume=None).to_yaml())
        return Comparison(folder, base, rows, asked, str(recipe if named else file)).run()
