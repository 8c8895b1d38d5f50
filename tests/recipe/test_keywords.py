"""A program's keys and values as a recipe has them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checks import refusal
from trainer.recipe import load


@pytest.mark.parametrize(
    "keywords",
    [
        {"optimizer__lr": 0.2},
        {"optimizer.lr": 0.2},
        {"optimizer": {"lr": 0.2}},
        {"optimizer": {"lr": np.float64(0.2)}},
        {"optimizer.lr": torch.tensor(0.2, dtype=torch.float64)},
    ],
)
def test_keys_of_a_section(keywords):
    loaded = load("digits", **keywords)
    assert loaded.optimizer.lr == 0.2
    assert loaded.optimizer.momentum == load("digits").optimizer.momentum


def test_values_of_a_program():
    loaded = load(
        "digits",
        output=Path("runs/x"),
        devices=("cpu", torch.device("cuda:1")),
        epochs=np.int64(3),
    )
    assert (loaded.output, loaded.devices, loaded.epochs) == ("runs/x", ["cpu", "cuda:1"], 3)
    assert load("digits", optimizer__lr=0.2, optimizer={"momentum": 0.5}).optimizer.momentum == 0.5
    again = load(loaded, epochs=4)
    assert (again.name, again.output, again.epochs) == ("digits", "runs/x", 4)


@pytest.mark.parametrize(
    ("words", "keywords", "expected"),
    [
        ([], {"epoch": 2}, r"digits: epoch .* epochs\?$"),
        (
            [],
            {"optimizer__lrr": 2},
            r"digits: optimizer\.lrr .* optimizer\.lr\?$",
        ),
        ([], {"lr": 2}, r"digits: lr .* optimizer\.lr\?$"),
        (["lr=2"], {}, r"digits: lr .* optimizer\.lr\?$"),
        ([], {"modle": object()}, r"modle=object .*\bmodel="),
        ([], {"epochs": 2.5}, r"digits: epochs=2\.5 .*\binteger$"),
        (
            ["epochs=2"],
            {"epochs": 3},
            r"epochs .*\btwice\b.*\bkeyword\b",
        ),
        ([], {"optimizer__lr": 1.0, "optimizer.lr": 2.0}, r"optimizer\.lr .*\btwice\b"),
        (
            [],
            {"optimizer": {"lr": 1.0}, "optimizer.lr": 2.0},
            r"optimizer\.lr .*\btwice\b",
        ),
        (
            [],
            {"optimizer": object()},
            r"optimizer=object .*\boptimizer\.name=.*\boptimizer=\{\.\.\.\}",
        ),
        (
            [],
            {"optimizer__lr": torch.ones(2)},
            r"optimizer\.lr=Tensor .*\bnumbers, text\b",
        ),
        ([], {"precision": torch.bfloat16}, r"precision=dtype .*\bnumbers, text\b"),
    ],
)
def test_wrong_keywords_are_answered_as_words_are(words, keywords, expected):
    assert re.match(expected, refusal(load, "digits", *words, **keywords))


def test_objects_that_are_no_recipes_are_refused():
    assert re.search(r"YAML.*\bint$", refusal(load, 3))


def test_a_dictionary_has_dotted_keys_too():
    assert load({"optimizer.lr": 0.3, "epochs": 2}).optimizer.lr == 0.3
