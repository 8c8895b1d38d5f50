"""Keys without effect are reported, each in one line that says how to let it act."""

import copy
import itertools
import re
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import BARE, WHOLE, ok
from tests.data.photo_folders import photo_set
from trainer import train
from trainer.commands.sweep.space import SearchSpace
from trainer.errors import RecipeError
from trainer.recipe import MODES, flatten, load, loading, notes_on_idle, shipped_recipes
from trainer.recipe.key_reference import keys
from trainer.recipe.known_names import DATASETS, TASKS
from trainer.recipe.loading import format_arguments
from trainer.recipe.optimizer_table import OPTIMIZERS
from trainer.recipe.reflection import choices, defaults
from trainer.recipe.schedule_table import LR_SCHEDULES
from trainer.recipe.schema import TABLES, OptimizerRecipe, ScheduleRecipe, readers
from trainer.recipe.text import format_yaml
from trainer.recipe.unused import find_idle

IN_MEMORY = "digits|mnist|fashion_mnist|cifar10|cifar100"
UNSTAGED = "single|dp|ddp|fsdp|local_sgd|hogwild"
# Every key, and the values of other keys with which it has no effect. `never`: it always has one,
# or is refused. `run`: only a run knows, see `SAMPLES`. Several causes are separated by commas, and
# a cause may consist of several keys.
WITHOUT_EFFECT = f"""
accumulate batch_size channels_last clip_grad_norm compile devices ema epochs grace: never
max_time mode output recompute seed threads timeout evaluate.every_steps verify.every: never
augment.auto augment.crop augment.cutmix augment.erase augment.hflip augment.mixup: never
augment.repeats augment.transforms augment.vflip: never
augment.alternate: augment.hflip=0.0
augment.crop_padding: augment.crop=none|resized
augment.crop_scale: augment.crop=none|pad
augment.magnitude augment.operations: augment.auto=none|trivial|autoaugment
data.balance data.channels data.image_size data.labels data.mean data.name data.resize: never
data.root data.std data.train_size: never
data.cache_dir data.cache_format data.cache_size: data.cache=off
data.check data.on_error data.pixel_range: data.name={IN_MEMORY}|synthetic
data.fold data.fraction: data.name=synthetic
data.val_fraction: data.name={IN_MEMORY}|synthetic, data.fold=1/5
data.cache data.decode data.workers: data.name={IN_MEMORY}|synthetic
data.download: data.name=digits|synthetic|imagefolder|shards
data.image_column data.label_column: data.labels=null
data.interpolation: data.name=synthetic,\
 data.name={IN_MEMORY} data.image_size=null augment.crop=none|pad
data.missing: data.name={IN_MEMORY}|synthetic, data.name=imagefolder|shards data.root=x
data.samples data.val_samples: data.name={IN_MEMORY}, data.name=imagefolder|shards data.root=x,\
 data.name=imagefolder|shards data.missing=error
distill.teacher: never
distill.temperature: distill.teacher=null, distill.weight=0.0
distill.weight: distill.teacher=null
ddp.compress: mode=single|dp|split|pipeline|fsdp|local_sgd|hogwild
fsdp.offload fsdp.reshard fsdp.shards: mode=single|dp|ddp|split|pipeline|local_sgd|hogwild
local_sgd.every local_sgd.outer_lr: mode=single|dp|ddp|split|pipeline|fsdp|hogwild
local_sgd.outer_momentum: mode=single|dp|ddp|split|pipeline|fsdp|hogwild
local_sgd.fragments local_sgd.delay local_sgd.compress: local_sgd.every=null,\
 mode=single|dp|ddp|split|pipeline|fsdp|hogwild
deterministic graphs max_steps precision shares sync_bn: run
logging.every_steps logging.mlflow logging.progress logging.tensorboard: never
logging.verdict logging.wandb logging.warmup_steps: never
loss.class_weights: task.name=regression
loss.label_smoothing: task.name=multilabel|regression
model.args model.freeze model.init_from model.name model.num_classes model.probe: never
model.weights: run
optimizer.args optimizer.layer_decay optimizer.lr optimizer.lr_per optimizer.name: never
optimizer.norm_weight_decay optimizer.weight_decay: never
pipeline.cuts pipeline.stages: mode={UNSTAGED}
pipeline.deferred_batch_norm pipeline.microbatches pipeline.schedule: mode={UNSTAGED}|split
pipeline.split_size pipeline.timeline pipeline.virtual_stages: mode={UNSTAGED}|split
predict.batch_size predict.features predict.format predict.split predict.timeout: never
predict.tta save.every_epochs save.every_steps save.keep save.top_k: never
resume: output=null
schedule.name schedule.warmup_epochs: never
schedule.warmup_factor: schedule.warmup_epochs=0.0
stop.patience: epochs=2
task.metric task.metrics task.name: never
"""
# Keys that only some optimizers or schedules read are in their tables.
READ = {key: readers(key) for key in defaults() if readers(key)}
# Values that the other keys are tried with.
TRIED = {
    "mode": MODES,
    "data.name": DATASETS,
    "task.name": tuple(TASKS),
    "optimizer.name": tuple(OPTIMIZERS),
    "schedule.name": tuple(LR_SCHEDULES),
    "augment.crop": choices()["augment.crop"],
    "augment.auto": choices()["augment.auto"],
    "data.cache": choices()["data.cache"],
    "data.missing": choices()["data.missing"],
    "augment.hflip": (0.0, 0.5),
    "schedule.warmup_epochs": (0.0, 0.5),
    "distill.weight": (None, 0.0, 0.5),
    "epochs": (2, 90),
    **dict.fromkeys(("data.labels", "data.root", "distill.teacher", "output"), (None, "x")),
    "data.image_size": (None, 16),
    "data.fold": (None, "1/5"),
    "local_sgd.every": (None, 4),
}
# Values of keys whose example is the default.
VALUES = {
    "augment.crop_padding": 2,
    "augment.crop_scale": [0.5, 1.0],
    "data.samples": 10,
    "data.val_samples": 10,
    "data.val_fraction": 0.5,
    "data.fold": "1/5",
    "data.fraction": 0.5,
    "optimizer.momentum": 0.5,
    "optimizer.betas": [0.5, 0.9],
    "optimizer.eps": 0.1,
    "schedule.gamma": 0.5,
    "schedule.step_epochs": 40,
    "schedule.warmup_factor": 0.5,
    "local_sgd.outer_lr": 0.5,
}


