"""Keys without effect: which values of other keys disable them, and the sentence that reports it.

A run prints one line `unused: ...` for each such key. `trainer.training.banner.list_unused` adds
the keys that are unused for reasons that only a run knows, such as its number of processes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.recipe.known_names import DATASETS, OWN_PHOTOS, TASKS
from trainer.recipe.mode_table import MODES, TRAITS
from trainer.recipe.reflection import choices, defaults
from trainer.recipe.schema import TABLES, is_read, key_fields, readers
from trainer.recipe.text import format_yaml

# Stands for any value of a key except null.
SET = "set"
NAMES = {"mode": MODES, "data.name": DATASETS, "task.name": TASKS}
IN_MEMORY = "digits|mnist|fashion_mnist|cifar10|cifar100"
PHOTOS = "|".join(OWN_PHOTOS)
NOT_PIPELINE = "|".join(mode for mode, traits in TRAITS.items() if not traits.micro_batches)


# Rows (keys or sections, causes), both separated by spaces. A cause is "key:value|value|...", with
# values as they are typed. The keys have no effect in training if every cause applies. The message
# names the key of the first cause. A plugin's data set or task may read any key, so its name is
# never among the values.
IDLE = [
    ("augment.crop_padding", "augment.crop:none|resized"),
    ("augment.crop_scale", "augment.crop:none|pad"),
    ("augment.operations augment.magnitude", "augment.auto:none|trivial|autoaugment"),
    ("augment.alternate", "augment.hflip:0.0"),
    ("schedule.warmup_factor", "schedule.warmup_epochs:0.0"),
    ("data.download", f"data.name:digits|synthetic|{PHOTOS}"),
    ("data.samples data.val_samples", f"data.name:{IN_MEMORY}"),
    ("data.samples data.val_samples", f"data.missing:error data.name:{PHOTOS}"),
    ("data.samples data.val_samples data.missing", f"data.root:{SET} data.name:{PHOTOS}"),
    (
        "data.val_fraction data.missing data.on_error data.check data.workers data.pixel_range "
        "data.cache data.decode",
        f"data.name:{IN_MEMORY}|synthetic",
    ),
    ("data.interpolation data.fold data.fraction", "data.name:synthetic"),
    ("data.val_fraction", f"data.fold:{SET}"),
    ("data.interpolation", f"data.image_size:null augment.crop:none|pad data.name:{IN_MEMORY}"),
    ("data.cache_format data.cache_size data.cache_dir", "data.cache:off"),
    ("data.image_column data.label_column", "data.labels:null"),
    ("loss.label_smoothing", "task.name:multilabel|regression"),
    ("loss.class_weights", "task.name:regression"),
    ("distill.weight distill.temperature", "distill.teacher:null"),
    ("distill.temperature", "distill.weight:0.0"),
    (
        "local_sgd.fragments local_sgd.delay local_sgd.compress",
        "local_sgd.every:null mode:local_sgd",
    ),
    ("resume", "output:null"),
    (
        "pipeline.schedule pipeline.virtual_stages pipeline.microbatches pipeline.split_size "
        "pipeline.deferred_batch_norm pipeline.timeline",
        f"mode:{NOT_PIPELINE}",
    ),
]
for _section in dict.fromkeys(name for traits in TRAITS.values() for name in traits.sections):
    _others = [mode for mode, traits in TRAITS.items() if _section not in traits.sections]
    IDLE.append((_section, f"mode:{'|'.join(_others)}"))


def describe_unused(argument: str, cause: str, remedy: str = "") -> str:
    """Return the sentence about an argument without effect.

    Args:
        argument: `key=value`.
        cause: phrase that follows "does nothing with", such as "1 process".
        remedy: what to type so that the argument has an effect; "" if nothing can be typed.
    """
    alternative = ""
    if remedy:
        alternative = f", or type {remedy}"
    return f"{argument} does nothing with {cause}: leave it out{alternative}"


def find_unread(values: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys that the run's optimizer or schedule does not read.

    Args:
        values: values of all keys.
        keys: keys to check.

    Yields:
        A key, and the key that names the optimizer or schedule.
    """
    for key in keys:
        chooser = f"{key.partition('.')[0]}.name"
        if readers(key) and not is_read(key, values[chooser]):
            yield key, chooser


def find_idle(values: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that differ from their defaults but have no effect.

    Args:
        values: values of all keys.
        keys: keys to check.

    Yields:
        A key, the key whose value disables it, and what to type so that it has an effect.
    """
    changed = [key for key in keys if key in values and values[key] != defaults()[key]]
    for key, chooser in find_unread(values, changed):
        section, _, field = key.partition(".")
        remedy = _join(chooser, readers(key))
        row = TABLES[section].get(values[chooser])
        # The class of an optimizer without listed keys may have a parameter of this name.
        if section == "optimizer" and (row is None or not row.keys):
            remedy += f"; its class may accept optimizer.args.{field}="
        yield key, chooser, remedy
    for key in changed:
        cause = _find_cause(key, values) or _find_last_epoch(key, values)
        if cause is not None:
            yield key, *cause


def _find_cause(key: str, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the key whose value disables `key`, and what to type; None if no row applies."""
    for keys, text in IDLE:
        if {key, key.partition(".")[0]}.isdisjoint(keys.split()):
            continue
        causes = dict(cause.split(":") for cause in text.split())
        if all(_has(values[other], names) for other, names in causes.items()):
            chooser, names = next(iter(causes.items()))
            return chooser, _format_remedy(chooser, names)
    return None


def _has(value: Any, names: str) -> bool:
    if names == SET:
        return value is not None
    return format_yaml(value) in names.split("|")


def _format_remedy(chooser: str, idle_names: str) -> str:
    """Return what to type so that `chooser` has none of the values `idle_names` of a cause."""
    if idle_names == SET:
        return f"{chooser}=null"
    names = NAMES.get(chooser) or choices().get(chooser, ())
    others = [name for name in names if name not in idle_names.split("|")]
    if not others:
        others = [format_yaml(example) for example in dict(key_fields())[chooser].examples or ()]
    return _join(chooser, others)


def _join(chooser: str, names: Iterable[str]) -> str:
    return f"{chooser}={' or '.join(names)}"


def _find_last_epoch(key: str, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return "epochs" and what to type if the run ends before `key` acts first; else None."""
    first_epoch = None
    schedule = values["schedule.name"]
    if key == "stop.patience":
        first_epoch = values[key]
    elif key == "schedule.restart" and isinstance(values[key], list):
        first_epoch = min(values[key])
    elif key.startswith("schedule.") and readers(key) and is_read(key, schedule):
        warmup = values["schedule.warmup_epochs"]
        first_changes = {
            "step": warmup + values["schedule.step_epochs"],
            "exponential": warmup + 1,
            "plateau": values["schedule.patience"] + 1,
        }
        first_epoch = first_changes.get(schedule)
    if first_epoch is None or first_epoch < values["epochs"]:
        return None
    return "epochs", f"epochs={math.floor(first_epoch) + 1}"
