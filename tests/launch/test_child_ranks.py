"""Ranks started for a Python program: their result, output and errors are returned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer.errors import NotFiniteError, SetupError, TrainerError
from trainer.launch import child_ranks
from trainer.recipe import load


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "expected"),
    [
        (
            1,
            "step 3\nTraceback\n  ...\nZeroDivisionError: a bug\n",
            TrainerError,
            "a bug",
        ),
        (
            1,
            "trainer: error: KeyError: x (o.py:8, in f)\nTraceback\nKeyError: x\n",
            TrainerError,
            "^KeyError: x .o.py",
        ),
        (1, "", TrainerError, r"\bcode 1$"),
        (3, "trainer: error: no card\n", SetupError, "^no card$"),
        (5, "trainer: error: nan\n", NotFiniteError, "^nan$"),
        (77, "trainer: error: odd\n", TrainerError, "^odd$"),
    ],
)
def test_the_api_raises_by_exit_code_whatever_was_imported(
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    stderr: str,
    kind: type[TrainerError],
    expected: str,
) -> None:
    from trainer.commands import compare  # The command defines a subclass of TrainerError.

    assert compare.compare
    child = work / "child"
    child.write_text(f"#!/bin/sh\nprintf '%s' '{stderr}' >&2\nexit {code}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(TrainerError, match=expected) as actual:
        child_ranks.train_in_children(load("digits"), None, None, {}, None)
    assert type(actual.value) is kind
