"""Arguments without effect are refused, but only those that the user typed."""

import copy
import re
from functools import cache

import pytest
import yaml

from tests.checks import refusal
from tests.command_line import ok
from trainer.errors import RecipeError
from trainer.recipe import (
    MODES,
    OptimizerRecipe,
    flatten,
    load,
    loading,
    notes_on_idle,
    shipped_recipes,
)
from trainer.recipe.known_names import DATASETS
from trainer.recipe.loading import format_arguments
from trainer.recipe.optimizer_table import OPTIMIZERS
from trainer.recipe.reflection import defaults
from trainer.recipe.schedule_table import LR_SCHEDULES
from trainer.recipe.schema import TABLES, ScheduleRecipe, readers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("optimizer.name=adamw optimizer.nesterov=true", "optimizer.name=sgd or muon"),
        ("optimizer.name=adam optimizer.momentum=0.8", "optimizer.name=sgd or muon"),
        (
            "optimizer.betas=[0.9,0.99]",
            r"optimizer\.betas=\[0\.9, 0\.99\] .*\boptimizer\.name=sgd: ",
        ),
        ("schedule.gamma=0.5", r"schedule\.gamma=0\.5 .*\bschedule\.name=cosine: "),
        ("schedule.name=step schedule.min_lr=0.001", "schedule.name=cosine"),
    ],
)
def test_keys_without_effect_are_refused(words, says):
    assert re.search(says, refusal(load, "digits", *words.split()))


@pytest.mark.parametrize(
    "words",
    [
        "optimizer.name=adamw",  # the recipe's own nesterov and momentum are sgd's
        "optimizer.name=adamw optimizer.nesterov=false",  # The value is the default.
        "optimizer.name=muon optimizer.nesterov=true optimizer.betas=[0.9,0.95]",
        "schedule.name=step schedule.gamma=0.5 schedule.step_epochs=2",
    ],
)
def test_keys_with_effect_or_from_the_recipe_are_accepted(words):
    accepted = flatten(load("digits", *words.split()).to_dict())
    assert all(
        accepted[key] == yaml.safe_load(value)
        for key, value in (word.split("=") for word in words.split())
    )


def test_a_saved_recipe_goes_on_being_read(tmp_path):
    """A saved recipe contains every key, even keys that have no effect."""
    recipe = load("digits", "optimizer.name=adamw")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = load(tmp_path)
    assert again.to_dict() == recipe.to_dict()
    assert load(None, *format_arguments(again)).optimizer.name == "adamw", (
        "and what it tells to type is accepted"
    )


# --- keys that do nothing
# ---------------------------------------------------------------------------------------------

