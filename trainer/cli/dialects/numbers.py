"""Numbers and lists of them, as people write them: 1e2, 3.0, 1,000, 1k, 10%, 0,1, 224x224, (0.9, 0.999)."""

from __future__ import annotations

import re

from trainer.cli.dialects.meaning import Meaning, put
from trainer.recipe.reflection import kinds

OFF_AT_ZERO = ("model.freeze", "stop.patience")  # whole numbers for which 0 means null
ZERO_IS_A_VALUE = ("optimizer.norm_weight_decay",)  # null takes another key's instead
FIGURE = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"


def number(key: str, value: str) -> Meaning | None:
    """A number as YAML reads it, for a key that takes one; None where the value is none.

    Elsewhere -1 says that there is no limit, and 0 that something is off.
    """
    taken = kinds().get(key, ())
    written = _figure(value, float in taken) if {int, float} & {*taken} else None
    if written is None:
        return None
    off = value == "-1" and key != "model.freeze"
    off |= value == "0" and (float in taken or key in OFF_AT_ZERO) and key not in ZERO_IS_A_VALUE
    return put(key, "null" if off and type(None) in taken else written)


def is_figure(value: str) -> bool:
    """Whether a value is a number as YAML reads it."""
    return re.fullmatch(FIGURE, value.lower()) is not None


def listed(key: str, value: str) -> Meaning | None:
    """A list without its brackets, or in others."""
    taken = list in kinds().get(key, ()) and key != "devices"
    if not taken or value.startswith("[") or not re.search(r"[\d\w][, ]+[\d\w.]|^\(.*\)$", value):
        return None
    parts = [part for part in re.split(r"[, ]+", value.strip("()[]'\" ")) if part]
    return put(key, f"[{','.join(parts)}]")


def _figure(value: str, broken: bool) -> str | None:
    """A number as YAML reads it; `broken`: it may have a part behind the point. None where it is no number."""
    text = re.sub("[\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}]", "-", value.strip("'\"").strip().lower())
    text = re.sub(r"(?<=\d) ?(px|s|sec|seconds)$", "", text)
    if broken and re.fullmatch(r"\d+,\d+(e[+-]?\d+)?", text):
        return text.replace(",", ".")
    if broken and re.fullmatch(rf"{FIGURE}%", text):
        return f"{float(text[:-1]) / 100:g}"
    if not broken:
        twice = re.fullmatch(r"[\[(]?(\d+) ?[x,*] ?\1[\])]?", text)
        text = twice[1] if twice else text
        text = text.replace(",", "") if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text) else text
        text = f"{text[:-1]}000" if re.fullmatch(r"\d+k", text) else text
    if not re.fullmatch(FIGURE, text):
        return None
    if broken or text.lstrip("+-").isdigit() or not float(text).is_integer():
        return value if text == value.lower() else text
    return str(int(float(text)))
