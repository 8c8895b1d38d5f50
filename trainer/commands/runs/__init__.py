"""`python -m trainer runs`: the runs there are, one of them on a page, and removing them.

Reads run folders, whoever wrote them and however the run ended; torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.runs import listing, run_page
from trainer.commands.runs.run_status import look, named
from trainer.errors import RecipeError
from trainer.recipe.recipe_files import split_words

HOME = Path("runs")  # where training puts its folders
USAGE = "type runs, runs show RUN or runs delete RUN"


def command(words: Sequence[str]) -> str:
    """What `python -m trainer runs words...` prints. Raises RecipeError, FolderInUseError, SetupError."""
    options, names = split_words(words, ("yes",))
    task = names.pop(0) if names and names[0] in ("list", "show", "delete") else ""
    odd = [name for name in names if (name.startswith("-") or "=" in name) and not _exists(name)]
    if odd or (options and task != "delete"):
        raise RecipeError(f"'{(odd or ['yes='])[0]}' is not a word of runs{' ' * bool(task)}{task}: {USAGE}")
    if task == "delete" and names:
        return listing.delete([named(name, HOME) for name in names], options.get("yes"))
    if task in ("show", "delete") and len(names) != 1:
        raise RecipeError(f"runs {task} needs the name of a run, as in runs {task} NAME; runs lists them")
    if len(names) > 1:
        raise RecipeError(f"'{' '.join(names)[:80]}' is not understood: {USAGE}")
    if task == "show":
        return run_page.show(named(names[0], HOME))
    if not names:
        return listing.table(HOME)
    for path in (Path(names[0]).expanduser(), HOME / names[0]):
        if path.is_dir() and look(path) is None:
            return listing.table(path)
    return run_page.show(named(names[0], HOME))


def _exists(name: str) -> bool:
    return os.path.lexists(name) or os.path.lexists(HOME / name)