READERS = {key: readers(key) for key in defaults() if readers(key)}
MEMORY = {"digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "synthetic"}
STAGED = {"split", "pipeline"}
# Keys, each with the key that determines whether it acts, and the values with which it does.
ACTS = {
    **{key: (f"{key.partition('.')[0]}.name", {*names}) for key, names in READERS.items()},
    "schedule.warmup_factor": ("schedule.warmup_epochs", {0.5}),
    "augment.crop_padding": ("augment.crop", {"pad"}),
    "augment.crop_scale": ("augment.crop", {"resized"}),
    "augment.operations": ("augment.auto", {"rand"}),
    "augment.magnitude": ("augment.auto", {"rand"}),
    "data.root": ("data.name", {*DATASETS} - {"digits", "synthetic"}),
    "data.download": ("data.name", MEMORY - {"digits", "synthetic"}),
    **dict.fromkeys(("data.fold", "data.fraction"), ("data.name", {*DATASETS} - {"synthetic"})),
    **dict.fromkeys(
        ("data.samples", "data.val_samples"), ("data.name", {"synthetic", "imagefolder", "shards"})
    ),
    **{
        f"data.{name}": ("data.name", {*DATASETS} - MEMORY)
        for name in (
            "val_fraction",
            "missing",
            "on_error",
            "check",
            "workers",
            "pixel_range",
            "cache",
        )
    },
    **{f"data.cache_{name}": ("data.cache", {"disk"}) for name in ("format", "size", "dir")},
    **{
        f"pipeline.{name}": ("mode", {"pipeline"})
        for name in ("schedule", "virtual_stages", "microbatches", "split_size")
    },
    **{
        f"pipeline.{name}": ("mode", STAGED)
        for name in ("stages", "cuts", "deferred_batch_norm", "timeline")
    },
    "ddp.compress": ("mode", {"ddp"}),
    **{
        f"local_sgd.{name}": ("mode", {"local_sgd"})
        for name in ("every", "outer_lr", "outer_momentum")
    },
    **{f"fsdp.{name}": ("mode", {"fsdp"}) for name in ("shards", "reshard", "offload")},
}
VALUES = {  # other than the default
    "optimizer.momentum": "0.5",
    "optimizer.nesterov": "true",
    "optimizer.betas": "[0.5,0.9]",
    "optimizer.eps": "0.1",
    "optimizer.adamw_lr": "0.01",
    "schedule.min_lr": "0.001",
    "schedule.restart": "true",
    "schedule.step_epochs": "2",
    "schedule.gamma": "0.5",
    "schedule.power": "2.0",
    "schedule.patience": "3",
    "schedule.warmup_factor": "0.5",
    "augment.crop_padding": "2",
    "augment.crop_scale": "[0.5,1]",
    "augment.operations": "3",
    "augment.magnitude": "12",
    "data.root": "x",
    "data.download": "false",
    "data.samples": "10",
    "data.val_samples": "10",
    "data.val_fraction": "0.5",
    "data.fold": "1/5",
    "data.fraction": "0.5",
    "data.missing": "synthetic",
    "data.on_error": "skip",
    "data.check": "off",
    "data.workers": "3",
    "data.pixel_range": "[0,5]",
    "data.cache": "disk",
    "data.cache_format": "jpeg",
    "data.cache_size": "9",
    "data.cache_dir": "x",
    "pipeline.schedule": "gpipe",
    "pipeline.virtual_stages": "3",
    "pipeline.microbatches": "2",
    "pipeline.split_size": "4",
    "pipeline.stages": "2",
    "pipeline.cuts": "[a]",
    "pipeline.deferred_batch_norm": "false",
    "pipeline.timeline": "true",
    "ddp.compress": "bf16",
    "local_sgd.every": "3",
    "local_sgd.outer_lr": "0.5",
    "local_sgd.outer_momentum": "0.5",
    "fsdp.shards": "2",
    "fsdp.reshard": "false",
    "fsdp.offload": "true",
}
ALWAYS = {  # keys and sections that act whatever the others are, or are refused where they do not
    "mode",
    "batch_size",
    "accumulate",
    "shares",
    "epochs",
    "max_steps",
    "max_time",
    "evaluate",
    "precision",
    "channels_last",
    "compile",
    "graphs",
    "ema",
    "recompute",
    "clip_grad_norm",
    "sync_bn",
    "devices",
    "threads",
    "timeout",
    "grace",
    "resume",
    "seed",
    "deterministic",
    "output",
    "task",
    "model",
    "loss",
    "distill",
    "predict",
    "stop",
    "save",
    "logging",
    "data.name",
    "data.labels",
    "data.image_column",
    "data.label_column",
    "data.image_size",
    "data.train_size",
    "data.resize",
    "data.interpolation",
    "data.channels",
    "data.mean",
    "data.std",
    "data.balance",
    "augment.crop",
    "augment.hflip",
    "augment.vflip",
    "augment.alternate",
    "augment.auto",
    "augment.repeats",
    "augment.transforms",
    "augment.mixup",
    "augment.cutmix",
    "augment.erase",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.lr_per",
    "optimizer.layer_decay",
    "optimizer.args",
    "optimizer.weight_decay",
    "optimizer.norm_weight_decay",
    "schedule.name",
    "schedule.warmup_epochs",
}
OTHERS = {
    "mode": MODES,
    "data.name": DATASETS,
    "augment.crop": ("none", "pad", "resized"),
    "augment.auto": ("none", "trivial", "rand", "autoaugment"),
    "data.cache": ("off", "disk"),
    "schedule.warmup_epochs": (0, 0.5),
    "optimizer.name": OPTIMIZERS,
    "schedule.name": LR_SCHEDULES,
}


def test_every_row_reads_keys_that_exist():
    sections = {"optimizer": OptimizerRecipe, "schedule": ScheduleRecipe}
    for name, table in TABLES.items():
        for row in table.values():
            assert {*row.keys} <= sections[name].model_fields.keys()


def test_who_reads_what():
    """Written out, so that no row loses a key unseen; a new row needs no line here."""
    assert {"sgd", "muon"} <= {*READERS["optimizer.momentum"]} & {*READERS["optimizer.nesterov"]}
    adams = {"adam", "adamw", "muon"}
    assert adams <= {*READERS["optimizer.betas"]} & {*READERS["optimizer.eps"]}
    assert "sgd" not in READERS["optimizer.betas"] and "adamw" not in READERS["optimizer.momentum"]
    assert "cosine" in {*READERS["schedule.min_lr"]} & {*READERS["schedule.restart"]}
    assert "step" in {*READERS["schedule.step_epochs"]} & {*READERS["schedule.gamma"]}


def test_every_key_acts_always_or_is_in_the_table() -> None:
    assert ACTS.keys() == VALUES.keys()
    left = {key for key in defaults() if not {key, key.partition(".")[0]} & ALWAYS} - ACTS.keys()
    assert not left, f"with which values of other keys do these act? {sorted(left)}"


@pytest.mark.parametrize("key", ACTS)
def test_a_key_without_effect_is_refused_or_reported(key: str) -> None:
    chooser, values = ACTS[key]
    for value in OTHERS[chooser]:
        words = [f"{key}={VALUES[key]}", f"{chooser}={value}"]
        if chooser == "data.cache":
            words.append("data.name=imagefolder")
        try:
            message = any(
                key in line and f"{chooser}={value}" in line for line in notes_on_idle(None, *words)
            )
        except RecipeError as error:
            message = "does nothing" in str(error)
        assert message == (value not in values), words


def test_no_key_of_a_shipped_recipe_is_reported_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files are read once for all modes. Loading removes `extends` from a tree, so it gets a copy.
    read = cache(loading._read)
    monkeypatch.setattr(loading, "_read", lambda path: copy.deepcopy(read(path)))
    for name in shipped_recipes():
        for mode in MODES:
            assert notes_on_idle(name, f"mode={mode}") == []


def test_idle_keys_of_the_users_file_are_reported_unless_typed_arguments_cause_it(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: digits\nmode: ddp\npipeline: {microbatches: 8}\ndata: {val_fraction: 0.3}\n"
    )
    assert [line.partition("=")[0] for line in notes_on_idle(file)] == [
        "pipeline.microbatches",
        "data.val_fraction",
    ]
    assert [line.partition("=")[0] for line in notes_on_idle(file, "mode=single")] == [
        "data.val_fraction"
    ]
    assert notes_on_idle(file, "mode=pipeline", "data.name=imagefolder") == []
    file.write_text("extends: digits\nmode: pipeline\npipeline: {microbatches: 8}\n")
    assert notes_on_idle(file) == notes_on_idle(file, "mode=single") == [], "the word chose it"
    (note,) = notes_on_idle(file, "mode=single", "pipeline.stages=2")
    assert re.fullmatch(r"pipeline\.stages=2 .*\bmode=single", note)


def test_a_data_set_of_a_plugin_may_read_any_key() -> None:
    assert (
        notes_on_idle(
            None, "data.name=mine", "data.val_fraction=0.5", "data.root=x", "data.samples=5"
        )
        == []
    )


def test_idle_keys_are_one_line_of_a_run(tmp_path) -> None:
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=mlp",
        "max_steps=1",
        f"output={tmp_path / 'run'}",
    ]
    output = ok(
        *words, "data.val_fraction=0.5", "pipeline.stages=2", "augment.crop_padding=3"
    ).stdout
    messages = [line for line in output.splitlines() if line.startswith("unused: ")]
    assert [line.split()[1] for line in messages] == ["data.val_fraction=0.5", "pipeline.stages=2"]
    assert "unused" not in ok(*words[:-1], f"output={tmp_path / 'other'}").stdout
