"""Each key has one comment, which is in the schema."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.command_line import PROJECT
from tests.pages import made
from trainer.cli.command_table import COMMANDS
from trainer.recipe import Recipe, flatten, load
from trainer.recipe.key_reference import Key, keys, sections
from trainer.recipe.schema import EXTENDS
from trainer.recipe.text import ARGUMENT_KEYS


def test_every_key_has_a_comment_of_its_own() -> None:
    known_names = keys()
    assert [*known_names] == ["extends", *flatten(Recipe().to_dict())]
    comments = [key.comment for key in known_names.values()]
    assert all(10 < len(comment) <= 100 and not comment.endswith(".") for comment in comments), (
        comments
    )
    assert len({*comments}) == len(comments)
    assert all(sections().values())
    assert {key.section for key in known_names.values()} == {*sections()}
    assert (
        known_names["data.cache_format"].values,
        known_names["epochs"].values,
        known_names["compile"].values,
    ) == (
        "raw, jpeg, null",
        "",
        "",
    )


@pytest.mark.parametrize("path", made(), ids=lambda path: path.name)
def test_files_generated_from_the_schema_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == made()[path](), "python -m tests.pages writes it"


@pytest.mark.parametrize("key", keys().values(), ids=lambda key: key.name)
def test_the_example_of_a_key_is_what_can_be_typed(key: Key, tmp_path: Path) -> None:
    if key.name == EXTENDS:
        (tmp_path / "mine.yaml").write_text(f"{key.example}\n")
        assert (
            load(tmp_path / "mine.yaml").to_dict() == load(key.example.partition(": ")[2]).to_dict()
        )
        return
    words = key.example.split()
    name, _, value = words[-1].partition("=")
    recipe = load(None, *words)
    typed = flatten(recipe.to_dict())[key.name]
    if key.name in ARGUMENT_KEYS:
        argument = name.removeprefix(f"{key.name}.")
        typed = typed[argument]
    else:
        assert name == key.name
    # "off" is a word here, and false in YAML.
    assert typed in (yaml.safe_load(value), value)
    assert value != key.default or re.search("[1-9]", value), "shows nothing"


def test_the_reference_is_shipped() -> None:
    shipped = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    assert "guide/*.md" in shipped["trainer"]
    assert {"*.yaml", "*.json"} <= {*shipped["trainer.recipes"]}


def test_keys_and_commands_stay():
    """Recipes and scripts of users contain them: none is removed, and a new one is added here on
    purpose.
    """
    names = (PROJECT / "tests" / "recipe" / "keys_and_commands.txt").read_text().split()
    assert [*sorted(flatten(Recipe().to_dict())), *sorted(COMMANDS)] == names
