"""`recipes keys`, `schema`, `list` and `show`, through the real command line."""

from __future__ import annotations

import pytest

from tests.command_line import ok, trainer


def test_list_and_show_are_what_no_word_and_a_name_are() -> None:
    assert ok("recipes", "list").stdout == ok("recipes").stdout
    assert ok("recipes", "show", "digits", "epochs=3").stdout == ok("recipes", "digits", "epochs=3").stdout


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
