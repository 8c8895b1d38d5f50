"""Translates `key=value` of other programs, and slips, into our words: by the rows of `other_values`, then by rules.

Numbers and lists of them are read as people write them: 1e2, 3.0, 1,000, 1k, 10%, 0,1, 224x224, (0.9, 0.999). A word
without = is a recipe's name, a run, a folder, a mode, or an option without its value.
"""

from __future__ import annotations

import os
import re

from trainer.cli.dialects.meaning import SHARDS, CommandLine, Meaning, is_run, plain, put
from trainer.cli.dialects.other_values import NO, NONE, OTHER_VALUES, YES
from trainer.cli.dialects.rules import PARTS, RULES, RUN_NAMES, run_within
from trainer.cli.known_keys import COMMAND_WORDS, EVERY_WORD, FOLDERS, WANTS, is_name, is_path_or_text, our_name
from trainer.cli.predict_words import what_is_meant
from trainer.cli.spelling import DASHES
from trainer.recipe import MODES, shipped_recipes
from trainer.recipe.known_names import DATASETS, OWN_PHOTOS
from trainer.recipe.reflection import choices, defaults, kinds, sections
from trainer.recipe.search_space import is_swept
from trainer.recipe.text import shown

HELD_OUT = re.compile("val|test|eval|predict")  # in a section's name: what it says is not of training
REGISTERED = ("model.name", "data.name", "task.name")  # a plugin may have registered any name
OFF_AT_ZERO = ("model.freeze", "stop.patience")  # whole numbers for which 0 means null
ZERO_IS_A_VALUE = ("optimizer.norm_weight_decay", "local_sgd.outer_momentum")  # null takes another instead
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
# Values to show for words that want one.
EXAMPLES = {
    **dict(word.split("=") for words in WANTS.values() for word in words if "=" in word),
    "nproc": "2", "plugin": "MODULE", "modes": "[single,ddp]", "sweep": "batch_size:[96,192]", "repeats": "5",
    "trials": "20", "steps": "100", "memory": "24GiB", "measured": "here", "bandwidth": "10GB/s",
    "output": "FOLDER", "resume": "auto",
}  # fmt: skip


def meaning(key: str, value: str, line: CommandLine) -> Meaning | None:
    """What `key=value`, as `spelling` brings it, is in our words; None where it is one of ours, or nobody knows."""
    section, _, inner = key.partition(".")
    known = is_name(key) and inner not in PARTS
    if inner and inner not in RUN_NAMES and not known and not HELD_OUT.search(section):  # scheduler.eta_min
        return meaning(inner, value, line) or (put(inner, value) if inner in defaults() else None)
    if not value or value.startswith("{"):  # a section as YAML writes it
        return None
    if line.command == "sweep" and (swept := _swept(key, value, line)) is not None:
        return swept if swept.words != (f"{key}={value}",) else None
    if (several := _several(key, value, line)) is not None:
        return several
    ours = our_name(key, line.options)
    if ours == key or ours not in line.options:
        answer = _meaning_of(key, key, value, line)
        if answer is not None or key in line.options:
            return answer
    if value == "true" and key in shipped_recipes():
        return put("recipe", key)
    if ours == key or not (ours in defaults() or ours in sections() or ours in line.options):
        return None
    return _meaning_of(ours, key, value, line) or put(ours, value)


def _swept(key: str, value: str, line: CommandLine) -> Meaning | None:
    """Values to try, also without their brackets; None where it is one value."""
    ours = our_name(key, line.options)
    listed = f"[{value}]" if "," in value and value[0] not in "[(" and list not in kinds().get(ours, ()) else value
    return put(ours, listed) if ours in defaults() and is_swept(ours, listed) else None


def _several(key: str, value: str, line: CommandLine) -> Meaning | None:
    """Words that stand in one: recipe=digits,epochs=3."""
    first, *rest = re.split(r"[,;\s]+(?=[A-Za-z_][\w.\-]*=)", value)
    text = is_path_or_text(key) and not (key.endswith(".name") or (key == "recipe" and not os.path.exists(value)))
    if not rest or not first or text or value.startswith("["):
        return None
    pairs = [(key, first), *(word.split("=", 1) for word in rest)]
    if not all(name in OTHER_VALUES or is_name(name) for name, _ in pairs):
        return None
    words: list[str] = []
    for name, part in pairs:
        answer = meaning(name, part, line)
        words += answer.words if answer else [f"{name}={part}"]
    return Meaning(tuple(words))


def _meaning_of(name: str, key: str, value: str, line: CommandLine) -> Meaning | None:
    """What the value is for `name`, which was typed as `key`; None where it is right, or nobody knows."""
    registered = name in REGISTERED and "plugin" in line.values
    elsewhere = name in EVERY_WORD and name not in {*line.options, *defaults(), *OTHER_VALUES}
    submitted = line.command == "submit" and name in line.options and name not in COMMAND_WORDS["train"]
    if registered or elsewhere or submitted or value in choices().get(name, ()):
        return None
    answer = _of_row(name, value, line)
    if answer is None and name in RULES:
        answer = RULES[name](key, value, line)
    answer = answer or _number(name, value) or _of_key(name, value)
    if answer is None or answer.words == (f"{key}={value}",):
        return None
    target, _, text = "".join(answer.words[:1]).partition("=")
    if text != "{value}":
        return answer
    ours = our_name(target, line.options)
    read = meaning(target, value, line) or put(ours, value)
    return Meaning(read.words, read.note or answer.note)


