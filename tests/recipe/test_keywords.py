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


NO_VALUE = "is not a value for a recipe"


@pytest.mark.parametrize(
    ("words", "keywords", "line"),
    [
        ([], {"epoch": 2}, "digits: epoch is not a key; did you mean epochs?"),
        (
            [],
            {"optimizer__lrr": 2},
            "digits: optimizer.lrr is not a key; did you mean optimizer.lr?",
        ),
        ([], {"lr": 2}, "digits: lr is not a key; did you mean optimizer.lr?"),
        (["lr=2"], {}, "digits: lr is not a key; did you mean optimizer.lr?"),
        ([], {"modle": object()}, "modle=object is not a key: what is no recipe's is model="),
        ([], {"epochs": 2.5}, "digits: epochs=2.5 must be an integer"),
        (
            ["epochs=2"],
            {"epochs": 3},
            "epochs is given twice, as a word and as a keyword: keep one",
        ),
        ([], {"optimizer__lr": 1.0, "optimizer.lr": 2.0}, "optimizer.lr is given twice: keep one"),
        (
            [],
            {"optimizer": {"lr": 1.0}, "optimizer.lr": 2.0},
            "optimizer.lr is given twice: keep one",
        ),
        (
            [],
            {"optimizer": object()},
            f"optimizer=object {NO_VALUE}: set optimizer.name= and the like, or ",
        ),
        (
            [],
            {"optimizer__lr": torch.ones(2)},
            f"optimizer.lr=Tensor {NO_VALUE}: write numbers, text",
        ),
        ([], {"precision": torch.bfloat16}, f"precision=dtype {NO_VALUE}: write numbers"),
    ],
)
def test_wrong_keywords_are_answered_as_words_are(words, keywords, line):
    assert refusal(load, "digits", *words, **keywords).startswith(line)


def test_objects_that_are_no_recipes_are_refused():
    assert re.search(r"YAML.*\bint$", refusal(load, 3))


def test_a_dictionary_has_dotted_keys_too():
    assert load({"optimizer.lr": 0.3, "epochs": 2}).optimizer.lr == 0.3
