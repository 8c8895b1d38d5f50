"""What a word that sets nothing was to set: a recipe's name, a run, a folder, a mode, an option without its value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.cli.dialects.meaning import SHARDS, WEIGHTS, Around, Fix, Meaning, put
from trainer.cli.dialects.meanings import meaning
from trainer.cli.dialects.values import value_of
from trainer.cli.known_keys import WANTS, choices, keys
from trainer.cli.spelling import DASHES
from trainer.recipe import MODES, shipped_recipes
from trainer.recipe.checks import OWN_PHOTOS
from trainer.recipe.text import shown

# Values to show for words that want one.
EXAMPLES = {
    **dict(word.split("=") for words in WANTS.values() for word in words),
    "nproc": "2", "plugin": "MODULE", "modes": "[single,ddp]", "sweep": "batch_size:[96,192]", "repeats": "5",
    "steps": "100", "memory": "24GiB", "measured": "here", "bandwidth": "10GB/s", "output": "FOLDER", "resume": "auto",
}  # fmt: skip


def bare_fix(typed: str, around: Around, others: Sequence[str]) -> Fix | None:
    """What to type for a word that sets nothing; None where nobody knows.

    Args:
        typed: the word.
        around: what sets something.
        others: all that was typed.
    """
    name = typed.lstrip(DASHES).replace("-", "_")
    if name in around.own and (typed != name or name == "recipe"):
        return Fix(typed, (f"{name}={EXAMPLES[name]}",), "with its value")
    if not typed or typed[0] in DASHES:
        found = meaning(name, "true", around)
        if found is not None or name not in keys():
            return Fix(typed, found.words, found.note) if found is not None else None
        return Fix(typed, (f"{name}={shown(keys()[name])}",), "with its value")
    path, own = Path(typed).expanduser(), around.own
    switched = None if path.exists() else _switched(typed.lower(), around)
    if switched is not None:
        return Fix(typed, switched.words, switched.note)
    if around.command == "compare" and _are_modes(typed):
        named = [other for other in others if _are_modes(other)]
        modes = around.values.get("modes", "").strip("[]").split(",") + ",".join(named).split(",")
        return Fix(" ".join(named), (f"modes=[{','.join(filter(None, dict.fromkeys(modes)))}]",))
    if around.command == "compare" and (_is_run(path) or typed.startswith("runs/")):
        return Fix(typed, (), "runs compare RUN RUN looks at runs that are done")
    if typed.endswith(SHARDS) and not re.search(r"\.(pth?|ckpt)\.tar$", typed) and "checkpoint" not in own:
        listed = [other for other in others if other.endswith(SHARDS) and "=" not in other]
        several = len(listed) > 1 or around.values.get("data.root", "").endswith(SHARDS)
        root = "data.root=" + (os.path.join(os.path.dirname(typed), f"*{path.suffix}") if several else typed)
        note = "in quotes, or the shell writes out the pattern" if several else ""
        return Fix(" ".join(listed), ("data.name=shards", root), note)
    if (gathered := _several(path, around, others)) is not None:
        return gathered
    newest = meaning("checkpoint", typed, around) if "checkpoint" in own else None
    if newest is not None and "checkpoint" not in around.values:
        return Fix(typed, newest.words, newest.note)
    if "checkpoint" in own:
        images = "checkpoint" in around.values or (path.exists() and not _is_run(path) and not typed.endswith(WEIGHTS))
        return Fix(typed, (f"{'data.root' if images else 'checkpoint'}={typed}",))
    if typed in shipped_recipes() or path.suffix in (".yaml", ".yml") or _is_run(path):
        return Fix(typed, (meaning("recipe", typed, around) or Meaning((f"recipe={typed}",))).words)
    if typed in MODES:
        return Fix(typed, (f"mode={typed}",))
    photos = "recipe" in around.values and around.data_name in OWN_PHOTOS
    return Fix(typed, (*["recipe=finetune"] * (not photos), f"data.root={typed}")) if path.is_dir() else None


def _several(path: Path, around: Around, others: Sequence[str]) -> Fix | None:
    """Images for predict, as a shell writes out photos/*.jpg, or folders of classes to train on; None for one alone."""
    kind = Path.exists if around.command == "predict" else Path.is_dir
    if not _is_photos(path, kind) or around.command == "evaluate":
        return None
    words = [other for other in others if "=" not in other]
    runs = _folder_of_runs(words, around)
    if runs and path == Path(runs).expanduser():
        return None
    named = [word for word in words if word != runs and _is_photos(Path(word).expanduser(), kind)]
    given = around.values.get("data.root", "")
    places = [*named, *([given] if given and given != "-" else [])]
    if len(places) < 2:
        return None
    parents = {os.path.dirname(os.path.abspath(Path(place).expanduser())) for place in places}
    root = os.path.commonpath(parents)
    root = root if all(map(os.path.isabs, places)) else os.path.relpath(root)
    if around.command == "predict":
        note = "all images below it; these alone: data.root=- and a path on each line of standard input"
        return Fix(" ".join(named), (f"data.root={root}",), note)
    if len(parents) > 1:
        root, note = "FOLDER", "one that holds a folder for each class"
    else:
        note = "a folder for each class"
    trained = () if "recipe" in around.values else ("recipe=finetune",)
    return Fix(" ".join(named), (*trained, f"data.root={root}"), note)


def _folder_of_runs(words: Sequence[str], around: Around) -> str:
    """The word that predict takes as the run, where that is a folder of several; empty where there is none."""
    if "checkpoint" not in around.own or "checkpoint" in around.values:
        return ""
    folders = ((word, Path(word).expanduser()) for word in words)
    found = next(((word, path) for word, path in folders if _is_run(path) or _holds_runs(path, around)), None)
    return found[0] if found is not None and not _is_run(found[1]) else ""


def _holds_runs(path: Path, around: Around) -> bool:
    return path.is_dir() and meaning("checkpoint", str(path), around) is not None


def _is_photos(path: Path, kind: Callable[[Path], bool]) -> bool:
    return kind(path) and not _is_run(path) and not path.name.endswith((*WEIGHTS, *SHARDS, ".yaml", ".yml", ".py"))


def _switched(name: str, around: Around) -> Meaning | None:
    """A device, a precision or an option that is switched on by its mere name."""
    if re.fullmatch(r"(cpu|mps|gpus?|cuda)(:?\d{1,3})?", name):
        return value_of("devices", name, around)
    if name in ("resume", "amp", "half", "pretrained", *choices()["precision"]):
        return meaning(name, "true", around)
    return put(name, "true") if choices().get(name, ())[:2] == ("true", "false") else None


def _are_modes(word: str) -> bool:
    return {*word.split(",")} <= {*MODES}


def _is_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file()
