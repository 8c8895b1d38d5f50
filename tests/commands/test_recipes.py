"""Command `recipes`: one recipe with comments and origins, and the reference of keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command_line import ok, trainer
from trainer.commands.recipes import shown_keys
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.recipe.key_reference import keys, sections


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("optimizer.lr", ["optimizer.lr"]),
        ("lr", ["optimizer.lr"]),
        ("ddp", ["ddp.compress"]),
        ("every", ["local_sgd.every", "verify.every"]),
        ("root", ["data.root"]),
    ],
)
def test_a_key_is_looked_up_by_its_name_or_section(word: str, names: list[str]) -> None:
    lines = ok("recipes", "keys", word).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == names
    assert (
        keys()[names[0]].comment in lines[1] and (keys()[names[0]].values or names[0]) in lines[1]
    )


def test_help_leads_to_the_keys() -> None:
    assert "recipes keys" in ok("--help").stdout
    assert "recipes keys" in ok("recipes", "--help").stdout
    assert len(ok("recipes", "keys").stdout.splitlines()) == len(keys()) + len(sections())
    told = trainer("recipes", "keys", "lrr")
    assert (told.returncode, told.stdout) == (2, "")
    assert re.fullmatch(r"trainer: error: .*\bkeys lrr\b.*\boptimizer\.lr\?\n", told.stderr)
    with pytest.raises(RecipeError, match=r"learning-rate: .*\boptimizer\.lr\?"):
        shown_keys("learning-rate")


def test_a_recipe_is_printed_with_comments_and_who_set_what(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: digits_hogwild\ndata: {root: 'a # b: c'}\noptimizer: {eps: 1e-10}\n"
    )
    text = ok("recipes", "mine.yaml", "epochs=3", "output='ö\u2028x'", cwd=tmp_path).stdout
    words = ("epochs=3", "output='ö\u2028x'")
    (tmp_path / "printed.yaml").write_text(text, encoding="utf-8")
    assert (
        load(tmp_path / "printed.yaml").to_dict() == load(tmp_path / "mine.yaml", *words).to_dict()
    )
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    for key, origin in [
        ("crop", "digits"),
        ("mode", "digits_hogwild"),
        ("eps", "mine"),
        ("epochs", "your words"),
    ]:
        assert lines[key].endswith(f"<- {origin}"), lines[key]
    assert (
        lines["lr"].endswith("  <- digits_hogwild")
        and keys()["optimizer.lr"].comment in lines["lr"]
    )
    assert "<-" not in lines["momentum"]  # digits says it, as it is by default
    assert "<-" not in lines["compile"] and keys()["compile"].comment in lines["compile"]
    assert lines["optimizer"].endswith(sections()["optimizer"])