def list_causes():
    """Return the causes of each key: a list of {other key: values}, or a word."""
    causes = {}
    for line in WITHOUT_EFFECT.strip().splitlines():
        names, _, text = line.partition(": ")
        for name in names.split():
            assert name not in causes, f"{name} is there twice"
            causes[name] = text
            if "=" in text:
                causes[name] = [
                    {key: values.split("|") for key, values in map(split_cause, group.split())}
                    for group in text.split(",")
                ]
    return causes


def split_cause(cause):
    return cause.split("=")


CAUSES = list_causes()


@cache
def other_value(key):
    """Return a value that differs from the default."""
    if key in VALUES:
        return VALUES[key]
    return flatten(load(None, *keys()[key].example.split()).to_dict())[key]


def test_every_key_says_when_it_has_no_effect():
    assert {*CAUSES} | {*READ} == {*defaults()}, "with which values of other keys do they act?"
    assert not {*CAUSES} & {*READ}


@pytest.mark.parametrize("key", CAUSES)
def test_a_key_is_reported_exactly_where_it_has_no_effect(key):
    causes = CAUSES[key]
    if isinstance(causes, str):
        causes = []
    named = sorted({other for cause in causes for other in cause})
    settings = [{}]
    for size in range(1, len(named) + 1):
        for others in itertools.combinations(named, size):
            for combination in itertools.product(*(TRIED[other] for other in others)):
                settings.append(dict(zip(others, combination, strict=True)))
    for other in TRIED.keys() - {key}:
        settings += [{other: value} for value in TRIED[other]]
    seen = set()
    for setting in settings:
        values = {**defaults(), "distill.weight": 0.5, **setting, key: other_value(key)}
        expected = any(
            all(format_yaml(values[other]) in names for other, names in cause.items())
            for cause in causes
        )
        seen.add(expected)
        assert bool([*find_idle(values, [key])]) == expected, setting
    assert seen == ({True, False} if causes else {False})


@pytest.mark.parametrize("key", READ)
def test_a_key_that_another_row_reads_is_reported(key):
    chooser = f"{key.partition('.')[0]}.name"
    for name in TRIED[chooser]:
        values = {**defaults(), "epochs": 90, chooser: name, key: other_value(key)}
        assert bool([*find_idle(values, [key])]) == (name not in READ[key])


