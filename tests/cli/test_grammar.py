"""Arguments of the command line: the accepted ones, and the answers to the others."""

import re
import shlex
from pathlib import Path

import pytest

from tests.pages import GUIDE
from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.cli.grammar import format_program, read
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.recipe import flatten, load, shipped_recipes
from trainer.recipe.explaining import OTHER_NAMES, WITHOUT_KEY
from trainer.recipe.reflection import defaults
from trainer.recipe.text import format_yaml as as_typed

# Typed arguments, and the arguments that they are parsed into.
TAKEN = {
    "recipe=digits": "recipe=digits",
    "train recipe=digits": "recipe=digits",
    "--recipe=digits": "recipe=digits",
    "--recipe resnet50": "recipe=resnet50",
    "recipe=digits batch-size=64": "recipe=digits batch_size=64",
    "recipe=digits --batch-size=64": "recipe=digits batch_size=64",
    "recipe=digits --model.freeze -1 --compile true": "recipe=digits model.freeze=-1 compile=true",
    "recipe=digits --optimizer.lr 0.1 --nproc 2": "recipe=digits optimizer.lr=0.1 nproc=2",
    "recipe=digits 'devices=[cuda:0, cuda:1]'": "recipe=digits 'devices=[cuda:0, cuda:1]'",
    "recipe=digits data.root=/a/b=c": "recipe=digits data.root=/a/b=c",
    "recipe=digits 'epochs=3\r'": "recipe=digits epochs=3",  # a script that Windows wrote
    "recipe=digits epochs=1 seed=2 epochs=1": "recipe=digits epochs=1 seed=2",  # the same again
    "recipe=digits epochs=1 epochs=2": "recipe=digits epochs=1 epochs=2",  # the recipe tells it
    "recipe= epochs=5": "recipe= epochs=5",
    "recipe=digits my-file=x": "recipe=digits my-file=x",
}
# Typed, and what the one line names.
SAID = {
    "recips": "recipes?",
    "resnet5": "recipe=resnet50?",
    "rect": "train, compare, sweep,",
    "digits": "recipe=digits?",
    "plan": "type python -m trainer plan recipe=digits",
    "export": "type python -m trainer export RUN format=onnx",
    "recipe=digits --epochs": "type epochs=",
    "recipe=digits --nproc": "type nproc=",
    "recipe=digits --amp epochs=3": "--amp: amp is not a key; did you mean precision?",
    "plan recipe=digits --jsonn": "jsonn is not a key",
    "fit recipe=digits": "type train recipe=digits",
    "val runs/x": "type evaluate RUN;",
    "resume runs/x": "type train recipe=RUN output=RUN resume=auto",
}

FILES = [
    "runs/first/recipe.yaml",
    "runs/other/recipe.yaml",
    "other/1.jpg",
    "photos/cat.jpg",
    "data/1.jpg",
    "photo.jpg",
]
FILES += ["x #1.png", "a b.jpg", "lr=3.jpg", "w.pth"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    for file in FILES:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    for name in ("RANK", "WORLD_SIZE", "TRAINER_COMMAND", family.PARENT):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("typed", TAKEN)
def test_valid_arguments_are_accepted(typed: str) -> None:
    assert read(shlex.split(typed)) == ("train", shlex.split(TAKEN[typed]))


@pytest.mark.parametrize("typed", SAID)
def test_invalid_arguments_are_answered(typed: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(shlex.split(typed))
    assert SAID[typed] in str(error.value) and "\n" not in str(error.value)


def test_words_of_other_commands() -> None:
    assert read(["--version"]) == ("version", [])
    assert read(["export", "runs/x", "--format", "onnx"]) == (
        "export",
        ["checkpoint=runs/x", "format=onnx"],
    )
    assert read(["evaluate", "runs/lr=0.1"]) == ("evaluate", ["checkpoint=runs/lr=0.1"])
    assert read(["submit", "slurm", "--nodes", "2"]) == ("submit", ["slurm", "nodes=2"])
    assert read(["tensorboard", "a", "--port", "1"]) == ("tensorboard", ["a", "--port", "1"])
    assert (
        read(["sweep", "recipe=digits", "--optimizer.lr", "0.01..0.1"])[1][1]
        == "optimizer.lr=0.01..0.1"
    )
    for command in COMMANDS:
        assert read([command, "help"]) == ("help", [command])


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_programs_are_answered_with_a_valid_argument(name: str) -> None:
    assert OTHER_NAMES[name] in (*defaults(), *OWN_WORDS)
    assert name not in defaults()
    with pytest.raises(RecipeError, match=rf": {name} .* {re.escape(OTHER_NAMES[name])}\?$"):
        load("digits", f"{name}=1")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lr", "optimizer.lr"),
        ("EPOCHS", "epochs"),
        ("optimizer.lrr", "optimizer.lr"),
        ("workers", "data.workers"),
    ],
)
def test_the_nearest_name(name: str, key: str) -> None:
    with pytest.raises(RecipeError, match=rf": {re.escape(name)} .* {re.escape(key)}\?$"):
        load("digits", f"{name}=1")


