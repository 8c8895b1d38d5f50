"""What `key=value` of another program, or a slip, is in our words: by the rows of `other_values`, then by a rule.

Reads the schema and names, no device.
"""

from __future__ import annotations

import os
import re

from trainer.cli.dialects.meaning import Around, Meaning, plain, put
from trainer.cli.dialects.numbers import is_figure, listed, number
from trainer.cli.dialects.other_values import NO, NONE, OTHER_VALUES, YES
from trainer.cli.dialects.rules import RULES
from trainer.cli.known_keys import EVERY_WORD, FOLDERS, is_name, is_path_or_text, our_name
from trainer.recipe import shipped_recipes
from trainer.recipe.checks import DATASETS
from trainer.recipe.reflection import choices, defaults, kinds, sections

FOREIGN = ("trainer", "training", "train", "args", "hparams", "params")  # sections that others have
REGISTERED = ("model.name", "data.name", "task.name")  # a plugin may have registered any name


def meaning(key: str, value: str, around: Around) -> Meaning | None:
    """What `key=value` is in our words; None where it is one of ours, or nobody knows.

    Args:
        key: as `spelling` brings it.
        value: as typed.
        around: the rest of the command line.
    """
    section, _, inner = key.partition(".")
    if section in FOREIGN and inner and not is_name(key):  # trainer.fast_dev_run, args.lr
        return meaning(inner, value, around) or (put(inner, value) if inner in defaults() else None)
    if not value or value.startswith("{"):  # a section as YAML writes it
        return None
    if (several := _several(key, value, around)) is not None:
        return several
    ours = our_name(key, around.own)
    if ours == key or ours not in around.own:
        found = _told(key, key, value, around)
        if found is not None or key in around.own:
            return found
    if value == "true" and key in shipped_recipes():
        return put("recipe", key)
    if ours == key or not (ours in defaults() or ours in sections() or ours in around.own):
        return None
    return _told(ours, key, value, around) or unknown(ours, value) or put(ours, value)


def _several(key: str, value: str, around: Around) -> Meaning | None:
    """Words that stand in one: recipe=digits,epochs=3."""
    first, *rest = re.split(r"[,;\s]+(?=[A-Za-z_][\w.\-]*=)", value)
    text = is_path_or_text(key) and not (key.endswith(".name") or (key == "recipe" and not os.path.exists(value)))
    if not rest or not first or text or value.startswith("["):
        return None
    pairs = [(key, first), *(word.split("=", 1) for word in rest)]
    if not all(name in OTHER_VALUES or is_name(name) for name, _ in pairs):
        return None
    found = [(meaning(name, said, around), f"{name}={said}") for name, said in pairs]
    return Meaning(tuple(word for means, typed in found for word in (means.words if means else (typed,))))


def _told(name: str, key: str, value: str, around: Around) -> Meaning | None:
    """What the value is for `name`, which was typed as `key`; None where it is right, or nobody knows."""
    registered = name in REGISTERED and "plugin" in around.values
    elsewhere = name in EVERY_WORD and name not in around.own and name not in defaults()
    if registered or elsewhere or value in choices().get(name, ()):
        return None
    found = _of_row(name, value, around)
    if found is None and name in RULES:
        found = RULES[name](key, value, around)
    found = found or number(name, value) or _written(name, value)
    if found is None or found.words == (f"{key}={value}",):
        return None
    target, _, said = "".join(found.words[:1]).partition("=")
    if said != "{value}":
        return found
    ours = our_name(target, around.own)
    read = meaning(target, value, around) or unknown(ours, value) or put(ours, value)
    return Meaning(read.words, read.note or found.note)


def _of_row(name: str, value: str, around: Around) -> Meaning | None:
    """What the row of a name says: words of ours, or a value; in brackets a note."""
    row = OTHER_VALUES.get(f"{around.command}:{name}") or OTHER_VALUES.get(name) or {}
    figure = is_figure(value)  # 1 is no yes for a key that takes numbers
    said = row.get(value.lower()) or row.get("" if figure else plain(value)) or row.get("*")
    numeric = figure and {int, float} & {*kinds().get(name, ())}
    if said is None or numeric or (name in FOLDERS and os.path.exists(os.path.expanduser(value))):
        return None
    typed, _, note = said.partition("(")
    words = [word if "=" in word else f"{name}={word}" for word in typed.split()]
    return Meaning(tuple(words), note.removesuffix(")").replace("{value}", value))


def _written(name: str, value: str) -> Meaning | None:
    """A value of one of our keys, in the way that YAML has it: switches, null, choices, lists."""
    taken, allowed, low = kinds().get(name, ()), choices().get(name, ()), value.lower()
    if allowed[:2] == ("true", "false"):
        return put(name, "true") if low in YES else put(name, "false") if low in NO else None
    alike = DATASETS if name == "data.name" and value not in DATASETS else allowed
    other = {choice.replace("_", ""): choice for choice in alike}.get(plain(value))
    if other is not None:
        return put(name, other)
    numeric = bool({int, float} & {*taken})
    if type(None) in taken and (numeric or str not in taken):
        if low in (("auto", "default", *NONE) if numeric else NONE[len(NO) :]):
            return put(name, "null")
    elif numeric and low in ("auto", "default"):
        return Meaning((), f"{name} is a number: leave it out to keep the recipe's own")
    elif float in taken and low in NONE:
        return put(name, "0")
    return listed(name, value)


def unknown(key: str, value: str) -> Meaning | None:
    """For a value that is none of a list's: what there is. For one that is no number: that it ought to be."""
    allowed, taken = choices().get(key, ()), {*kinds().get(key, ())}
    if taken and taken <= {int, float, type(None)} and not is_figure(value):
        whole = "" if float in taken else "whole "
        return None if value == "null" else Meaning((), f"{key} is a {whole}number, and {value[:40]} is none")
    if not allowed or value in allowed or {str, list, int} & taken:
        return None
    return Meaning((), f"{key} is {', '.join(allowed[:-1])} or {allowed[-1]}")