@pytest.mark.parametrize(
    ("words", "epochs"),
    [
        ("schedule.name=step schedule.gamma=0.5 schedule.step_epochs=4", 5),
        ("schedule.name=step schedule.gamma=0.5 schedule.warmup_epochs=1", 32),
        ("schedule.name=exponential schedule.gamma=0.5", 2),
        ("schedule.name=plateau schedule.patience=3", 5),
        ("stop.patience=3", 4),
        ("schedule.restart=[3]", 4),
    ],
)
def test_a_key_of_a_later_epoch_is_reported_with_the_first_that_it_needs(words, epochs):
    *_, note = notes_on_idle(None, *words.split(), f"epochs={epochs - 1}")
    assert note.endswith(f" epochs={epochs}")
    assert notes_on_idle(None, *words.split(), f"epochs={epochs}") == []


def test_every_row_reads_keys_that_exist():
    sections = {"optimizer": OptimizerRecipe, "schedule": ScheduleRecipe}
    for name, table in TABLES.items():
        for row in table.values():
            assert {*row.keys} <= sections[name].model_fields.keys()


def test_who_reads_what():
    """Written out, so that no row loses a key unseen; a new row needs no line here."""
    assert {"sgd", "muon"} <= {*READ["optimizer.momentum"]} & {*READ["optimizer.nesterov"]}
    adams = {"adam", "adamw", "muon"}
    assert adams <= {*READ["optimizer.betas"]} & {*READ["optimizer.eps"]}
    assert "sgd" not in READ["optimizer.betas"] and "adamw" not in READ["optimizer.momentum"]
    assert "cosine" in {*READ["schedule.min_lr"]} & {*READ["schedule.restart"]}
    assert "step" in {*READ["schedule.step_epochs"]} & {*READ["schedule.gamma"]}


@pytest.mark.parametrize(
    "words",
    [
        "mode=single pipeline.stages=2",
        "optimizer.name=adamw optimizer.momentum=0.8",
        "augment.alternate=true",
        "data.name=imagefolder data.root=x data.missing=synthetic",
        "model.weights=DEFAULT model.init_from=x",
        "distill.weight=0.3",
        "epochs=3 stop.patience=5",
    ],
)
def test_what_a_line_says_to_type_lets_the_key_act(words):
    [note] = notes_on_idle(None, *words.split())
    key = note.partition("=")[0]
    chooser, names = re.search(r"or type ([\w.]+)=(.*)", note).groups()
    for name in names.split(" or "):
        kept = [word for word in words.split() if word.partition("=")[0] != chooser]
        assert notes_on_idle(None, *kept, f"{chooser}={name}") == []
    left = [word for word in words.split() if word.partition("=")[0] != key]
    assert notes_on_idle(None, *left) == []


def test_what_a_recipe_tells_to_type_has_no_key_without_effect(tmp_path):
    """A saved recipe contains every key, even keys that have no effect."""
    recipe = load("digits", "optimizer.name=adamw")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = load(tmp_path)
    assert again.to_dict() == recipe.to_dict()
    assert notes_on_idle(None, *format_arguments(again)) == []


def test_no_key_of_a_shipped_recipe_is_reported_as_idle(monkeypatch):
    # Files are read once for all modes. Loading removes `extends` from a tree, so it gets a copy.
    read = cache(loading._read)
    monkeypatch.setattr(loading, "_read", lambda path: copy.deepcopy(read(path)))
    for name in shipped_recipes():
        for mode in MODES:
            assert notes_on_idle(name, f"mode={mode}") == []


def test_idle_keys_of_the_users_file_are_reported_unless_typed_arguments_cause_it(tmp_path):
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
    assert re.match(r"pipeline\.stages=2 .*\bmode=single\b", note)


def test_a_data_set_of_a_plugin_may_read_any_key():
    words = ["data.name=mine", "data.val_fraction=0.5", "data.root=x", "data.samples=5"]
    assert notes_on_idle(None, *words) == []


def test_each_idle_key_is_one_line_of_a_run(tmp_path):
    words = ["recipe=digits", "mode=single", "model.name=mlp", "max_steps=1"]
    idle = ["data.val_fraction=0.5", "pipeline.stages=2", "augment.crop_padding=3"]
    output = ok(*words, *idle, f"output={tmp_path / 'run'}").stdout
    messages = [line for line in output.splitlines() if line.startswith("unused: ")]
    assert [line.split()[1] for line in messages] == idle[:2], "digits crops"
    assert "unused" not in ok(*words, f"output={tmp_path / 'other'}").stdout


