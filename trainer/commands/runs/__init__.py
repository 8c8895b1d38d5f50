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
SYNONYMS = {
    "list": "", "ls": "", "info": "show", "view": "show", "cat": "show", "rm": "delete",
    "remove": "delete", "del": "delete",
}  # fmt: skip
USAGE = "type runs, runs show RUN or runs delete RUN"


def command(words: Sequence[str]) -> str:
    """What `python -m trainer runs words...` prints. Raises RecipeError, FolderInUseError, SetupError."""
    as_json, rest = _wants_json(words)
    task, names = (rest[0], rest[1:]) if rest else ("", [])
    task = SYNONYMS.get(task, task)
    options, names = split_words(names, ("yes",))
    for word in [f"{key}=" for key in options if task != "delete"] + [name for name in names if _is_word(name)]:
        raise RecipeError(f"'{word}' is not a word of runs{' ' * bool(task)}{task}: {USAGE}")
    if task == "show":
        if len(names) != 1:
            raise RecipeError(f"runs show needs one run, as in runs show NAME, not {len(names)}; runs lists them")
        return run_page.show(named(names[0], HOME), as_json)
    if task == "delete":
        if not names:
            raise RecipeError("runs delete needs the names of runs, as in runs delete FIRST SECOND; runs lists them")
        return listing.delete([named(name, HOME) for name in names], options.get("yes"))
    if not task and names:
        task, names = names[0], names[1:]
    return _listed(task, names, as_json)


def _listed(folder: str, more: Sequence[str], as_json: bool) -> str:
    """The runs below a folder; the page of one where the folder is a run itself."""
    if more or _is_word(folder):
        raise RecipeError(f"'{' '.join((folder, *more))[:80]}' is not understood: {USAGE}")
    if folder:
        for path in (Path(folder).expanduser(), HOME / folder):
            if path.is_dir() and look(path, sized=False).kind != "run":
                return listing.table(path, as_json)
        return run_page.show(named(folder, HOME), as_json)
    if not HOME.is_dir():
        return "[]\n" if as_json else "no runs yet below ./runs: python -m trainer recipe=digits trains a first one\n"
    return listing.table(HOME, as_json)


def _wants_json(words: Sequence[str]) -> tuple[bool, list[str]]:
    options, rest = split_words([word for word in words if word != "--json"], ("format",))
    if options.get("format", "json") not in ("json", "text"):
        raise RecipeError(f"format={options['format']} is not one of text, json")
    return "--json" in words or options.get("format") == "json", rest


def _is_word(text: str) -> bool:
    """Whether it is an option or key=value, rather than a folder."""
    return (text.startswith("-") or "=" in text) and not (os.path.exists(text) or os.path.exists(HOME / text))
