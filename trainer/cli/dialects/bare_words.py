"""What a word without = was to set: a recipe's name, a run, a folder, a mode, an option without its value."""

from __future__ import annotations

import os
import re

from trainer.cli.dialects.interpreter import meaning
from trainer.cli.dialects.meaning import SHARDS, CommandLine, Meaning, is_run, put
from trainer.cli.dialects.rules import run_within
from trainer.cli.known_keys import WANTS
from trainer.cli.spelling import DASHES
from trainer.recipe import MODES, shipped_recipes
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.reflection import choices, defaults
from trainer.recipe.text import shown

# Values to show for words that want one.
EXAMPLES = {
    **dict(word.split("=") for words in WANTS.values() for word in words),
    "nproc": "2", "plugin": "MODULE", "modes": "[single,ddp]", "sweep": "batch_size:[96,192]", "repeats": "5",
    "steps": "100", "memory": "24GiB", "measured": "here", "bandwidth": "10GB/s", "output": "FOLDER", "resume": "auto",
}  # fmt: skip


def bare_meaning(typed: str, line: CommandLine) -> Meaning | None:
    """What to type for a word without =; None where it is not known.

    Args:
        typed: the word.
        line: the rest of the command line.
    """
    name = typed.lstrip(DASHES).replace("-", "_")
    if name in line.options and (typed != name or name == "recipe"):
        return put(name, EXAMPLES[name], "with its value")
    if not typed or typed[0] in DASHES:
        answer = meaning(name, "true", line)
        return answer or (put(name, shown(defaults()[name]), "with its value") if name in defaults() else None)
    path, predicts = os.path.expanduser(typed), "checkpoint" in line.options
    if not os.path.exists(path) and (switched := _switched(typed.lower(), line)) is not None:
        return switched
    if line.command == "compare" and _are_modes(typed):
        named = [other for other in line.typed if _are_modes(other)]
        modes = ",".join([line.values.get("modes", "").strip("[]"), *named]).strip(",").split(",")
        return Meaning((f"modes=[{','.join(dict.fromkeys(modes))}]",), typed=" ".join(named))
    if line.command == "compare" and (is_run(path) or typed.startswith("runs/")):
        return Meaning((), "runs compare RUN RUN looks at runs that are done")
    if typed.endswith(SHARDS) and not re.search(r"\.(pth?|ckpt)\.tar$", typed) and not predicts:
        return _shards(typed, line)
    images = line.images
    if typed in images and len(images) > 1:
        note = "one folder" + ", or data.root=- and a path on each line of standard input" * predicts
        words = () if predicts or "recipe" in line.values else ("recipe=finetune",)
        return Meaning((*words, "data.root=FOLDER"), note, " ".join(images))
    if predicts:
        run = "checkpoint" not in line.values and run_within("checkpoint", typed, line)
        return run or put("data.root" if "checkpoint" in line.values or typed in images else "checkpoint", typed)
    if typed in shipped_recipes() or typed.endswith((".yaml", ".yml")) or is_run(path):
        return meaning("recipe", typed, line) or put("recipe", typed)
    if typed in MODES:
        return put("mode", typed)
    photos = "recipe" in line.values and line.data_name in OWN_PHOTOS
    return Meaning((*["recipe=finetune"] * (not photos), f"data.root={typed}")) if os.path.isdir(path) else None


def _shards(typed: str, line: CommandLine) -> Meaning:
    listed = [other for other in line.typed if other.endswith(SHARDS) and "=" not in other]
    pattern = os.path.join(os.path.dirname(typed), f"*{os.path.splitext(typed)[1]}")
    if len(listed) > 1 or line.values.get("data.root", "").endswith(SHARDS):
        note = "in quotes, or the shell writes out the pattern"
        return Meaning(("data.name=shards", f"data.root={pattern}"), note, " ".join(listed))
    return Meaning(("data.name=shards", f"data.root={typed}"))


def _switched(name: str, line: CommandLine) -> Meaning | None:
    """A device, a precision or an option that is switched on by its mere name."""
    if re.fullmatch(r"(cpu|mps|gpus?|cuda)(:?\d{1,3})?", name):
        return meaning("devices", name, line)
    if name in ("resume", "amp", "half", "pretrained", *choices()["precision"]):
        return meaning(name, "true", line)
    return put(name, "true") if choices().get(name, ())[:2] == ("true", "false") else None


def _are_modes(word: str) -> bool:
    return {*word.split(",")} <= {*MODES}