def test_a_trial_of_a_sweep_has_no_key_without_effect():
    words = ["optimizer.name=[sgd,adamw]", "optimizer.momentum=[0.8,0.9]"]
    with pytest.raises(RecipeError, match=r"optimizer\.momentum=0\.8 does nothing"):
        SearchSpace("digits", words)
    SearchSpace("digits", ["data.val_fraction=0.5", "optimizer.momentum=[0.8,0.9]"])


# --- what runs compute
# ---------------------------------------------------------------------------------------------

SHORT = ["model.name=mlp", "batch_size=256", "epochs=1", "optimizer.lr=0.01", *WHOLE, *BARE]
NORM = "model.name=resnet8 max_steps=1"
PIPELINE = "mode=pipeline devices=[cpu,cpu] pipeline.schedule=gpipe"
# (key and value, other arguments): runs whose weights do not depend on the key, which must say so,
# and runs whose weights do.
QUICK = [
    ("augment.crop_padding=2", ""),
    ("augment.alternate=true", "epochs=2"),
    ("schedule.gamma=0.5", "schedule.name=step epochs=2"),
    ("optimizer.momentum=0.5", "optimizer.name=adamw"),
    ("optimizer.momentum=0.5", ""),
    ("precision=tf32", ""),
]
SAMPLES = [
    ("schedule.gamma=0.5", "schedule.name=step schedule.step_epochs=1 epochs=2"),
    ("sync_bn=true", NORM),
    ("precision=bf16", ""),
    ("max_steps=1000", ""),
    ("max_steps=2", ""),
    ("augment.crop_padding=2", "augment.crop=pad"),
    ("augment.crop_scale=[0.5,1]", "augment.crop=pad"),
    ("augment.crop_scale=[0.5,1]", "augment.crop=resized"),
    ("augment.alternate=true", "epochs=2 augment.hflip=0.5"),
    ("augment.operations=3", "augment.auto=trivial"),
    ("augment.operations=3", "augment.auto=rand"),
    ("augment.magnitude=15", "augment.auto=autoaugment"),
    ("augment.magnitude=15", "augment.auto=rand"),
    ("schedule.warmup_factor=0.5", ""),
    ("schedule.warmup_factor=0.5", "schedule.warmup_epochs=0.5"),
    ("schedule.gamma=0.5", "schedule.name=plateau"),
    ("schedule.gamma=0.5", "schedule.name=exponential"),
    ("schedule.gamma=0.5", "schedule.name=exponential epochs=2"),
    ("schedule.min_lr=0.005", "schedule.name=constant"),
    ("schedule.min_lr=0.005", ""),
    ("schedule.restart=[1]", "epochs=1"),
    ("schedule.restart=[1]", "epochs=2"),
    ("optimizer.eps=0.1", "optimizer.name=adamw"),
    ("optimizer.eps=0.1", "optimizer.name=adagrad"),
    ("data.val_fraction=0.5", ""),
    ("data.interpolation=nearest", ""),
    ("data.interpolation=nearest", "data.image_size=12"),
    ("data.interpolation=nearest", "augment.crop=resized"),
    ("data.interpolation=nearest", "data.name=synthetic"),
    ("data.samples=300", ""),
    ("data.samples=300", "data.name=synthetic"),
    ("distill.temperature=2.0", ""),
    ("stop.patience=5", "epochs=2"),
    ("graphs=false", ""),
    ("deterministic=true", ""),
    ("pipeline.microbatches=2", ""),
    ("pipeline.deferred_batch_norm=false", f"{NORM} mode=split devices=[cpu,cpu]"),
    ("pipeline.deferred_batch_norm=false", f"{NORM} {PIPELINE} pipeline.microbatches=4 nproc=2"),
    ("pipeline.deferred_batch_norm=false", f"{PIPELINE} pipeline.microbatches=4 nproc=2"),
    ("sync_bn=true", f"{NORM} mode=ddp nproc=2"),
    ("sync_bn=true", "mode=ddp nproc=2"),
    ("ddp.compress=bf16", "mode=ddp nproc=1"),
    ("ddp.compress=bf16", "mode=ddp nproc=2"),
    ("fsdp.reshard=false", "mode=fsdp nproc=1"),
    ("fsdp.offload=true", "mode=fsdp nproc=2"),
    ("shares=auto", "mode=ddp nproc=1"),
    ("shares=[3,1]", f"{NORM} mode=ddp nproc=2"),
    ("local_sgd.outer_lr=0.5", "mode=local_sgd nproc=1"),
    ("local_sgd.outer_lr=0.5", "mode=local_sgd nproc=2"),
    ("local_sgd.every=1", "mode=local_sgd nproc=1"),
    ("local_sgd.every=1", "mode=local_sgd nproc=2"),
]
# The same with photos.
PHOTOS = [
    ("data.val_fraction=0.5", "data.root={split}"),
    ("data.val_fraction=0.5", "data.root={whole}"),
    ("data.label_column=x", "data.root={whole}"),
    ("data.pixel_range=[0,100]", "data.root={whole}"),
    ("data.workers=1", "data.root={whole}"),
    ("data.cache=disk", "data.root={whole}"),
    ("data.missing=synthetic", "data.root={whole}"),
    ("data.samples=300", "data.root={whole}"),
    ("augment.hflip=1.0", "data.root={whole}"),
]


