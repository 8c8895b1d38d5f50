"""Ranks for a program: its result, its output and its errors come back."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_launching import work as work
from trainer.errors import NotFiniteError, SetupError, TrainerError
from trainer.launch import child_ranks, launching
from trainer.recipe import load


@pytest.mark.full
def test_the_api_trains_in_children_and_raises_what_they_met(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("digits", "devices=[cpu]")
    assert launching.wants_children(recipe)
    assert not launching.wants_children(load("digits", "mode=single", "devices=[cpu]"))
    result: dict[str, Any] = child_ranks.train_in_children(recipe, "stand_in")
    assert result == {
        "world_size": launching.choose_launch(os.environ, None, recipe, lambda: 0, os.cpu_count() or 1).size
    } | {"recipe": "digits"}
    (folder,) = (work / "runs").iterdir()
    assert re.fullmatch(r"digits-ddp-\d{8}-\d{6}", folder.name)
    assert json.loads((folder / "result.json").read_text()) == result

    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("CASE", "nan")
    with pytest.raises(NotFiniteError, match=r"^the loss is nan at step 3$"):
        child_ranks.train_in_children(recipe.replace(output=str(work / "mine")), "stand_in")
    with pytest.raises(TrainerError, match="absent"):
        child_ranks.train_in_children(recipe, "absent")
    assert list((work / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "expected"),
    [
        (1, "step 3\nTraceback (most recent call last):\n  ...\nZeroDivisionError: a bug\n", TrainerError, "a bug"),
        (
            1,
            "trainer: error: KeyError: x (own.py:8, in f)\nTraceback\nKeyError: x\n",
            TrainerError,
            "^KeyError: x .own.py",
        ),
        (1, "", TrainerError, "the training ended with exit code 1"),
        (3, "trainer: error: no card\n", SetupError, "^no card$"),
        (5, "trainer: error: the loss is nan\n", NotFiniteError, "^the loss is nan$"),
        (77, "trainer: error: odd\n", TrainerError, "^odd$"),
    ],
)
def test_the_api_raises_by_exit_code_whatever_was_imported(
    work: Path, monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, kind: type[TrainerError], expected: str
) -> None:
    from trainer.commands import compare  # with a kind of TrainerError of its own

    assert compare.compare
    child = work / "child"
    child.write_text(f"#!/bin/sh\nprintf '%s' '{stderr}' >&2\nexit {code}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(TrainerError, match=expected) as found:
        child_ranks.train_in_children(load("digits"))
    assert type(found.value) is kind
