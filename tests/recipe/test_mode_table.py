"""The table of modes: it is consistent, README and the guide show it, and no other code compares
the names of modes.
"""

import ast
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import trainer
from trainer.recipe import MODES, TRAITS, load
from trainer.recipe.mode_table import Mode, Traits

HOME = Path(trainer.__file__).parent
MODULES = [
    path for path in sorted(HOME.rglob("*.py")) if path.relative_to(HOME).parts[0] != "modes"
]
MODULES.remove(HOME / "recipe" / "mode_table.py")


def named(node):
    """Return the names of modes in an expression: one, or those in a tuple, list, set, or in the
    keys of a dict.
    """
    nodes = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    nodes = [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else nodes
    return [one.value for one in nodes if isinstance(one, ast.Constant) and one.value in MODES]


def branches(source):
    """Return the lines that compare the names of modes: comparisons, cases, and collections of
    names alone.
    """
    actual = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare():
                asked = any(named(side) for side in (node.left, *node.comparators))
            case ast.MatchValue():
                asked = bool(named(node.value))
            case ast.Tuple() | ast.List() | ast.Set():
                asked = len(node.elts) == len(named(node)) > 1
            case ast.Dict():
                asked = len(node.keys) == len(named(node)) > 1
            case _:
                asked = False
        if asked:
            actual.add(node.lineno)
    return sorted(actual)


BRANCHES = [
    'recipe.mode == "ddp"',
    '"single" != layout.recipe.mode',
    'entry.mode in ("split", "pipeline")',
    'mode not in {"dp", *others}',
    'found["mode"] == "dp"',
    "chosen = {'ddp': 1, 'dp': 2}[mode]",
    'STAGED = ("split", "pipeline")',
    "match mode:\n    case 'hogwild' | 'local_sgd': pass",
]
DATA = ['result["pipeline"]', 'recipe.replace(mode="single")', 'f"mode={recipe.mode}"']


@pytest.mark.parametrize("line", [*BRANCHES, *DATA])
def test_a_branch_on_a_name_is_found_and_a_name_that_is_data_is_not(line):
    assert branches(line) == [line.count("\n") + 1] * (line in BRANCHES)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HOME)))
def test_nobody_asks_for_the_name_of_a_mode(path):
    assert branches(path.read_text()) == [], (
        "ask recipe.traits, or a method of trainer.modes.Strategy"
    )


def test_every_mode_has_a_row_and_one_is_the_reference():
    assert MODES == tuple(TRAITS) == get_args(Mode)
    assert sum(traits.reference for traits in TRAITS.values()) == 1


@pytest.mark.parametrize("trait", [field.name for field in fields(Traits)])
def test_every_trait_differs_between_modes(trait):
    rows = [getattr(traits, trait) for traits in TRAITS.values()]
    assert any(row != rows[0] for row in rows)


@pytest.mark.parametrize("mode", MODES)
def test_traits_go_together(mode):
    traits = load(None, f"mode={mode}").traits
    assert traits is TRAITS[mode]
    assert len(traits.when) == 1 + (traits.processes == "either")
    assert traits.staged or not traits.micro_batches
    assert traits.staged == (traits.exchanges == "activations")
    assert not traits.reference or (
        traits.single_device and traits.same_maths and traits.exchanges == "nothing"
    )
    assert set(traits.per_rank_state) <= {"model", "optimizer", "ema", "scaler"}


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("mode=single", "one"),
        ("mode=split", "one"),
        ("mode=ddp pipeline.schedule=streams", "many"),
        ("mode=pipeline", "either"),
        ("mode=pipeline pipeline.schedule=streams", "one"),
        ("mode=pipeline pipeline.schedule=1f1b", "many"),
    ],
)
def test_processes(words, processes):
    assert load(None, *words.split()).processes == processes
