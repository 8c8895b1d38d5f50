"""What a key=value of another program, or a slip, is in our words. Pure: reads the schema and names, no device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from trainer.cli.dialects.meaning import NOTHING, SHARDS, WEIGHTS, Around, Meaning, plain, put
from trainer.cli.dialects.other_programs import ELSEWHERE
from trainer.cli.dialects.values import IMAGENET, data_name, devices, model_name, unknown, value_of
from trainer.cli.known_keys import is_name, is_path_or_text, keys, our_name, sections
from trainer.errors import RecipeError
from trainer.recipe import MODES, find, shipped_recipes
from trainer.recipe.checks import DATASETS, OWN_PHOTOS, SMALL_MODELS, torchvision_classifiers
from trainer.recipe.other_names import OTHER_VALUES

FOREIGN = ("trainer", "training", "train", "args", "hparams", "params")  # sections that others have
TABLES = (".csv", ".json", ".jsonl", ".tsv", ".txt")
PHOTOS = ("photos", "imagefolder", "folder", "custom", "myphotos", "images", "finetuning", "transfer")


def meaning(key: str, value: str, around: Around) -> Meaning | None:
    """What `key=value` is in our words; None where it is one of ours, or nobody knows.

    Args:
        key: as `spelling` brings it.
        value: as typed.
        around: the rest of the command line.
    """
    if not value:
        return None
    section, _, own = key.partition(".")
    if section in FOREIGN and own and not is_name(key):  # trainer.fast_dev_run, args.lr
        return meaning(own, value, around) or (put(own, value) if own in keys() else None)
    if value.startswith("{"):  # a section as YAML writes it
        return None
    several = _several(key, value, around)
    if several is not None:
        return several
    elsewhere = ELSEWHERE[key](value, around) if key in ELSEWHERE else None
    if elsewhere is not None:
        return elsewhere
    if key == "output" and around.command in ("compare", "predict") and value.endswith(TABLES):
        return _table(value, around)
    if key in around.own:
        return _own(key, value)
    if value == "true" and key in shipped_recipes():
        return put("recipe", key)
    ours = our_name(key, around.own)
    if not ours or (ours not in keys() and ours not in sections() and ours not in around.own):
        return None
    if ours in sections():
        found = _SECTIONS[ours](value, around) if ours in _SECTIONS else None
    else:
        found = devices(key, value, around) if ours == "devices" else value_of(ours, value, around)
    if found is not None or ours == key:
        return found
    return (_own(ours, value) or put(ours, value)) if ours in around.own else unknown(ours, value) or put(ours, value)


def _several(key: str, value: str, around: Around) -> Meaning | None:
    """Words that stand in one: recipe=digits,epochs=3."""
    first, *rest = re.split(r"[,;\s]+(?=[A-Za-z_][\w.\-]*=)", value)
    text = is_path_or_text(key) and not (key.endswith(".name") or (key == "recipe" and not Path(value).exists()))
    if not rest or not first or text or value.startswith("["):
        return None
    pairs = [(key, first), *(word.split("=", 1) for word in rest)]
    if not all(name in ELSEWHERE or is_name(name) for name, _ in pairs):
        return None
    found = [(meaning(name, said, around), f"{name}={said}") for name, said in pairs]
    return Meaning(tuple(word for means, typed in found for word in (means.words if means else (typed,))))


def _own(key: str, value: str) -> Meaning | None:
    """A word of the command itself."""
    if key == "recipe":
        return _recipe(value)
    if key == "checkpoint":
        run = _newest_run(Path(value).expanduser())
        return put("checkpoint", str(run), f"the newest run in {value}") if run else None
    if key == "nproc" and plain(value) in ("auto", "all", "gpu", "gpus", "max", "cpu", "1"):
        return Meaning((), "without nproc= there is a process for every GPU: leave it out") if value != "1" else None
    return _modes(value) if key == "modes" else _sweep(value) if key == "sweep" else None


def _table(value: str, around: Around) -> Meaning:
    """The folder that is meant by a file in it."""
    path = Path(value)
    folder = str(path.parent if path.parent != Path() else path.with_suffix(""))
    lines = around.command == "predict" and path.suffix == ".jsonl" and "predict.format" not in around.values
    note = "a folder" + (", for predictions.csv" if around.command == "predict" and not lines else "")
    return Meaning((f"output={folder}", *["predict.format=jsonl"] * lines), note)


def _newest_run(folder: Path) -> Path | None:
    """The run that was last written to, of a folder that holds several and is none itself."""
    try:
        if (folder / "recipe.yaml").exists() or (folder / "checkpoints").exists():
            return None
        runs = [recipe.parent for recipe in folder.glob("*/recipe.yaml")]
        return max(runs, key=lambda run: max(file.stat().st_mtime for file in run.iterdir()), default=None)
    except OSError:
        return None


def _recipe(value: str) -> Meaning | None:
    shipped = shipped_recipes()
    path = Path(value).expanduser()
    try:
        find(value)
        return None
    except RecipeError:
        pass
    stem, name = path.stem if path.suffix in (".yaml", ".yml") else path.name, plain(path.name.partition(".")[0])
    if stem in shipped:
        return put("recipe", stem)
    alike = {plain(recipe): recipe for recipe in shipped}
    if name in alike:
        return put("recipe", alike[name])
    if name in IMAGENET:
        return Meaning(("recipe=resnet50", "data.root=/path/to/imagenet"))
    if name == "cifar":
        return put("recipe", "cifar10", "or recipe=cifar100")
    if stem in MODES:
        return Meaning(("recipe=digits", f"mode={stem}"))
    if path.is_dir() and (run := _newest_run(path)) is not None:
        return put("recipe", str(run), f"the newest run in {value}")
    if path.is_dir() or name in PHOTOS:
        return Meaning(("recipe=finetune", f"data.root={value if path.is_dir() else 'FOLDER'}"))
    known = {plain(model): model for model in (*SMALL_MODELS, *torchvision_classifiers())}
    if name in known:
        model = f"model.name={known[name]}"
        if known[name] in SMALL_MODELS:
            return Meaning(("recipe=digits", model))
        return Meaning(("recipe=resnet50", model), f"with your own photos: recipe=finetune {model} data.root=FOLDER")
    return None


def _modes(value: str) -> Meaning | None:
    if value == "all":
        return Meaning((), "without modes= all of them are compared: leave it out")
    listed = value.strip("[]()").replace(" ", "").split(",")
    if value.startswith("[") or not all(listed):
        return None
    return put("modes", f"[{','.join(listed)}]")


def _sweep(value: str) -> Meaning | None:
    """A key and its values: batch_size=32,64 and lr:[0.1,0.2] as batch_size:[32,64] and optimizer.lr:[0.1,0.2]."""
    found = re.fullmatch(r"([A-Za-z_][\w.\-]*)\s*[=:]\s*[\[(]?([^\[\]()]*[^\[\]() ])[\])]?", value)
    if found is None:
        return None
    name = found[1].replace("-", "_")
    key = our_name(name, ("nproc",))
    word = f"{key if key in (*keys(), 'nproc') else name}:[{','.join(re.split('[, ]+', found[2]))}]"
    return put("sweep", word) if word != re.sub(r",\s+", ",", value) else None


# --- a section's name for the key in it that is meant -----------------------------------------------------------------


def _model(value: str, around: Around) -> Meaning:
    if "checkpoint" in around.own and ("/" in value or value.endswith(WEIGHTS)):
        return put("checkpoint", value)
    if "/" in value and Path(value).is_dir():
        return put("model.init_from", value)
    if value.endswith(WEIGHTS):
        stem = Path(value).name.partition(".")[0]
        if stem in torchvision_classifiers() and not Path(value).exists():
            return Meaning((f"model.name={stem}", "model.weights=DEFAULT"))
        return put("model.init_from", value)
    return model_name(value, around) or put("model.name", value)


def _data(value: str, around: Around) -> Meaning:
    named = data_name(value, around)
    if named is not None or value in DATASETS:
        return named or put("data.name", value)
    if value.endswith(SHARDS) and around.data_name != "shards":
        return Meaning(("data.name=shards", f"data.root={value}"))
    if around.data_name in OWN_PHOTOS:
        return put("data.root", value)
    return Meaning(("data.name=imagefolder", f"data.root={value}"))


def _loss(value: str, _: Around) -> Meaning | None:
    task = OTHER_VALUES["loss.name"].get(plain(value))
    if task:
        return put("task.name", task, "which has this loss")
    if value.lower() in NOTHING:
        return None
    told = "cross-entropy for task.name=classification, BCE for multilabel, MSE for regression"
    return Meaning((), f"the loss is the task's: {told}; guide own tells how to bring another")


def _of(key: str) -> Callable[[str, Around], Meaning]:
    """The one key of a section that is meant: optimizer=adam is optimizer.name=adam."""
    return lambda value, around: value_of(key, value, around) or unknown(key, value) or put(key, value)


_SECTIONS: dict[str, Callable[[str, Around], Meaning | None]] = {
    "model": _model,
    "data": _data,
    "loss": _loss,
    "optimizer": _of("optimizer.name"),
    "schedule": _of("schedule.name"),
    "task": _of("task.name"),
    "augment": _of("augment.auto"),
    "pipeline": lambda value, around: _of("pipeline.schedule")(plain(value), around),
    "save": _of("save.every_epochs"),
    "local_sgd": _of("local_sgd.every"),
    "stop": _of("stop.patience"),
}
