"""What the value of one of our keys is in our words: modes, devices, models, data sets, switches, numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from trainer.recipe import DEVICE, MODES
from trainer.recipe.checks import DATASETS, SMALL_MODELS, torchvision_classifiers
from trainer.recipe.other_names import OTHER_VALUES
from trainer.recipe.timm_names import TIMM
from trainer.words.keys import choices, kinds
from trainer.words.meaning import NO, NOTHING, WEIGHTS, YES, Around, Meaning, plain, put
from trainer.words.numbers import listed, number

IMAGENET = ("imagenet", "imagenet1k", "imagenet2012", "ilsvrc2012", "ilsvrc")
NOT_HERE = ("fsdp", "fsdp2", "fullysharded", "zero", "zero3", "deepspeed", "tensorparallel", "tp", "horovod")
MOST = 64  # cards that are listed for a number of them


def value_of(key: str, value: str, around: Around) -> Meaning | None:
    """What a key's value is in our words; None where it is one of ours, or nobody knows.

    Args:
        key: of ours, not a section's.
        value: as typed.
        around: the rest of the command line.
    """
    if key in _KEYS:
        return _KEYS[key](value, around)
    allowed = choices().get(key, ())
    if key not in kinds() or value in allowed or (key == "task.name" and "plugin" in around.values):
        return None
    if allowed[:2] == ("true", "false"):
        return put(key, "true") if value.lower() in YES else put(key, "false") if value.lower() in NO else None
    other = {name.replace("_", ""): name for name in allowed}.get(plain(value))
    other = other or OTHER_VALUES.get(key, {}).get(plain(value))
    if other is not None:
        return put(key, other)
    if type(None) in kinds()[key] and str not in kinds()[key] and value.lower() in NOTHING[len(NO) :]:
        return put(key, "null") if value != "null" else None
    return number(key, value) or listed(key, value)


def unknown(key: str, value: str) -> Meaning | None:
    """For a value that is none of a list's: what there is."""
    allowed = choices().get(key, ())
    if not allowed or value in allowed or {str, list, int} & {*kinds()[key]}:
        return None
    return Meaning((), f"{key} is {', '.join(allowed[:-1])} or {allowed[-1]}")


def mode(value: str, around: Around) -> Meaning | None:
    """A mode's name."""
    if value in MODES:
        return None
    several = [name for name in re.split(r"[\[\], ]+", value) if name]
    if len(several) > 1 and set(several) <= {*MODES}:
        if around.command == "compare":
            return put("modes", f"[{','.join(several)}]")
        return Meaning((f"mode={several[0]}",), f"to compare them: compare modes=[{','.join(several)}]")
    name = plain(value)
    if name in choices()["pipeline.schedule"]:
        return Meaning(("mode=pipeline", f"pipeline.schedule={name}"))
    if name in NOT_HERE:
        return put("mode", "pipeline", f"there is no {value} here; a pipeline shares a model among devices too")
    other = {name.replace("_", ""): name for name in MODES}.get(name) or OTHER_VALUES["mode"].get(name)
    return put("mode", other) if other else None


def devices(key: str, value: str, around: Around) -> Meaning | None:
    """Devices, under `devices` or a name that others have for it: a list of them, one, or their number."""
    names = _device_names(value)
    name = plain(value)
    if key == "devices" and (value == "auto" or (value.startswith("[") and "".join(value.split()) == _list(names))):
        return None
    if value in ("-1", "[-1]") or name in ("auto", "all", "gpu", "gpus", "cuda", "tpu", "none", "true"):
        return put("devices", "auto")
    if name in ("cpu", "mps", "xla") or (value == "0" and key.endswith("gpus")):
        return put("devices", "[cpu]", "Apple's GPUs are not supported" if name == "mps" else "")
    if re.fullmatch(r"\d+", value) and value != "0" and key.rpartition(".")[2] in ("devices", "gpus"):
        count = int(value)
        if around.one_process:
            return put("devices", _list([f"cuda:{number}" for number in range(min(count, MOST))]))
        return put("nproc", str(count), f"the card number {count}: devices=[cuda:{count}]")
    return put("devices", _list(names)) if names and all(map(_is_device, names)) else None


def _device_names(value: str) -> list[str]:
    """The devices that a list names: 0,1 and cuda0 and cuda:0-3 and gpu:0 are cards."""
    names: list[str] = []
    for name in filter(None, re.split(r"[,; ]+", value.strip("[]()").replace("'", "").replace('"', ""))):
        card = re.fullmatch(r"(?:(?:cuda|gpu):?)?(\d{1,3})(?:-(\d{1,3}))?", name.lower())
        if card is None:
            names.append(name)
        else:
            last = min(int(card[2] or card[1]), int(card[1]) + MOST - 1)
            names += [f"cuda:{number}" for number in range(int(card[1]), last + 1)]
    return names


def _list(names: list[str]) -> str:
    return f"[{','.join(names)}]"


def _is_device(name: str) -> bool:
    return re.fullmatch(DEVICE, name) is not None


def model_name(value: str, around: Around) -> Meaning | None:
    """A model's name: ours, torchvision's or timm's."""
    if "plugin" in around.values:  # it may have registered this very name
        return None
    names = {*SMALL_MODELS, *torchvision_classifiers()}
    if value in names or value.startswith(TIMM):
        return None
    timms = re.fullmatch(r"(?:hf[-_]hub:)?timm[/.\-_]([\w.]+)", value)
    if timms:
        return put("model.name", f"{TIMM}{timms[1]}")
    other = {plain(name): name for name in names}.get(plain(value.rpartition(".")[2]))
    return put("model.name", other) if other else None


def data_name(value: str, around: Around) -> Meaning | None:
    """A data set's name."""
    if value in DATASETS or "plugin" in around.values:
        return None
    if plain(value) in IMAGENET:
        return Meaning(("data.name=imagefolder", "data.root=/path/to/imagenet"))
    if plain(value) in ("webdataset", "wds", "tar", "tars", "parquet"):
        return put("data.name", "shards")
    other = {name.replace("_", ""): name for name in DATASETS}.get(plain(value))
    return put("data.name", other) if other else None


def weights(value: str, _: Around) -> Meaning | None:
    """Published weights, none, or a file of some."""
    if value.lower() in ("imagenet", *YES):
        return put("model.weights", "DEFAULT")
    if value.lower() in ("scratch", *NOTHING):
        return put("model.weights", "null") if value != "null" else None
    return put("model.init_from", value) if value.endswith(WEIGHTS) or "/" in value else None


def _resume(value: str, around: Around) -> Meaning | None:
    if value in ("auto", "null"):
        return None
    if plain(value) in (*YES, "latest", "last", "must", "allow"):
        return put("resume", "auto")
    if plain(value) in (*NOTHING, "never"):
        return put("resume", "null")
    run = str(Path(value.partition("/checkpoints")[0]))
    run = str(Path(run).parent) if run.endswith(WEIGHTS) else run
    missing = [f"{key}={run}" for key in ("recipe", "output") if key not in around.values]
    return Meaning((*missing, "resume=auto"))


_KEYS: dict[str, Callable[[str, Around], Meaning | None]] = {
    "mode": mode,
    "model.name": model_name,
    "model.weights": weights,
    "data.name": data_name,
    "devices": lambda value, around: devices("devices", value, around),
    "resume": _resume,
}
