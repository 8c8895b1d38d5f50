"""Values that no row of `other_values` can translate: a function for each such key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from trainer.cli.dialects.meaning import SHARDS, CommandLine, Meaning, holds_runs, plain, put
from trainer.cli.dialects.other_values import NONE, OTHER_VALUES
from trainer.cli.known_keys import our_name
from trainer.errors import RecipeError
from trainer.recipe import DEVICE, MODES, TRAITS, find, shipped_recipes
from trainer.recipe.known_names import (
    DATASETS,
    OWN_PHOTOS,
    SMALL_MODELS,
    TIMM,
    WEIGHTS_FILES,
    timm_models,
    torchvision_classifiers,
)
from trainer.recipe.other_names import OTHER_KEYS

TABLES = (".csv", ".json", ".jsonl", ".tsv", ".txt")
TIMMS = "vit_base_patch16_224"
MOST = 64  # cards that are listed for a number of them
RUN_NAMES = ("name", "exp", "experiment", "run_id", "run_name", "job_name")  # a run's name, elsewhere
PARTS = ("train_dir", "train_data_dir", "train_folder", "train_path", "traindir")  # of a data set, elsewhere
BETAS = (("adam_beta1", "beta_1", "beta1"), ("adam_beta2", "beta_2", "beta2"))  # of Adam, elsewhere: both of its two


def _mode(_: str, value: str, line: CommandLine) -> Meaning | None:
    """Several modes."""
    several = [name for name in re.split(r"[\[\], ]+", value) if name]
    if len(several) < 2 or not {*several} <= {*MODES}:
        return None
    modes = f"modes=[{','.join(several)}]"
    if line.command == "compare":
        return Meaning((modes,))
    return put("mode", several[0], f"to compare them: compare {modes}")


def _modes(_: str, value: str, __: CommandLine) -> Meaning | None:
    names = value.strip("[]()").replace(" ", "").split(",")
    return put("modes", f"[{','.join(names)}]") if not value.startswith("[") and all(names) else None


def _recipe(key: str, value: str, line: CommandLine) -> Meaning | None:
    path, shipped = Path(value), shipped_recipes()
    try:
        find(value)
        return None
    except RecipeError:
        pass
    stem, name = path.stem if path.suffix in (".yaml", ".yml") else path.name, plain(path.name.partition(".")[0])
    alike = stem if stem in shipped else {plain(recipe): recipe for recipe in shipped}.get(name)
    if alike is None and path.suffix == ".py":  # resnet50_8xb32_in1k.py
        alike = max((recipe for recipe in shipped if stem.startswith(f"{recipe}_")), key=len, default=None)
    if alike is not None:
        return put("recipe", alike, "a file in Python is not read" if path.suffix == ".py" else "")
    if os.path.isdir(os.path.expanduser(value)):
        return run_within(key, value, line) or Meaning(("recipe=finetune", f"data.root={value}"))
    known = {plain(model): model for model in (*SMALL_MODELS, *torchvision_classifiers())}
    if name not in known:
        note = f"recipe= is a recipe's name or file, not {value[:40]}; recipes lists them, recipes NAME prints one"
        return Meaning((), note) if key != "recipe" or path.suffix == ".py" else None
    model = f"model.name={known[name]}"
    if known[name] in SMALL_MODELS:
        return Meaning(("recipe=digits", model))
    return Meaning(("recipe=resnet50", model), f"with your own photos: recipe=finetune {model} data.root=FOLDER")


def run_within(_: str, value: str, line: CommandLine) -> Meaning | None:
    """For a folder of runs: one of them is wanted."""
    holds = holds_runs(os.path.expanduser(value))
    key = "checkpoint" if "checkpoint" in line.options else "recipe"
    return put(key, f"{value.rstrip('/')}/RUN", f"one of the runs in {value}") if holds else None


def _resume(_: str, value: str, line: CommandLine) -> Meaning:
    """A run to go on with."""
    run = str(Path(value.partition("/checkpoints")[0]))
    run = str(Path(run).parent) if run.endswith(WEIGHTS_FILES) else run
    if run == ".":
        return Meaning((), "output=RUN resume=auto continues a run; model.init_from=FILE starts from weights alone")
    missing = [f"{key}={run}" for key in ("recipe", "output") if key not in line.values]
    return Meaning((*missing, "resume=auto"))


def _output(key: str, value: str, line: CommandLine) -> Meaning | None:
    """A run's folder: elsewhere its name is typed apart from it, or a file to be written."""
    if key in RUN_NAMES:
        keys_of_folders = (name for name in line.values if our_name(name, ()) == "output" and name not in RUN_NAMES)
        folder = next((line.values[name] for name in keys_of_folders if line.values[name]), "")
        folder = folder or ("" if "/" in value else "runs")
        return put("output", f"{folder.rstrip('/')}/{value}" if folder else value)
    named = next((line.values[name] for name in RUN_NAMES if line.values.get(name)), "")
    if named:
        return put("output", f"{value.rstrip('/')}/{named}")
    if line.command not in ("compare", "predict") or not value.endswith(TABLES):
        return None
    path = Path(value)
    output = f"output={path.parent if path.parent != Path() else path.with_suffix('')}"
    if line.command == "predict" and path.suffix == ".jsonl" and "predict.format" not in line.values:
        return Meaning((output, "predict.format=jsonl"), "a folder")
    return Meaning((output,), "a folder" + ", for predictions.csv" * (line.command == "predict"))


