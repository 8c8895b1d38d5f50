"""Messages for a wrong value of each key, without the words of pydantic."""

import re

import pytest

from tests.checks import refusal
from trainer.recipe import Recipe, flatten, load

KEYS = [*flatten(Recipe().to_dict())]
DIGITS = load("digits")
SECTIONS = sorted({key.partition(".")[0] for key in KEYS if "." in key})
VALUES = [
    "nonsense",
    "auto",
    "",
    -1,
    1000,
    10**30,
    1.5,
    -1e300,
    [],
    ["x", -1],
    [1.5, None],
    {"a": 1},
    None,
    True,
]
INSIDES = re.compile(
    r"function-|literal\[|union\[|constrained|tagged|nullable|list\[|model-|Input should|valid "
    r"|pydantic|merge|Unable"
)


@pytest.mark.parametrize("key", [*KEYS, *SECTIONS])
def test_messages_do_not_show_how_values_are_checked(key):
    for value in VALUES:
        line = refusal(load, DIGITS, most=400, **{key: value})
        assert not INSIDES.search(line), line
        assert not line or key.rpartition(".")[2] in line or "optimizer" in line, line


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("data.workers", 1000, "data.workers=1000 must be 256 or less, or null"),
        ("loss.class_weights", "auto", "loss.class_weights=auto must be balanced, a list, or null"),
        (
            "loss.class_weights",
            "balance",
            "loss.class_weights=balance must be balanced, a list, or null",
        ),
        ("loss.class_weights", [1, -1], "loss.class_weights[1]=-1 must be 0 or more"),
        ("loss.class_weights", [1, "x"], "loss.class_weights[1]=x must be a number"),
        ("pipeline.microbatches", 0, "pipeline.microbatches=0 must be auto or a number, as in 8"),
        ("optimizer.betas", [0.9, 2], "optimizer.betas[1]=2 must be below 1"),
        ("data", [1], "data=[1] must be a section, as in data.name=..."),
    ],
)
def test_a_key_with_several_kinds_of_values(key, value, line):
    assert refusal(load, DIGITS, **{key: value}) == f"digits: {line}"
