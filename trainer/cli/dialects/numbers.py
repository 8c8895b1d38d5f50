"""Numbers and lists of them, as people write them: 1e2, 3.0, 1,000, 1k, 10%, 0,1, 224x224, (0.9, 0.999)."""

from __future__ import annotations

import re

from trainer.cli.dialects.meaning import NO, NOTHING, YES, Meaning, put
from trainer.recipe.word_values import kinds

# What is usual, for keys that take a number and are switched on elsewhere.
USUAL = {
    "augment.hflip": "0.5",
    "augment.mixup": "0.2",
    "augment.cutmix": "1.0",
    "augment.erase": "0.25",
    "clip_grad_norm": "1.0",
    "ema": "0.999",
    "loss.label_smoothing": "0.1",
    "model.freeze": "-1",
    "optimizer.lr_per": "256",
    "save.every_epochs": "1",
    "schedule.warmup_epochs": "5",
    "stop.patience": "5",
}
OFF_AT_ZERO = ("model.freeze", "stop.patience")  # whole numbers for which 0 means null
ZERO_IS_A_VALUE = ("optimizer.norm_weight_decay",)  # null takes another key's instead
FIGURE = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"


def number(key: str, value: str) -> Meaning | None:
    """What a value of a key that takes a number is; None where it is one, or nobody knows.

    Args:
        key: of ours.
        value: as typed.
    """
    if not {int, float} & {*kinds()[key]}:
        return None
    written = _figure(value, float in kinds()[key])
    if written is not None:
        return put(key, written) if written != value else _none(key, value)
    low = value.lower()
    if low in YES and key in USUAL:
        return put(key, USUAL[key])
    if low in NO and key in ZERO_IS_A_VALUE:
        return put(key, "0")
    if low in ("auto", "default", *NOTHING) and type(None) in kinds()[key]:
        return put(key, "null") if value != "null" else None
    if low in ("auto", "default"):
        return Meaning((), f"{key} is a number: leave it out to keep the recipe's own")
    return put(key, "0") if low in NOTHING and float in kinds()[key] else None


def is_figure(value: str) -> bool:
    """Whether a value is a number as YAML reads it."""
    return re.fullmatch(FIGURE, value.lower()) is not None


def _none(key: str, value: str) -> Meaning | None:
    """Elsewhere -1 says that there is no limit, and 0 that something is off."""
    off = value == "-1" and key != "model.freeze"
    off |= value == "0" and (float in kinds()[key] or key in OFF_AT_ZERO) and key not in ZERO_IS_A_VALUE
    return put(key, "null") if off and type(None) in kinds()[key] else None


def _figure(value: str, broken: bool) -> str | None:
    """A number as YAML reads it; `broken`: it may have a part behind the point. None where it is no number."""
    text = re.sub("[\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}]", "-", value.strip("'\"").strip().lower())
    if broken and re.fullmatch(r"\d+,\d+(e[+-]?\d+)?", text):
        return text.replace(",", ".")
    if broken and re.fullmatch(rf"{FIGURE}%", text):
        return f"{float(text[:-1]) / 100:g}"
    twice = re.fullmatch(r"[\[(]?(\d+) ?[x,*] ?\1[\])]?", text)
    if twice and not broken:
        return twice[1]
    if not broken and re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text):
        return text.replace(",", "")
    if (result := _worked_out(text)) is not None:
        return result
    text = re.sub(r"(?<=\d) ?(px|s|sec|seconds)$", "", text)
    if not broken and re.fullmatch(r"\d+k", text):
        return f"{text[:-1]}000"
    if not re.fullmatch(FIGURE, text):
        return None
    if broken or text.lstrip("+-").isdigit() or not float(text).is_integer():
        return value if text == value.lower() else text
    return str(int(float(text)))


def _worked_out(text: str) -> str | None:
    """10^-3, 3*10**-4, 2**10, 1/8."""
    power = re.fullmatch(rf"(?:(?P<times>{FIGURE})\*)?(?P<base>[1-9]\d?)(?:\^|\*\*)(?P<up>[+-]?\d{{1,2}})", text)
    ratio = re.fullmatch(r"(\d{1,9}\.?\d*)/([1-9]\d{0,8})", text)
    if power:
        found = float(power["times"] or 1) * float(power["base"]) ** int(power["up"])
    elif ratio:
        found = float(ratio[1]) / float(ratio[2])
    else:
        return None
    return str(int(found)) if found.is_integer() else f"{found:.10g}"


def listed(key: str, value: str) -> Meaning | None:
    """A list without its brackets, or in others."""
    if list not in kinds()[key] or value.startswith("[") or not re.search(r"[\d\w][, ]+[\d\w.]|^\(.*\)$", value):
        return None
    parts = [part for part in re.split(r"[, ]+", value.strip("()[]'\" ")) if part]
    return put(key, f"[{','.join(parts)}]")