def _devices(key: str, value: str, line: CommandLine) -> Meaning | None:
    """A list of devices, one, or their number."""
    if key.rpartition(".")[2] in ("devices", "gpus") and value.isdigit():
        traits = TRAITS.get(line.values.get("mode", ""))
        one_process = traits is not None and traits.processes == "one" and traits.many_devices
        if value != "0" and not one_process:
            return put("nproc", value, f"the card number {value}: devices=[cuda:{value}]")
        if value != "0" or key.endswith("gpus"):
            cards = [f"cuda:{number}" for number in range(min(int(value), MOST))]
            return put("devices", f"[{','.join(cards) or 'cpu'}]")
    names = _device_names(value)
    text = f"[{','.join(names)}]"
    right = key == "devices" and value.startswith("[") and "".join(value.split()) == text
    return put("devices", text) if names and not right and all(re.fullmatch(DEVICE, name) for name in names) else None


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


def _model(_: str, value: str, line: CommandLine) -> Meaning:
    """The section's name: a file or a run with weights, or a model's name."""
    if "checkpoint" in line.options and ("/" in value or value.endswith(WEIGHTS_FILES)):
        return put("checkpoint", value)
    stem = os.path.basename(value).partition(".")[0]
    if value.endswith(WEIGHTS_FILES) and stem in torchvision_classifiers() and not os.path.exists(value):
        return Meaning((f"model.name={stem}", "model.weights=DEFAULT"))
    weights = value.endswith(WEIGHTS_FILES) or ("/" in value and os.path.isdir(value))
    return put("model.init_from" if weights else "model.name", value if weights else "{value}")


def _model_name(_: str, value: str, __: CommandLine) -> Meaning | None:
    """A model's name: ours, torchvision's, timm's, or its address at Hugging Face."""
    names = {plain(name): name for name in (*SMALL_MODELS, *torchvision_classifiers())}
    if value in names.values() or value.startswith(TIMM):
        return None
    timms = re.fullmatch(r"(?:hf[-_]hub:)?timm[/.\-_]([\w.]+)", value)
    if timms:
        return put("model.name", f"{TIMM}{timms[1]}")
    if (other := names.get(plain(value.rpartition(".")[2]))) is not None:
        return put("model.name", other)
    hub = re.fullmatch(r"(?:hf[-_]?(?:hub)?:)?(?:https://huggingface\.co/)?[\w.\-]+/([\w.\-]+)|hf:([\w.\-]+)", value)
    if not hub or value.endswith(WEIGHTS_FILES) or os.path.exists(value) or value.startswith((".", "runs/")):
        return None
    name = (hub[1] or hub[2]).replace("-", "_").lower()
    shipped = names.get(plain(name)) or OTHER_VALUES["hub"].get(plain(name))
    if shipped is not None or name in timm_models():
        return put("model.name", shipped or f"{TIMM}{name}")
    return Meaning((), f"models of Hugging Face are here by timm's name for them, as model.name={TIMM}{TIMMS}")


