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
    ("key", "value", "expected"),
    [
        ("data.workers", 1000, r"data\.workers=1000 .*\b256\b.*\bnull"),
        (
            "loss.class_weights",
            "auto",
            r"loss\.class_weights=auto .*\bbalanced, .*\blist, .*\bnull",
        ),
        (
            "loss.class_weights",
            "balance",
            r"loss\.class_weights=balance .*\bbalanced, .*\blist, .*\bnull",
        ),
        ("loss.class_weights", [1, -1], r"loss\.class_weights\[1\]=-1 [^,]*\b0\b[^,]*"),
        ("loss.class_weights", [1, "x"], r"loss\.class_weights\[1\]=x [^,]*\bnumber"),
        ("pipeline.microbatches", 0, r"pipeline\.microbatches=0 .*\bauto\b.*\bnumber\b.*\b8"),
        ("optimizer.betas", [0.9, 2], r"optimizer\.betas\[1\]=2 [^,]*\b1"),
        ("data", [1], r"data=\[1\] .*\bdata\.name=\.\.\."),
    ],
)
def test_a_key_with_several_kinds_of_values(key, value, expected):
    assert re.fullmatch(f"digits: {expected}", refusal(load, DIGITS, **{key: value}))
