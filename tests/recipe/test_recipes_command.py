"""Words that `recipes` does not take."""

from __future__ import annotations

import pytest

from tests.command_line import trainer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["schema", "digits"], "recipes schema takes no words, as digits: type recipes schema > recipe.schema.json"),
        (["key"], "recipes key: no such recipe; did you mean recipes keys?"),
        (["diff", "digits", "mnist"], "recipe=diff: no such recipe or file"),
        (["keys", "optimizer", "lr"], "recipes keys takes one section or key, not 2: type recipes keys optimizer"),
        (["digts"], "recipe=digts: no such recipe or file; did you mean recipe=digits?"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], expected: str) -> None:
    told = trainer("recipes", *words)
    assert (told.returncode, told.stdout) == (2, "")
    assert expected in told.stderr and told.stderr.count("\n") == 1