def check_run(argument, words, folder, capfd):
    """Compare the weights of a run with those of a run with the default of a key."""
    key, _, _ = argument.partition("=")
    others = [word for word in words.split() if word.partition("=")[0] not in (key, "nproc")]
    names = {word.partition("=")[0] for word in others}
    typed = [
        *(word for word in SHORT if word.partition("=")[0] not in {*names, key}),
        *others,
    ]
    if "mode" not in names:
        typed.append("mode=single")
    number = re.search(r"nproc=(\d)", words)
    weights = []
    for name, more in (("default", []), ("other", [argument])):
        train(None, *typed, *more, f"output={folder / name}", nproc=number and int(number[1]))
        output = " ".join(capfd.readouterr().out.split())
        weights.append(load_file(folder / name / "last.safetensors"))
    is_equal = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    is_reported = re.search(rf"\bunused:? .*\b{re.escape(key)}=[^:]* does nothing", output)
    assert is_equal == bool(is_reported), output


@pytest.mark.parametrize(("argument", "words"), QUICK)
def test_a_key_is_reported_where_two_of_its_values_compute_the_same(
    argument, words, tmp_path, capfd
):
    check_run(argument, words, tmp_path, capfd)


@pytest.mark.full(
    but=[
        "augment.crop_padding=2-augment.crop=pad",
        "augment.crop_scale=[0.5,1]-augment.crop=resized",
        "data.interpolation=nearest-",
        "data.interpolation=nearest-data.image_size=12",
        "data.samples=300-data.name=synthetic",
        "ddp.compress=bf16-mode=ddp nproc=1",
        "fsdp.reshard=false-mode=fsdp nproc=1",
        "local_sgd.every=1-mode=local_sgd nproc=1",
        "optimizer.eps=0.1-optimizer.name=adamw",
        "schedule.gamma=0.5-schedule.name=plateau",
        "schedule.min_lr=0.005-schedule.name=constant",
        "schedule.restart=[1]-epochs=1",
        "schedule.warmup_factor=0.5-",
        "schedule.warmup_factor=0.5-schedule.warmup_epochs=0.5",
        "shares=auto-mode=ddp nproc=1",
        "stop.patience=5-epochs=2",
        "sync_bn=true-model.name=resnet8 max_steps=1",
    ]
)
@pytest.mark.slow
@pytest.mark.parametrize(("argument", "words"), SAMPLES)
def test_more_keys_are_reported_where_two_of_their_values_compute_the_same(
    argument, words, tmp_path, capfd
):
    check_run(argument, words, tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "words"), PHOTOS)
def test_keys_of_photos_are_reported_where_two_of_their_values_compute_the_same(
    argument, words, tmp_path, capfd
):
    for name, split in (("whole", False), ("split", True)):
        photo_set(
            tmp_path / name,
            {"a": 12, "b": 12},
            split=split,
            size=(16, 16),
            suffix="png",
        )
    words = words.format(whole=tmp_path / "whole", split=tmp_path / "split")
    check_run(argument, f"{words} data.name=imagefolder batch_size=8", tmp_path, capfd)
