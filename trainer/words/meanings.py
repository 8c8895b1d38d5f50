"""What a key=value of another program, or a slip, is in our words. Pure: reads the schema and names, no device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import RecipeError
from trainer.recipe import DEVICE, MODES, TRAITS, find, load, shipped_recipes
from trainer.recipe.checks import DATASETS, SMALL_MODELS, torchvision_classifiers
from trainer.recipe.other_names import OTHER_VALUES
from trainer.words.keys import choices, keys, our_name, sections

WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar")
YES, NO = ("1", "y", "yes", "on", "t"), ("0", "n", "no", "off", "f")
IMAGENET = ("imagenet", "imagenet1k", "imagenet2012", "ilsvrc2012", "ilsvrc")
PHOTOS = ("photos", "imagefolder", "folder", "custom", "myphotos", "images", "finetuning", "transfer")


@dataclass(frozen=True)
class Meaning:
    """Words of ours that say what was meant, and what else it could have meant."""

    words: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Around:
    """What else was typed: the command, its own words, and the other keys."""

    command: str
    own: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)

    @property
    def one_process(self) -> bool:
        """Whether the mode drives several devices from one process."""
        traits = TRAITS.get(self.values.get("mode", ""))
        return traits is not None and traits.processes == "one" and traits.many_devices

    @property
    def data_name(self) -> str:
        """The data set of the recipe that is asked for."""
        if "data.name" in self.values:
            return self.values["data.name"]
        try:
            return load(self.values.get("recipe")).data.name
        except RecipeError:
            return ""


def meaning(key: str, value: str, around: Around) -> Meaning | None:
    """What `key=value` is in our words; None where it is one of ours, or nobody knows.

    Args:
        key: as `spelling` brings it.
        value: as typed.
        around: the rest of the command line.
    """
    if not value:
        return None
    if key in _WHOLE:
        return _WHOLE[key](value, around)
    if key in around.own:
        if key == "recipe":
            return _recipe(value)
        return _modes(value) if key == "modes" else None
    ours = our_name(key, around.own)
    if not ours or (ours not in keys() and ours not in sections() and ours not in around.own):
        return None
    found = _devices(key, value, around) if ours == "devices" else _value(ours, value, around)
    if found is None and ours != key:
        return _recipe(value) or Meaning((f"recipe={value}",)) if ours == "recipe" else Meaning((f"{ours}={value}",))
    return found


def _value(key: str, value: str, around: Around) -> Meaning | None:
    plain = _plain(value)
    if key in _SECTIONS:
        return _SECTIONS[key](value, around)
    if key in _KEYS:
        return _KEYS[key](value, around)
    allowed = choices().get(key, ())
    if value in allowed or (key == "task.name" and "plugin" in around.values):
        return None
    if allowed[:2] == ("true", "false"):
        return _set(key, "true") if value.lower() in YES else _set(key, "false") if value.lower() in NO else None
    if key in keys() and keys()[key] is None and plain in ("none", "nil", "off", "false", "no"):
        return _set(key, "null")
    if allowed or key in OTHER_VALUES:
        known = {name.replace("_", ""): name for name in allowed}
        other = known.get(plain) or OTHER_VALUES.get(key, {}).get(plain)
        return _set(key, other) if other else None
    if isinstance(keys().get(key), float) and re.fullmatch(r"\d+,\d+", value):
        return _set(key, value.replace(",", "."))
    return None


def _set(key: str, value: str, note: str = "") -> Meaning:
    return Meaning((f"{key}={value}",), note)


def _plain(value: str) -> str:
    """A value without capitals and signs, but for dots: "Data-Parallel" is dataparallel."""
    return re.sub(r"[^a-z0-9.]", "", value.lower())


# --- keys with more than a list of values -----------------------------------------------------------------------------


def _recipe(value: str) -> Meaning | None:
    shipped = shipped_recipes()
    path = Path(value).expanduser()
    try:
        find(value)
        return None
    except RecipeError:
        pass
    stem, plain = path.stem if path.suffix in (".yaml", ".yml") else path.name, _plain(path.name.partition(".")[0])
    if stem in shipped:
        return _set("recipe", stem)
    alike = {_plain(name): name for name in shipped}
    if plain in alike:
        return _set("recipe", alike[plain])
    if plain in IMAGENET:
        return Meaning(("recipe=resnet50", "data.root=/path/to/imagenet"))
    if plain == "cifar":
        return _set("recipe", "cifar10", "or recipe=cifar100")
    if stem in MODES:
        return Meaning(("recipe=digits", f"mode={stem}"))
    if path.is_dir() or plain in PHOTOS:
        return Meaning(("recipe=finetune", f"data.root={value if path.is_dir() else 'FOLDER'}"))
    known = {_plain(name): name for name in (*SMALL_MODELS, *torchvision_classifiers())}
    if plain in known:
        model = f"model.name={known[plain]}"
        if known[plain] in SMALL_MODELS:
            return Meaning(("recipe=digits", model))
        return Meaning(("recipe=resnet50", model), f"with your own photos: recipe=finetune {model} data.root=FOLDER")
    return None


def _modes(value: str) -> Meaning | None:
    listed = value.strip("[]()").replace(" ", "").split(",")
    if value.startswith("[") or not all(listed):
        return None
    return _set("modes", f"[{','.join(listed)}]")


def _mode(value: str, around: Around) -> Meaning | None:
    plain = _plain(value)
    if value in MODES:
        return None
    listed = [name for name in re.split(r"[\[\], ]+", value) if name]
    if len(listed) > 1 and set(listed) <= {*MODES}:
        if around.command == "compare":
            return _set("modes", f"[{','.join(listed)}]")
        return Meaning((f"mode={listed[0]}",), f"to compare them: compare modes=[{','.join(listed)}]")
    if plain in choices()["pipeline.schedule"]:
        return Meaning(("mode=pipeline", f"pipeline.schedule={plain}"))
    if plain in ("fsdp", "fsdp2", "fullysharded", "zero", "zero3", "deepspeed", "tensorparallel", "tp", "horovod"):
        return _set("mode", "pipeline", f"there is no {value} here; a pipeline shares a model among devices too")
    other = {name.replace("_", ""): name for name in MODES}.get(plain) or OTHER_VALUES["mode"].get(plain)
    return _set("mode", other) if other else None


def _devices(key: str, value: str, around: Around) -> Meaning | None:
    text = value.strip("[]()'\" ").replace(" ", "")
    listed = [name for name in text.split(",") if name]
    plain = _plain(value)
    if key == "devices" and (value == "auto" or (value.startswith("[") and all(_is_device(name) for name in listed))):
        return None
    if plain in ("auto", "all", "1", "gpu", "gpus", "cuda", "tpu", "none", "true") and value not in ("1", "[1]"):
        return _set("devices", "auto")  # -1 too
    if plain in ("cpu", "mps", "xla") or (value == "0" and key.endswith("gpus")):
        return _set("devices", "[cpu]", "Apple's GPUs are not supported" if plain == "mps" else "")
    if listed and all(name.isdigit() for name in listed):
        named = f"[{','.join(f'cuda:{int(name)}' for name in listed)}]"
        counted = key.rpartition(".")[2] in ("devices", "gpus") and len(listed) == 1 and not value.startswith("[")
        if not counted or value == "0":
            return _set("devices", named)
        count = int(value)
        if around.one_process:
            return _set("devices", f"[{','.join(f'cuda:{number}' for number in range(min(count, 64)))}]")
        return _set("nproc", str(count), f"the card number {count}: devices={named}")
    if listed and all(_is_device(name) for name in listed):
        return _set("devices", f"[{','.join(listed)}]")
    return None


def _is_device(name: str) -> bool:
    return re.fullmatch(DEVICE, name) is not None


def _model(value: str, around: Around) -> Meaning | None:
    if value.endswith(WEIGHTS):
        stem = Path(value).name.partition(".")[0]
        if stem in torchvision_classifiers() and not Path(value).exists():
            return Meaning((f"model.name={stem}", "model.weights=DEFAULT"))
        return _set("model.init_from", value)
    return _model_name(value, around) or _set("model.name", value)


def _model_name(value: str, around: Around) -> Meaning | None:
    if "plugin" in around.values:  # it may have registered this very name
        return None
    names = {*SMALL_MODELS, *torchvision_classifiers()}
    if value in names:
        return None
    other = {_plain(name): name for name in names}.get(_plain(value.rpartition(".")[2]))
    return _set("model.name", other) if other else None


def _data(value: str, around: Around) -> Meaning | None:
    named = _data_name(value, around)
    if named is not None or value in DATASETS:
        return named or _set("data.name", value)
    if around.data_name == "imagefolder":
        return _set("data.root", value)
    return Meaning(("data.name=imagefolder", f"data.root={value}"))


def _data_name(value: str, around: Around) -> Meaning | None:
    if value in DATASETS or "plugin" in around.values:
        return None
    if _plain(value) in IMAGENET:
        return Meaning(("data.name=imagefolder", "data.root=/path/to/imagenet"))
    other = {name.replace("_", ""): name for name in DATASETS}.get(_plain(value))
    return _set("data.name", other) if other else None


def _named(section: str) -> Callable[[str, Around], Meaning]:
    """A section that has a name: optimizer=adam is optimizer.name=adam."""

    def named(value: str, around: Around) -> Meaning:
        return _value(f"{section}.name", value, around) or _set(f"{section}.name", value)

    return named


def _loss(value: str, _: Around) -> Meaning | None:
    task = OTHER_VALUES["loss.name"].get(_plain(value))
    return _set("task.name", task, "which has this loss") if task else None


def _resume(value: str, around: Around) -> Meaning | None:
    if value in ("auto", "null"):
        return None
    if _plain(value) in (*YES, "true", "latest", "last", "must", "allow"):
        return _set("resume", "auto")
    if _plain(value) in (*NO, "false", "none", "never"):
        return _set("resume", "null")
    run = value.partition("/checkpoints")[0].rstrip("/")
    missing = [f"{key}={run}" for key in ("recipe", "output") if key not in around.values]
    return Meaning((*missing, "resume=auto"))


def _or_null(key: str, usual: str, note: str = "") -> Callable[[str, Around], Meaning | None]:
    """A key that has a number or null: a plain yes is a usual number, a no is null."""

    def chosen(value: str, _: Around) -> Meaning | None:
        if value.lower() in ("true", *YES[1:]):
            return _set(key, usual, note)
        return _set(key, "null") if value.lower() in ("false", "none", *NO) else None

    return chosen


def _weights(value: str, _: Around) -> Meaning | None:
    if value.lower() in ("true", "imagenet", *YES):
        return _set("model.weights", "DEFAULT")
    if value.lower() in ("false", "none", "scratch", *NO):
        return _set("model.weights", "null")
    return _set("model.init_from", value) if value.endswith(WEIGHTS) or "/" in value else None


_KEYS: dict[str, Callable[[str, Around], Meaning | None]] = {
    "mode": _mode,
    "model.name": _model_name,
    "model.weights": _weights,
    "model.freeze": _or_null("model.freeze", "-1", "all but the last layer; or a number of blocks"),
    "optimizer.lr_per": _or_null("optimizer.lr_per", "256", "or the images a step that optimizer.lr is for"),
    "stop.patience": _or_null("stop.patience", "5", "or another number of epochs"),
    "data.name": _data_name,
    "resume": _resume,
    "ema": _or_null("ema", "0.999"),
}
_SECTIONS: dict[str, Callable[[str, Around], Meaning | None]] = {
    "model": _model,
    "data": _data,
    "optimizer": _named("optimizer"),
    "schedule": _named("schedule"),
    "task": _named("task"),
    "stop": lambda value, around: _value("stop.patience", value, around) or _set("stop.patience", value),
    "loss": _loss,
    "augment": lambda value, around: _value("augment.auto", value, around) or _set("augment.auto", value),
    "pipeline": lambda value, _: _set("pipeline.schedule", _plain(value)),
    "save": lambda value, _: _set("save.every_epochs", value),
    "local_sgd": lambda value, _: _set("local_sgd.every", value),
}


# --- keys that exist elsewhere only, with a value that decides --------------------------------------------------------


def _precision(name: str) -> Callable[[str, Around], Meaning]:
    def chosen(value: str, around: Around) -> Meaning:
        if value.lower() in ("false", "none", "o0", *NO):
            return _set("precision", "fp32")
        if value.lower() in ("true", *YES):
            return _set("precision", name)
        return _value("precision", value, around) or _set("precision", name)

    return chosen


def _pretrained(value: str, around: Around) -> Meaning:
    return _weights(value, around) or _set("model.weights", value)


def _cpu(yes: bool) -> Callable[[str, Around], Meaning]:
    """A switch for the CPU (`cpu`, `no_cuda`), or for GPUs."""
    return lambda value, _: _set("devices", "[cpu]" if (value.lower() not in ("false", *NO)) is yes else "auto")


def _nodes(value: str, _: Around) -> Meaning:
    return Meaning((), f"several nodes: on each of them NNODES={value} NODE_RANK=0 MASTER_ADDR=HOST before the command")


def _set_by_torchrun(_: str, __: Around) -> Meaning:
    return Meaning((), "torchrun tells it in the environment: leave it out")


def _dropped(why: str) -> Callable[[str, Around], Meaning]:
    return lambda _, __: Meaning((), why)


_WHOLE: dict[str, Callable[[str, Around], Meaning | None]] = {
    **dict.fromkeys(("amp", "use_amp", "half", "mixed", "autocast"), _precision("bf16")),
    **{name: _precision(name) for name in ("fp16", "bf16", "tf32", "fp32")},
    "allow_tf32": _precision("tf32"),
    "pretrained": _pretrained,
    "weights": _pretrained,
    **dict.fromkeys(("cpu", "no_cuda", "use_cpu"), _cpu(True)),
    **dict.fromkeys(("cuda", "use_cuda", "use_gpu"), _cpu(False)),
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes"), _nodes),
    **dict.fromkeys(("local_rank", "local-rank", "rank", "node_rank"), _set_by_torchrun),
    **dict.fromkeys(("verbose", "v", "quiet", "q", "debug"), _dropped("there is no such switch: leave it out")),
    "pin_memory": _dropped("memory is pinned where a GPU trains: leave it out"),
    "standalone": _dropped("ranks are started by nproc=: leave it out"),
    "shuffle": _dropped("training images are shuffled in every epoch: leave it out"),
}