@pytest.mark.parametrize("name", ["rect", "tensorrt"])
def test_no_neighbour_is_better_than_a_wrong_one(name: str) -> None:
    with pytest.raises(RecipeError, match="recipes keys") as raised:
        load("digits", f"{name}=1")
    assert "?" not in str(raised.value)


# Meaning of these programs' options, by their documentation. None: no key of ours means the same.
ELSEWHERE: dict[str, dict[str, str | None]] = {
    "torchvision": {
        **{
            "workers": "data.workers",
            "opt": "optimizer.name",
            "wd": "optimizer.weight_decay",
            "amp": "precision",
        },
        **{
            "lr_scheduler": "schedule.name",
            "lr_step_size": "schedule.step_epochs",
            "lr_gamma": "schedule.gamma",
        },
        **{
            "lr_warmup_epochs": "schedule.warmup_epochs",
            "mixup_alpha": "augment.mixup",
            "print_freq": "logging.every_steps",
        },
        **{
            "random_erase": "augment.erase",
            "model_ema": "ema",
            "data_path": "data.root",
            "output_dir": "output",
        },
        **{
            "world_size": None,
            "ra_sampler": "augment.repeats",
            "model_ema_steps": None,
            "val_crop_size": None,
            "model_ema_decay": None,
            "bias_weight_decay": None,
            "auto_augment": "augment.auto",
            "lr_min": "schedule.min_lr",
            "lr_warmup_decay": "schedule.warmup_factor",
            "use_deterministic_algorithms": "deterministic",
            "start_epoch": None,
        },
    },
    "timm": {
        **{
            "opt": "optimizer.name",
            "sched": "schedule.name",
            "amp": "precision",
            "model_ema": "ema",
            "j": "data.workers",
        },
        **{
            "smoothing": "loss.label_smoothing",
            "clip_grad": "clip_grad_norm",
            "decay_epochs": "schedule.step_epochs",
        },
        **{
            "decay_rate": "schedule.gamma",
            "warmup_epochs": "schedule.warmup_epochs",
            "min_lr": "schedule.min_lr",
        },
        **{
            "reprob": "augment.erase",
            "img_size": "data.image_size",
            "data_dir": "data.root",
            "pretrained": "model.weights",
        },
        **{
            "grad_checkpointing": "recompute",
            "val_split": None,
            "lr_base": None,
            "grad_accum_steps": None,
            "drop": None,
        },
        **{
            "warmup_lr": None,
            "remode": None,
            "recount": None,
            "resplit": None,
            "bn_momentum": None,
            "checkpoint_hist": None,
            "validation_batch_size": None,
            "amp_dtype": None,
            "dropout": None,
            "train_split": None,
        },
    },
    "Lightning": {
        **{"strategy": "mode", "max_epochs": "epochs", "gradient_clip_val": "clip_grad_norm"},
        **{
            "log_every_n_steps": "logging.every_steps",
            "sync_batchnorm": "sync_bn",
            "accumulate_grad_batches": None,
        },
        **{
            "num_nodes": None,
            "gpus": None,
            "val_check_interval": "evaluate.every_steps",
            "min_epochs": None,
            "min_steps": None,
            "plugins": None,
            "enable_progress_bar": "logging.progress",
            "limit_train_batches": None,
        },
    },
    "Ultralytics": {
        **{
            "imgsz": "data.image_size",
            "batch": "batch_size",
            "lr0": "optimizer.lr",
            "patience": "stop.patience",
        },
        **{
            "device": "devices",
            "save_period": "save.every_epochs",
            "cache": "data.cache",
            "freeze": "model.freeze",
        },
        **{
            "lrf": None,
            "fraction": "data.fraction",
            "half": None,
            "name": None,
            "classes": None,
            "nbs": None,
            "time": None,
            "fliplr": "augment.hflip",
            "flipud": "augment.vflip",
            "erasing": "augment.erase",
        },
    },
    "Hugging Face": {
        **{
            "num_train_epochs": "epochs",
            "learning_rate": "optimizer.lr",
            "max_grad_norm": "clip_grad_norm",
        },
        **{"lr_scheduler_type": "schedule.name", "label_smoothing_factor": "loss.label_smoothing"},
        **{
            "save_steps": "save.every_steps",
            "logging_steps": "logging.every_steps",
            "optim": "optimizer.name",
        },
        **{"dataloader_num_workers": "data.workers", "gradient_checkpointing": "recompute"},
        **{
            "per_device_train_batch_size": None,
            "per_device_eval_batch_size": None,
            "warmup_steps": None,
        },
        **{
            "gradient_accumulation_steps": None,
            "warmup_ratio": None,
            "eval_steps": "evaluate.every_steps",
            "fp16": None,
        },
    },
    "Accelerate": {"mixed_precision": "precision", "num_processes": None, "num_machines": None},
    "torchrun": {"nproc_per_node": "nproc", "nnodes": None},
    "Keras": {"validation_split": "data.val_fraction", "steps_per_epoch": None},
    "DeepSpeed": {"train_batch_size": "batch_size", "train_micro_batch_size_per_gpu": None},
    "fastai": {"bs": None, "wd": "optimizer.weight_decay"},
    "PyTorch's examples": {
        "arch": "model.name",
        "gpu": "devices",
        "log_interval": "logging.every_steps",
    },
    "MAE": {"blr": None},
}