def _of_row(name: str, value: str, line: CommandLine) -> Meaning | None:
    """What the row of a name says: words of ours, or a value; in brackets a note."""
    row = OTHER_VALUES.get(f"{line.command}:{name}") or OTHER_VALUES.get(name) or {}
    figure = _is_number(value)  # 1 is no yes for a key that takes numbers
    text = row.get(value.lower()) or row.get("" if figure else plain(value)) or row.get("*")
    numeric = figure and {int, float} & {*kinds().get(name, ())}
    if text is None or numeric or (name in FOLDERS and os.path.exists(os.path.expanduser(value))):
        return None
    typed, _, note = text.partition("(")
    if typed.partition("=")[0].isupper() and line.command != "train":  # what ranks of one run read
        return Meaning((), "only a training on several nodes reads it: leave it out")
    words = [word if "=" in word else f"{name}={word}" for word in typed.split()]
    if len(words) > 1 or words[:1] != [*filter(str.islower, words[:1])]:
        words = [word.replace("{value}", value) for word in words]
    return Meaning(tuple(words), note.removesuffix(")").replace("{value}", value))


def _of_key(name: str, value: str) -> Meaning | None:
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
    return _list(name, value)


def _number(key: str, value: str) -> Meaning | None:
    """A number as YAML reads it, for a key that takes one; None where the value is none.

    Elsewhere -1 says that there is no limit, and 0 that something is off.
    """
    taken = kinds().get(key, ())
    written = _as_yaml(value, float in taken) if {int, float} & {*taken} else None
    if written is None:
        return None
    off = value == "-1" and key != "model.freeze"
    off |= value == "0" and (float in taken or key in OFF_AT_ZERO) and key not in ZERO_IS_A_VALUE
    return put(key, "null" if off and type(None) in taken else written)


def _is_number(value: str) -> bool:
    """As YAML reads it."""
    return re.fullmatch(NUMBER, value.lower()) is not None


def _list(key: str, value: str) -> Meaning | None:
    """A list without its brackets, or in others."""
    taken = list in kinds().get(key, ()) and key != "devices"
    if not taken or value.startswith("[") or not re.search(r"[\d\w][, ]+[\d\w.]|^\(.*\)$", value):
        return None
    parts = [part for part in re.split(r"[, ]+", value.strip("()[]'\" ")) if part]
    return put(key, f"[{','.join(parts)}]")


def _as_yaml(value: str, real: bool) -> str | None:
    """A number as YAML reads it; `real`: it need not be whole. None for anything else."""
    text = re.sub("[\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}]", "-", value.strip("'\"").strip().lower())
    text = re.sub(r"(?<=\d) ?(px|s|sec|seconds)$", "", text)
    if real and re.fullmatch(r"\d+,\d+(e[+-]?\d+)?", text):
        return text.replace(",", ".")
    if real and re.fullmatch(rf"{NUMBER}%", text):
        return f"{float(text[:-1]) / 100:g}"
    if not real:
        twice = re.fullmatch(r"[\[(]?(\d+) ?[x,*] ?\1[\])]?", text)
        text = twice[1] if twice else text
        text = text.replace(",", "") if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text) else text
        text = f"{text[:-1]}000" if re.fullmatch(r"\d+k", text) else text
    if not re.fullmatch(NUMBER, text):
        return None
    if real or text.lstrip("+-").isdigit() or not float(text).is_integer():
        return value if text == value.lower() else text
    return str(int(float(text)))


def bare_meaning(typed: str, line: CommandLine) -> Meaning | None:
    """What to type for a word without =; None where it is not known."""
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
        return Meaning((), "python -m tensorboard.main --logdir runs shows finished runs side by side")
    if typed.endswith(SHARDS) and not re.search(r"\.(pth?|ckpt)\.tar$", typed) and not predicts:
        return _shards(typed, line)
    if line.command == "predict":
        return run_within("checkpoint", typed, line) or what_is_meant(typed, line)
    images = line.images
    if typed in images and len(images) > 1:
        words = () if predicts or "recipe" in line.values else ("recipe=finetune",)
        return Meaning((*words, "data.root=FOLDER"), "one folder", " ".join(images))
    if predicts:
        run = "checkpoint" not in line.values and run_within("checkpoint", typed, line)
        return run or put("data.root" if "checkpoint" in line.values or typed in images else "checkpoint", typed)
    if typed in shipped_recipes() or typed.endswith((".yaml", ".yml", ".py")) or is_run(path):
        return meaning("recipe", typed, line) or put("recipe", typed)
    if typed in MODES:
        return put("mode", typed)
    other = ["recipe=finetune"] * ("recipe" in line.values and line.data_name not in OWN_PHOTOS)
    folder = os.path.isdir(path) or (line.typed and typed.startswith("/"))  # that of another machine
    return Meaning((*other, f"data.root={typed}")) if folder else None


def _shards(typed: str, line: CommandLine) -> Meaning:
    listed = [other for other in line.typed if other.endswith(SHARDS) and "=" not in other]
    pattern = os.path.join(os.path.dirname(typed), f"*{os.path.splitext(typed)[1]}")
    if len(listed) > 1 or line.values.get("data.root", "").endswith(SHARDS):
        note = "in quotes, or the shell expands the pattern"
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
