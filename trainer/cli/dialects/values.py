"""What the value of one of our keys is in our words: modes, devices, models, data sets, switches, numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from trainer.cli.dialects.meaning import NO, NOTHING, WEIGHTS, YES, Around, Meaning, plain, put
from trainer.cli.dialects.numbers import is_figure, listed, number
from trainer.cli.known_keys import choices
from trainer.recipe import DEVICE, MODES
from trainer.recipe.checks import DATASETS, SMALL_MODELS, torchvision_classifiers
from trainer.recipe.other_names import OTHER_VALUES
from trainer.recipe.timm_names import TIMM, timm_models
from trainer.recipe.word_values import kinds

IMAGENET = ("imagenet", "imagenet1k", "imagenet2012", "ilsvrc2012", "ilsvrc")
NOT_HERE = ("fsdp", "fsdp2", "fullysharded", "zero", "zero3", "deepspeed", "tensorparallel", "tp", "horovod")
FAMILIES = {  # of torchvision's models, each with its smallest
    "convnext": "convnext_tiny", "densenet": "densenet121", "efficientnet": "efficientnet_b0",
    "efficientnetv2": "efficientnet_v2_s", "inception": "inception_v3", "maxvit": "maxvit_t", "mnasnet": "mnasnet0_5",
    "mobilenet": "mobilenet_v3_small", "mobilenetv3": "mobilenet_v3_small", "regnet": "regnet_y_400mf",
    "regnety": "regnet_y_400mf", "regnetx": "regnet_x_400mf", "resnet": "resnet18", "resnext": "resnext50_32x4d",
    "shufflenet": "shufflenet_v2_x0_5", "shufflenetv2": "shufflenet_v2_x0_5", "squeezenet": "squeezenet1_1",
    "swin": "swin_t", "swinv2": "swin_v2_t", "vgg": "vgg11", "vit": "vit_b_16", "wideresnet": "wide_resnet50_2",
}  # fmt: skip
TIMMS = "vit_base_patch16_224"
HUB = {"vit_base_patch16_224": "vit_b_16", "vit_base_patch32_224": "vit_b_32", "vit_large_patch16_224": "vit_l_16"}
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


def _image_size(value: str, _: Around) -> Meaning | None:
    """Pixels a side; elsewhere the channels stand before them, or behind."""
    sizes = [size for size in re.split(r"[ ,x]+", value.lower().strip("[]() ")) if size]
    if len(sizes) == 3 and all(map(str.isdigit, sizes)):
        sizes = sizes[1:] if sizes[0] in ("1", "3") else sizes[:2] if sizes[2] in ("1", "3") else sizes
    if len(sizes) > 1 and all(size.isdigit() and len(size) > 1 for size in sizes):  # 1,024 is one number
        if len(set(sizes)) == 1:
            return put("data.image_size", sizes[0])
        return Meaning((), f"images are square here: give one number, data.image_size={sizes[0]}")
    return number("data.image_size", value)


def _warmup(value: str, around: Around) -> Meaning | None:
    """Epochs; elsewhere a share of them."""
    share = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?%", value)
    if not share:
        return number("schedule.warmup_epochs", value)
    if not around.epochs:
        return Meaning((), "schedule.warmup_epochs= is a number of epochs, not a share of them")
    found = float(share[1]) / 100 * around.epochs
    return put("schedule.warmup_epochs", f"{found:g}", f"{value} of {around.epochs} epochs")


def unknown(key: str, value: str) -> Meaning | None:
    """For a value that is none of a list's: what there is. For one that is no number: that it ought to be."""
    allowed = choices().get(key, ())
    if key in kinds() and {*kinds()[key]} <= {int, float, type(None)} and not is_figure(value):
        whole = "" if float in kinds()[key] else "whole "
        return None if value == "null" else Meaning((), f"{key} is a {whole}number, and {value[:40]} is none")
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
    if other is None and plain(value) in FAMILIES:
        return put("model.name", FAMILIES[plain(value)], "the smallest of them")
    return put("model.name", other) if other else _of_hub(value, names)


def _of_hub(value: str, names: Collection[str]) -> Meaning | None:
    """A model by its address at Hugging Face: google/vit-base-patch16-224, hf:google/vit."""
    hub = re.fullmatch(r"(?:hf[-_]?(?:hub)?:)?(?:https://huggingface\.co/)?[\w.\-]+/([\w.\-]+)|hf:([\w.\-]+)", value)
    if not hub or value.endswith(WEIGHTS) or Path(value).exists() or value.startswith((".", "runs/")):
        return None
    name = (hub[1] or hub[2]).replace("-", "_").lower()
    own = name.replace("_", "") if name.replace("_", "") in names else HUB.get(name)
    if own in names:
        return put("model.name", str(own))
    if name in timm_models():
        return put("model.name", f"{TIMM}{name}")
    return Meaning((), f"models of Hugging Face are here by timm's name for them, as model.name={TIMM}{TIMMS}")


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
    "data.image_size": _image_size,
    "schedule.warmup_epochs": _warmup,
}
