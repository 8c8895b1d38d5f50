"""The JSON Schema accepts what `load` accepts and marks what a person mistypes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.command_line import ok
from tests.pages import SCHEMA
from trainer.errors import RecipeError
from trainer.recipe import load, shipped_recipes

jsonschema = pytest.importorskip(
    "jsonschema", reason="pip install jsonschema (of the extra `test`)"
)


@pytest.fixture(scope="module")
def checker() -> Any:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def mistakes(checker: Any, text: str) -> list[str]:
    return [error.message for error in checker.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_accepted_and_names_the_schema(checker: Any, name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert mistakes(checker, text) == []
    assert mistakes(checker, load(name).to_yaml()) == []  # The text is that of a run folder.
    assert mistakes(checker, "optimizer: adam") == []
    assert text.splitlines()[1] == f"# yaml-language-server: $schema={SCHEMA.name}"


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lrr: 0.1}",
        "optimzer: {lr: 0.1}",
        "lr: 0.1",
        "extend: digits",
        "extends: [digits]",
        "mode: dpp",
        "epochs: 0",
        "epochs: 1.5",
        "epochs: '3'",
        "epochs: null",
        "optimizer: {lr: fast}",
        "optimizer: {lr: 0}",
        "optimizer: 5",
        "optimizer: {betas: [0.9]}",
        "augment: {hflip: 2}",
        "ema: 1",
        "compile: 1",
        "devices: cuda:1",
        "devices: [gpu]",
        "devices: []",
        "data: {channels: 65}",
        "model: {name: [cnn]}",
        "model: {freeze: 0}",
        "model: {freeze: []}",
        "model: {freeze: true}",
        "pipeline: {stages: 1}",
        "pipeline: {microbatches: 0}",
        "pipeline: {schedule: 1F1B}",
        "precision: amp",
        "save: {keep: 1}",
        "seed: -1",
    ],
)
def test_the_editor_marks_values_that_load_refuses(checker: Any, text: str) -> None:
    assert mistakes(checker, text), text
    with pytest.raises(RecipeError):
        load(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "extends: ../runs/x",
        "devices: [cuda:0, cuda:1]",
        "devices: auto",
        "pipeline: {cuts: [layer2.3, layer4]}",
        "pipeline: {cuts: [3, 6]}",
        "model: {freeze: -1}",
        "model: {freeze: conv1}",
        "model: {freeze: [0, layer1.0, 'layer[23]']}",
        "model: {freeze: null}",
        "model: {name: my_own_net}",
        "loss: {class_weights: [1, 2.5]}",
        "loss: {class_weights: balanced}",
        "max_steps: null",
        "optimizer: {lr: 1}",
        "ema: 0.999",
    ],
)
def test_the_editor_does_not_mark_values_that_load_accepts(checker: Any, text: str) -> None:
    assert mistakes(checker, text) == []
    tree = yaml.safe_load(text)
    tree.pop("extends", None)
    load(tree)


def test_the_printed_schema_is_the_shipped_one(checker: Any) -> None:
    assert json.loads(ok("recipes", "schema").stdout) == checker.schema
