"""Words of the command line: what is taken, and what is answered by what to type."""

import shlex
from pathlib import Path

import pytest

from trainer.cli.command_table import COMMANDS, OWN_WORDS
from trainer.cli.grammar import program, read
from trainer.errors import RecipeError
from trainer.processes import family
from trainer.recipe import flatten, load, shipped_recipes
from trainer.recipe.explaining import OTHER_NAMES
from trainer.recipe.reflection import choices, defaults
from trainer.recipe.text import typed as as_typed

# Typed, and the words that it is taken as.
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
    "recipe=digits --amp epochs=3": "did you mean precision=bf16?",
    "plan recipe=digits --jsonn": "jsonn is not a key",
}

FILES = ["runs/first/recipe.yaml", "runs/other/recipe.yaml", "other/1.jpg", "photos/cat.jpg", "data/1.jpg", "photo.jpg"]
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
def test_what_is_taken(typed: str) -> None:
    assert read(shlex.split(typed)) == ("train", shlex.split(TAKEN[typed]))


@pytest.mark.parametrize("typed", SAID)
def test_what_is_answered(typed: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(shlex.split(typed))
    assert SAID[typed] in str(error.value) and "\n" not in str(error.value)


def test_words_of_other_commands() -> None:
    assert read(["--version"]) == ("version", [])
    assert read(["export", "runs/x", "--format", "onnx"]) == ("export", ["runs/x", "format=onnx"])
    assert read(["submit", "slurm", "--nodes", "2"]) == ("submit", ["slurm", "nodes=2"])
    assert read(["sweep", "recipe=digits", "--optimizer.lr", "0.01..0.1"])[1][1] == "optimizer.lr=0.01..0.1"
    for command in COMMANDS:
        assert read([command, "help"]) == ("help", [command])


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_what_others_call_a_key_is_told_with_a_word_that_is_taken(name: str) -> None:
    key, equals, value = OTHER_NAMES[name].partition("=")
    assert key in defaults() or key in OWN_WORDS
    assert not equals or (value in choices().get(key, (value,)) and load("digits", OTHER_NAMES[name]))
    assert name not in defaults()
    with pytest.raises(RecipeError, match=f"{name} is not a key; did you mean {OTHER_NAMES[name]}[?]"):
        load("digits", f"{name}=1")


@pytest.mark.parametrize(
    ("name", "key"),
    [("lr", "optimizer.lr"), ("EPOCHS", "epochs"), ("optimizer.lrr", "optimizer.lr"), ("workers", "data.workers")],
)
def test_the_nearest_name(name: str, key: str) -> None:
    with pytest.raises(RecipeError, match=f"did you mean {key}[?]"):
        load("digits", f"{name}=1")


@pytest.mark.parametrize("name", ["dropout", "nnodes", "rect", "tensorrt", "per_device_train_batch_size"])
def test_no_neighbour_is_better_than_a_wrong_one(name: str) -> None:
    with pytest.raises(RecipeError, match="recipes keys") as told:
        load("digits", f"{name}=1")
    assert "did you mean" not in str(told.value)


def test_torchrun_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read([]) == ("help", [])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=r" type torchrun --nproc_per_node=4 -m trainer recipe=digits$"):
        read([])


def test_predict_takes_photos_folders_and_a_run_in_any_order() -> None:
    for typed, taken in {
        "photo.jpg": "photo.jpg",
        "photos runs/first": "photos checkpoint=runs/first",
        "runs/first photos photo.jpg": "checkpoint=runs/first photos photo.jpg",
        "photo.jpg first": "photo.jpg checkpoint=first",
        "data photos": "data photos",
        "'x #1.png' 'a b.jpg' lr=3.jpg": "'x #1.png' 'a b.jpg' ./lr=3.jpg",
        "w.pth photo.jpg threads=1": "checkpoint=w.pth photo.jpg threads=1",
        "- runs/first": "- checkpoint=runs/first",
        "--output photos photo.jpg": "output=photos photo.jpg",
        "photo.jpg data.root=photos": "photo.jpg data.root=photos",
    }.items():
        assert read(["predict", *shlex.split(typed)]) == ("predict", shlex.split(taken)), typed


def test_what_predict_cannot_tell_apart_is_asked() -> None:
    for typed, says in {
        "other": "./other runs/other",
        "runs/other first photo.jpg": "runs/other first both",
        "nothing": "'nothing'",
        "runs photo.jpg": "runs/",
    }.items():
        with pytest.raises(RecipeError) as error:
            read(["predict", *typed.split()])
        assert "\n" not in str(error.value)
        assert [word for word in says.split() if word not in str(error.value)] == [], (typed, str(error.value))


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_a_recipe_says_itself_is_never_corrected(name: str) -> None:
    words = [f"{key}={as_typed(value)}" for key, value in flatten(load(name).to_dict()).items()]
    assert read(words) == ("train", words)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "python -m trainer"),
        ({"TRAINER_COMMAND": "./launch.sh"}, "./launch.sh"),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nproc_per_node=4 -m trainer"),
        ({"RANK": "0", "WORLD_SIZE": "8", family.PARENT: "5"}, "python -m trainer"),
    ],
)
def test_what_to_type_begins_as_the_user_did(environment: dict[str, str], expected: str) -> None:
    assert program(environment) == expected