@pytest.mark.parametrize("program", ELSEWHERE)
def test_a_hint_names_a_key_that_means_the_same_or_none(program: str) -> None:
    for name, key in ELSEWHERE[program].items():
        with pytest.raises(RecipeError) as raised:
            load("digits", f"{name}=1")
        named = re.search(r" (\S+)\?$", str(raised.value))
        assert (named and named[1]) == key, name


def test_names_without_a_key_lead_to_the_page_that_has_them() -> None:
    page = (GUIDE / "port.md").read_text()
    for name in WITHOUT_KEY:
        with pytest.raises(RecipeError, match="guide port"):
            load("digits", f"{name}=1")
    named = {
        word.replace("-", "_")
        for line in page.splitlines()
        if line[:1] == "|"
        for word in re.findall(r"`(?:--)?(\w[\w-]*)`", line)
    }
    # Some of these shortcuts exist.
    assert {name for name in WITHOUT_KEY - named if "batch_size" not in name} == set()
    assert not {*OTHER_NAMES} & WITHOUT_KEY


def test_torchrun_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read([]) == ("help", [])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RecipeError,
        match=r" type torchrun --standalone --nproc_per_node=4 -m trainer recipe=digits$",
    ):
        read([])


def test_predict_takes_photos_folders_and_a_run_in_any_order() -> None:
    for typed, accepted in {
        "photo.jpg": "photo.jpg",
        "photos runs/first": "photos checkpoint=runs/first",
        "runs/first photos photo.jpg": "checkpoint=runs/first photos photo.jpg",
        "photo.jpg first": "photo.jpg checkpoint=first",
        "first last photo.jpg": "'checkpoint=first last' photo.jpg",
        "photo.jpg runs/first checkpoint=best": "photo.jpg 'checkpoint=runs/first best'",
        "checkpoint=last photo.jpg": "checkpoint=last photo.jpg",
        "data photos": "data photos",
        "'x #1.png' 'a b.jpg' lr=3.jpg": "'x #1.png' 'a b.jpg' ./lr=3.jpg",
        "w.pth photo.jpg threads=1": "checkpoint=w.pth photo.jpg threads=1",
        "- runs/first": "- checkpoint=runs/first",
        "--output photos photo.jpg": "output=photos photo.jpg",
        "photo.jpg data.root=photos": "photo.jpg data.root=photos",
    }.items():
        assert read(["predict", *shlex.split(typed)]) == ("predict", shlex.split(accepted)), typed


def test_predict_asks_if_an_argument_is_ambiguous() -> None:
    for typed, says in {
        "other": "./other runs/other",
        "runs/other first photo.jpg": "runs/other first both",
        "nothing": "'nothing'",
        "runs photo.jpg": "runs/",
    }.items():
        with pytest.raises(RecipeError) as error:
            read(["predict", *typed.split()])
        assert "\n" not in str(error.value)
        assert [word for word in says.split() if word not in str(error.value)] == [], (
            typed,
            str(error.value),
        )


@pytest.mark.parametrize("name", shipped_recipes())
def test_values_of_a_recipe_are_never_corrected(name: str) -> None:
    words = [f"{key}={as_typed(value)}" for key, value in flatten(load(name).to_dict()).items()]
    assert read(words) == ("train", words)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "python -m trainer"),
        ({"TRAINER_COMMAND": "./launch.sh"}, "./launch.sh"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            "torchrun --nproc_per_node=4 -m trainer",
        ),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "torchrun --standalone --nproc_per_node=4 -m trainer"),
        ({"RANK": "0", "WORLD_SIZE": "8", family.PARENT: "5"}, "python -m trainer"),
    ],
)
def test_suggested_commands_start_like_the_typed_one(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TRAINER_COMMAND", family.PARENT):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert format_program() == expected
