"""Every key has one comment, from one place: the schema."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.command_line import PROJECT, ok, trainer
from tests.pages import made
from trainer.cli.command_table import COMMANDS
from trainer.errors import RecipeError
from trainer.recipe import Recipe, flatten, load
from trainer.recipe.key_reference import Key, keys, sections, shown_keys
from trainer.recipe.schema import EXTENDS


def test_every_key_has_a_comment_of_its_own() -> None:
    known = keys()
    assert [*known] == ["extends", *flatten(Recipe().to_dict())]
    comments = [key.comment for key in known.values()]
    assert all(10 < len(comment) <= 100 and not comment.endswith(".") for comment in comments), comments
    assert len({*comments}) == len(comments)
    assert all(sections().values()) and {key.section for key in known.values()} == {*sections()}
    assert (known["data.cache_format"].values, known["epochs"].values, known["compile"].values) == (
        "raw, jpeg, null",
        "",
        "",
    )


@pytest.mark.parametrize("path", made(), ids=lambda path: path.name)
def test_what_is_made_from_the_schema_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == made()[path](), "python -m tests.pages writes it"


@pytest.mark.parametrize("key", keys().values(), ids=lambda key: key.name)
def test_the_example_of_a_key_is_what_can_be_typed(key: Key, tmp_path: Path) -> None:
    if key.name == EXTENDS:
        (tmp_path / "mine.yaml").write_text(f"{key.example}\n")
        assert load(tmp_path / "mine.yaml").to_dict() == load(key.example.partition(": ")[2]).to_dict()
        return
    words = key.example.split()
    name, _, value = words[-1].partition("=")
    recipe = load(None, *words)
    assert name == key.name
    assert flatten(recipe.to_dict())[name] in (yaml.safe_load(value), value)  # "off" is a word here, and false in YAML
    assert value != key.default or re.search("[1-9]", value), "shows nothing"


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("optimizer.lr", ["optimizer.lr"]),
        ("lr", ["optimizer.lr"]),
        ("local_sgd", ["local_sgd.every", "local_sgd.outer_lr", "local_sgd.outer_momentum"]),
        ("every", ["local_sgd.every"]),
        ("root", ["data.root"]),
    ],
)
def test_a_key_is_looked_up_by_its_name_or_section(word: str, names: list[str]) -> None:
    lines = ok("recipes", "keys", word).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == names
    assert keys()[names[0]].comment in lines[1] and (keys()[names[0]].values or names[0]) in lines[1]


def test_help_leads_to_the_keys() -> None:
    assert "recipes keys" in ok("--help").stdout
    assert "recipes keys" in ok("recipes", "--help").stdout
    assert len(ok("recipes", "keys").stdout.splitlines()) == len(keys()) + len(sections())
    told = trainer("recipes", "keys", "lrr")
    assert (told.returncode, told.stdout) == (2, "")
    assert re.fullmatch(r"trainer: error: .*recipes keys lrr\b.*\boptimizer\.lr\?\n", told.stderr)
    with pytest.raises(RecipeError, match=r"learning-rate: .*\boptimizer\.lr\?"):
        shown_keys("learning-rate")


def test_a_recipe_is_printed_with_comments_and_who_set_what(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: digits_hogwild\ndata: {root: 'a # b: c'}\noptimizer: {eps: 1e-10}\n")
    text = ok("recipes", "mine.yaml", "epochs=3", "output='ö\u2028x'", cwd=tmp_path).stdout
    words = ("epochs=3", "output='ö\u2028x'")
    (tmp_path / "printed.yaml").write_text(text, encoding="utf-8")
    assert load(tmp_path / "printed.yaml").to_dict() == load(tmp_path / "mine.yaml", *words).to_dict()
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    for key, origin in [("crop", "digits"), ("mode", "digits_hogwild"), ("eps", "mine"), ("epochs", "your words")]:
        assert lines[key].endswith(f"<- {origin}"), lines[key]
    assert lines["lr"].endswith("  <- digits_hogwild") and keys()["optimizer.lr"].comment in lines["lr"]
    assert "<-" not in lines["momentum"]  # digits says it, as it is by default
    assert "<-" not in lines["compile"] and keys()["compile"].comment in lines["compile"]
    assert lines["optimizer"].endswith(sections()["optimizer"])


def test_the_reference_is_shipped() -> None:
    shipped = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "guide/*.md" in shipped["trainer"] and {"*.yaml", "*.json"} <= {*shipped["trainer.recipes"]}


def test_keys_and_commands_stay():
    """Recipes and scripts of others hold them: none goes, and a new one is a line that somebody meant to add."""
    names = (PROJECT / "tests" / "recipe" / "keys_and_commands.txt").read_text().split()
    assert [*sorted(flatten(Recipe().to_dict())), *sorted(COMMANDS)] == names
