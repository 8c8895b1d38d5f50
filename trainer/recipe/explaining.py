"""What to type: pydantic's validation errors as lines that say so; and what to say of a word that is no key, the key
that it misspells, or what most people bring along from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer.recipe.text import nearest, shown

# pydantic's types of error, as the words that follow "key=value must be".
KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}",
}
# Each key of ours, or word, with what torchvision's references, timm, Lightning, Keras and Hugging Face call it.
_THEIRS = {
    "recipe": "config cfg",
    "nproc": "gpus num_gpus num_processes nproc_per_node world_size",
    "mode": "strategy distributed",
    "model.name": "arch model_name",
    "model.weights=DEFAULT": "pretrained",
    "data.name": "dataset",
    "data.root": "data_dir data_path",
    "data.image_size": "imgsz img_size",
    "data.workers": "num_workers j",
    "data.val_fraction": "val_split validation_split",
    "batch_size": "batch bs",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches",
    "epochs": "max_epochs num_epochs num_train_epochs",
    "max_steps": "steps max_iter",
    "optimizer.name": "opt optim",
    "optimizer.lr": "learning_rate base_lr",
    "optimizer.weight_decay": "wd",
    "schedule.name": "scheduler lr_scheduler",
    "schedule.warmup_epochs": "warmup warmup_steps",
    "loss.label_smoothing": "smoothing",
    "precision=bf16": "amp autocast",
    "precision=fp16": "half",
    "precision": "dtype mixed_precision",
    "clip_grad_norm": "grad_clip max_grad_norm gradient_clip_val",
    "devices": "device gpu gpu_ids",
    "stop.patience": "early_stopping",
    "logging.every_steps": "print_freq log_interval",
    "output": "output_dir save_dir",
}
OTHER_NAMES = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


def explain_invalid(error: ValidationError, defaults: Mapping[str, Any], top: Iterable[str]) -> tuple[str, str]:
    """The first of pydantic's errors: its dotted key, and one line that says what to type.

    `defaults` are all keys, dotted, with their defaults; `top` are the keys and sections of the highest level.
    """
    findings = error.errors(include_url=False)
    key = _key(findings[0], defaults)
    same = [each for each in findings if _key(each, defaults).partition("[")[0] == key]
    best = max(same, key=_rank, default=findings[0])  # a key of several kinds has a finding for each
    if len(same) > 1 and best["type"] == "literal_error":
        kinds = [KINDS[each["type"]] for each in same if each["type"] in KINDS]
        kinds += ["null"] if key in defaults and defaults[key] is None else []
        choices = ", ".join([*_choices(best), *kinds[:-1]]) + (", or " if len(kinds) > 1 else " or ") + kinds[-1]
        return key, f"{key}={shown(best['input'])} must be {choices}"
    key = _key(best, defaults)
    return key, _line(best, key, defaults, [*top])


def _key(finding: ErrorDetails, defaults: Mapping[str, Any]) -> str:
    """The dotted key of an error. Below a key pydantic names also the kind of value that it tried there."""
    key = ""
    for part in finding["loc"]:
        if isinstance(part, int):
            key += f"[{part}]"
        elif key.partition("[")[0] not in defaults:
            key += f".{part}" if key else part
    return key


def _rank(finding: ErrorDetails) -> int:
    """Which of a key's errors to show: a sentence of ours before a place within a list before a choice."""
    kinds = finding["type"] == "value_error", isinstance(finding["loc"][-1], int), finding["type"] == "literal_error"
    return sum(weight * kind for weight, kind in zip((4, 2, 1), kinds, strict=True))


def _choices(finding: ErrorDetails) -> list[str]:
    """What an error says that a value may be."""
    return [word for word in re.findall(r"\w+", finding["ctx"]["expected"]) if word != "or"]


def _line(first: ErrorDetails, key: str, defaults: Mapping[str, Any], top: Sequence[str]) -> str:
    kind = first["type"]
    if kind == "extra_forbidden":
        if key in defaults:  # a file writes its section
            section, _, last = key.rpartition(".")
            return f"{key} is not a key; write {section}: {{{last}: {shown(first['input'])}}}"
        return f"{key} is not a key; {advice_on(key, [*defaults, *top])}"
    value = first["input"]
    typed = f"{key}={shown(value)}"
    if kind == "literal_error":
        choices = _choices(first)
        choices += ["null"] if key in defaults and defaults[key] is None else []
        guess = nearest(str(value).lower(), choices)
        return f"{typed} is not one of {', '.join(choices)}" + (f"; did you mean {key}={guess}?" if guess else "")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        inner = next((name for name in defaults if name.startswith(f"{key}.")), "optimizer.lr")
        empty = "; leave an empty one out" if value is None else ""
        return f"{typed} must be a section, as in {inner}=...{empty}"
    if kind == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return f"{typed} {message}" if message.startswith("must") else f"{key}: {message}"
    limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in first.get("ctx", {}).items()}
    message = KINDS[kind].format(**limits) if kind in KINDS else first["msg"]
    if key in defaults and defaults[key] is None:
        message += ", or null"
    return f"{typed} must be {message}"


def advice_on(name: str, known: Collection[str]) -> str:
    """What to say of a name that is none of the `known` ones: keys, sections and words that may stand there."""
    section, dot, last = name.lower().rpartition(".")
    guess = OTHER_NAMES.get(name.lower())
    if guess is None:
        within = [key for key in known if dot and key.startswith(f"{section}.")]
        same = [key for key in known if key.rpartition(".")[2] == last and last != "name"]
        guess = nearest(name.lower(), within) or (same[0] if len(same) == 1 else None)
        guess = guess or nearest(last if within else name.lower(), known)
    if guess:
        return f"did you mean {guess}?"
    return "python -m trainer recipes keys lists them, and python -m trainer guide answers questions"
