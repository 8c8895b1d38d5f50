"""A hundred wishes as users of other programs type them, written down before anybody looked at the rules.

`wishes.tsv` has a wish a line, what its answer names (";" between what must all be there, "|" between what may stand
for each other), and what it must not tell to type. What was typed does not count where an answer repeats it, nor does
the sentence for words that nobody knows.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainer.cli.grammar import read
from trainer.cli.guide import topics
from trainer.cli.known_keys import COMMAND_WORDS
from trainer.errors import RecipeError, TrainerError
from trainer.recipe import load
from trainer.recipe.key_reference import shown_keys
from trainer.recipe.known_names import check_names
from trainer.recipe.near_names import said_of
from trainer.recipe.other_names import OTHER_KEYS, SUBJECTS
from trainer.recipe.recipe_files import split_words
from trainer.recipe.reflection import defaults
from trainer.recipe.schema import comments

WISHES = [line.split("\t") for line in Path(__file__).with_name("wishes.tsv").read_text().splitlines()[1:]]
HALF = 4  # of a hundred may be answered by less than what is known
UNKNOWN = "python -m trainer recipes keys lists them, and python -m trainer guide answers questions"


def answer(typed: str) -> str:
    """What the command line says to a wish: an error, or the words that it takes."""
    try:
        command, words = read(shlex.split(typed))
        if command in COMMAND_WORDS:
            own, rest = split_words([word for word in words if "=" in word], COMMAND_WORDS[command])
            check_names(load(own.get("recipe"), *rest))
    except TrainerError as error:
        return str(error)
    return f" type {shlex.join(words)}"


def told(text: str) -> str:
    """The part of an answer that somebody would type."""
    return (
        f"{text.rpartition(' type ')[2] if ' type ' in text else ''} {' '.join(re.findall('did you mean .*', text))} "
    )


def known(text: str) -> str:
    """An answer without what was typed, and without the sentence for words that nobody knows."""
    return re.sub(r"'[^']*'(?=:| is )|\S+ is not a key", "", text).replace(UNKNOWN, "")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """right, half or wrong, by wish."""
    found = {}
    for _, typed, names, *forbidden in WISHES:
        text = answer(typed)
        right = all(any(name in known(text) for name in part.split("|")) for part in names.split(";"))
        wrong = [word for word in "".join(forbidden).split(";") if word and word in told(text)]
        found[typed] = "wrong" if wrong else "right" if right else "half"
    return found


def test_none_is_answered_wrongly(verdicts: dict[str, str]) -> None:
    assert [typed for typed, verdict in verdicts.items() if verdict == "wrong"] == []


def test_nine_of_ten_are_answered_rightly(verdicts: dict[str, str]) -> None:
    assert len(verdicts) == 100
    assert Counter(verdicts.values())["half"] <= HALF, verdicts


# What was answered by a wrong word: the whole of what is told to type, and what the answer names besides.
MENDED = {
    "recipe=digits warmup=500": ("recipe=digits", "schedule.warmup_epochs="),
    "recipe=resnet50 --resume x.pth.tar": ("recipe=resnet50", "model.init_from="),
    "recipe=digits --per_device_train_batch_size 32": ("recipe=digits", "batch_size="),
    "recipe=digits batch=-1": ("recipe=digits", "batch_size"),
    "recipe=digits time=1h": ("recipe=digits", "max_steps="),
    "recipe=digits nnodes=2 master_addr=h": (
        "NNODES=2 MASTER_ADDR=h NODE_RANK=0 python -m trainer recipe=digits",
        "nodes",
    ),
    "data=photos": ("recipe=finetune data.root=photos", "photos"),
    "recipe=digits mode=deepspeed": ("recipe=digits mode=fsdp", "there is no deepspeed"),
    "recipe=digits ~ema": ("recipe=digits ema=null", "ema"),
    "recipe=digits ~compile": ("recipe=digits compile=false", "compile"),
    "train.py /data/imagenet --model resnet50 --sched cosine -j 4": (
        "recipe=resnet50 data.root=/data/imagenet schedule.name=cosine data.workers=4",
        "data.root",
    ),
    "recipe=digits task=segment": ("recipe=digits", "multilabel"),
    "plan recipe=digits gpu=A100": ("plan recipe=digits", "devices"),
    "recipe=digits dp=2 pp=2": ("recipe=digits mode=pipeline pipeline.stages=2", "nproc="),
    "recipe=digits trainer.optimizer.lr=0.1": ("recipe=digits optimizer.lr=0.1", "optimizer.lr"),
    "recipe=digits lr_max=0.1": ("recipe=digits optimizer.lr=0.1", "optimizer.lr"),
    "recipe=digits conf=0.25 lr=0.1": ("recipe=digits optimizer.lr=0.1", "conf"),
}


@pytest.mark.parametrize("typed", MENDED)
def test_what_was_a_wrong_word(typed: str) -> None:
    words, named = MENDED[typed]
    text = answer(typed)
    assert text.rpartition(" type ")[2].removeprefix("python -m trainer ") == words and named in text, text


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("recipe=vit_b_16 bias_weight_decay=0", "norm_weight_decay"),
        ("recipe=digits mixup_off_epoch=9", "augment.mixup"),
        ("recipe=digits early_stopping_threshold=0.1", "stop.patience"),
    ],
)
def test_a_word_that_no_key_has_is_answered_by_keys_that_speak_of_it(typed: str, named: str) -> None:
    text = answer(typed)
    assert named in text and "recipes keys" in text and "did you mean" not in text


@pytest.mark.parametrize("typed", ["recipe=digits image_backend=accimage", "recipe=digits tensorrt=true"])
def test_one_that_nothing_speaks_of_has_no_neighbour(typed: str) -> None:
    assert UNKNOWN in answer(typed) and "nearest" not in answer(typed)


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("attention_dropout=0.1", "guide own"),
        ("width_shift_range=0.1", "augment.auto"),
        ("augment.rotate=10", "augment.auto"),
        ("schedule.milestones=[30,60]", "schedule.step_epochs"),
        ("dataloader.shuffle=true", "shuffled"),
    ],
)
def test_a_subject_is_known_by_its_word_in_any_name_on_a_line_and_in_a_file(typed: str, names: str) -> None:
    text = answer(f"recipe=digits {typed}")
    assert names in known(text) and text.endswith("type python -m trainer recipe=digits")
    key, _, value = typed.partition("=")
    with pytest.raises(RecipeError, match=names):
        load({"extends": "digits", **nested(key, value)})


def nested(key: str, value: str) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize(
    ("typed", "key"), [("warmup_epchs", "schedule.warmup_epochs"), ("augment.crops", "augment.crop")]
)
def test_a_slip_in_a_key_is_told_before_its_subject(typed: str, key: str) -> None:
    assert f"did you mean {key}?" in answer(f"recipe=digits {typed}=1")


@pytest.mark.parametrize("sentence", SUBJECTS)
def test_a_subject_names_keys_and_a_page_that_there_are(sentence: str) -> None:
    page = re.findall(r"see (guide|recipes keys) (\w+)", sentence)
    assert len(page) == 1 and (page[0][1] in topics() if page[0][0] == "guide" else shown_keys(page[0][1]))
    assert {*re.findall(r"([\w.]+)=", sentence)} <= {*defaults(), "recipe"}
    for name in SUBJECTS[sentence].split():
        assert name in OTHER_KEYS or said_of(name, comments()) == sentence


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("recipe=finetune train_dir=photos/train", "recipe=finetune data.root=photos"),
        ("recipe=finetune train_dir=photos/cats", "recipe=finetune data.root=photos/cats"),
        ("recipe=finetune train_dir=train", "recipe=finetune data.root=."),
        ("recipe=finetune data.train_dir=photos/train", "recipe=finetune data.root=photos"),
        ("recipe=digits logger.wandb.project=x", "recipe=digits logging.wandb=x"),
        ("recipe=digits optimizer._target_=torch.optim.AdamW", "recipe=digits optimizer.name=adamw"),
        ("recipe=digits imgsz=[3,28,28]", "recipe=digits data.image_size=28 data.channels=3"),
        ("tools/train.py configs/resnet50_v2_16x.py", "recipe=resnet50_v2"),
        ("configs/swin/swin-tiny_16xb64_in1k.py", "recipe=digits"),
        ("recipe=digits optimizer/scheduler=cosine", "recipe=digits schedule.name=cosine"),
        ("recipe=digits --print_config", "recipes digits"),
        ("recipe=digits --list-models", "recipes"),
        ("recipe=digits opt_level=O0", "recipe=digits precision=fp32"),
    ],
)
def test_what_is_to_be_typed(typed: str, words: str) -> None:
    assert answer(typed).rpartition(" type python -m trainer ")[2] == words


def test_a_photo_with_an_equals_sign_in_its_name_is_no_key() -> None:
    assert "no photo" in answer("predict photos/a=b.jpg")
    assert "not key=value" in answer("recipe=digits runs/b=3")
