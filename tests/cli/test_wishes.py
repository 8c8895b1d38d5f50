"""A hundred wishes as users of other programs type them, written down before anybody looked at the rules.

`wishes.tsv` has a wish a line, what its answer names (";" between what must all be there, "|" between what may stand
for each other), and what it must not tell to type.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from trainer.cli.grammar import read
from trainer.cli.known_keys import COMMAND_WORDS
from trainer.errors import TrainerError
from trainer.recipe import load
from trainer.recipe.known_names import check_names
from trainer.recipe.recipe_files import split_words

WISHES = [line.split("\t") for line in Path(__file__).with_name("wishes.tsv").read_text().splitlines()[1:]]
HALF = 10  # of a hundred may be answered by less than what is known


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


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """right, half or wrong, by wish."""
    found = {}
    for _, typed, names, *forbidden in WISHES:
        text = answer(typed)
        right = all(any(name in text for name in part.split("|")) for part in names.split(";"))
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
    "compare runs/a runs/b": ("runs compare runs/a runs/b", "runs"),
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
        ("recipe=digits crop_pct=0.9", "augment.crop"),
        ("recipe=digits max_train_samples=1000", "data.samples"),
    ],
)
def test_a_word_that_no_key_has_is_answered_by_keys_that_speak_of_it(typed: str, named: str) -> None:
    text = answer(typed)
    assert named in text and "recipes keys" in text and "did you mean" not in text


@pytest.mark.parametrize("typed", ["recipe=digits rotation_range=20", "recipe=digits push_to_hub=true"])
def test_one_that_nothing_speaks_of_has_no_neighbour(typed: str) -> None:
    assert "guide" in answer(typed) and "nearest" not in answer(typed)