def _weights(_: str, value: str, line: CommandLine) -> Meaning | None:
    """A file of weights."""
    if "/" not in value and not value.endswith(WEIGHTS_FILES):
        return None
    return put("checkpoint" if "checkpoint" in line.options else "model.init_from", value)


def _data(key: str, value: str, line: CommandLine) -> Meaning:
    """The section's name: the name of a data set, or a folder; elsewhere that of its training part."""
    folder, part = os.path.split(value.rstrip("/"))
    if key in PARTS and part.lower() in ("train", "training"):
        return put("data.root", folder or ".", "the folder that both parts are in")
    if plain(value) in {*map(plain, DATASETS), *OTHER_VALUES["data.name"]}:
        return put("data.name", "{value}")
    if line.data_name in OWN_PHOTOS and (line.data_name == "shards" or not value.endswith(SHARDS)):
        return put("data.root", value)
    if "recipe" not in line.values and not value.endswith(SHARDS):
        return put("data.root", value)
    return Meaning((f"data.name={'shards' if value.endswith(SHARDS) else 'imagefolder'}", f"data.root={value}"))


def _image_size(_: str, value: str, __: CommandLine) -> Meaning | None:
    """Pixels a side; elsewhere the channels stand before them, or behind."""
    numbers = [size for size in re.split(r"[ ,x]+", value.lower().strip("[]() ")) if size]
    sizes = [number for number in numbers if number not in ("1", "3")]
    channels = [f"data.channels={number}" for number in numbers if number in ("1", "3")]
    if len(sizes) != 2 or len(channels) > 1 or not all(size.isdigit() and len(size) > 1 for size in sizes):
        return None
    if len({*sizes}) == 1:
        return Meaning((f"data.image_size={sizes[0]}", *channels))
    return Meaning((), f"images are square here: give one number, data.image_size={sizes[0]}")


def _warmup(_: str, value: str, __: CommandLine) -> Meaning | None:
    note = "schedule.warmup_epochs= is a number of epochs, not a share of them"
    return Meaning((), note) if value.endswith("%") else None


def _betas(key: str, value: str, line: CommandLine) -> Meaning:
    """One of Adam's two, which are one key here, with the other where that was typed too."""
    first = key in BETAS[0]
    other = next((line.values[name] for name in BETAS[first] if line.values.get(name)), None)
    return put("optimizer.betas", f"[{value},{other or 0.999}]" if first else f"[{other or 0.9},{value}]")


def _recompute(_: str, value: str, line: CommandLine) -> Meaning | None:
    if value.lower() in NONE or line.staged:
        return None
    return Meaning((), "only mode=split and mode=pipeline have it, as pipeline.recompute=true; guide memory has more")


# By key, of ours or another's: called with the key and value as typed, and the command line.
RULES: dict[str, Callable[[str, str, CommandLine], Meaning | None]] = {
    "mode": _mode, "modes": _modes, "recipe": _recipe, "checkpoint": run_within, "resume": _resume,
    "output": _output, **dict.fromkeys(RUN_NAMES, _output), "devices": _devices, "model": _model,
    "model.name": _model_name, "model.weights": _weights, **dict.fromkeys(("data", *PARTS), _data),
    "data.image_size": _image_size, "schedule.warmup_epochs": _warmup,
    **{name: _recompute for name, key in OTHER_KEYS.items() if key == "pipeline.recompute"},
    **dict.fromkeys((*BETAS[0], *BETAS[1]), _betas),
}  # fmt: skip
