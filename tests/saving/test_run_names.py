"""Runs are found by their path and by their name below runs/.

A message suggests the name for a misspelled one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.errors import CheckpointError
from trainer.saving.run_names import find_run, split_choice


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tuned" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "runs" / "tuned" / "last.safetensors").touch()
    (tmp_path / "runs" / "tuned" / "checkpoints" / "step-00000002" / "manifest.json").touch()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("tuned", "runs/tuned"),
        ("runs/tuned", "runs/tuned"),
        ("tuned/last.safetensors", "runs/tuned/last.safetensors"),
        ("tuned/checkpoints/step-00000002", "runs/tuned/checkpoints/step-00000002"),
    ],
)
def test_a_path_or_a_name_below_runs(runs: Path, typed: str, meant: str) -> None:
    assert str(find_run(typed)) == meant
    assert find_run(str(runs / "tuned")) == runs / "tuned"


def test_weights_are_named_after_their_run(runs: Path) -> None:
    weights = runs / "tuned" / "last.safetensors"
    assert find_run(f"{runs / 'tuned'} last") == weights
    assert str(find_run("tuned last")) == "runs/tuned/last.safetensors"
    (runs / "tuned last").mkdir()
    assert str(find_run("tuned last")) == "runs/tuned last"
    (runs / "tuned last").rmdir()
    for name in (
        "tuned best",
        "tuned/last.safetensors last",
        "tuned/checkpoints/step-00000002 best",
    ):
        with pytest.raises(CheckpointError):
            find_run(name)
    weights.rename(weights.with_name("best.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        find_run("runs/tuned last")
    advice = re.search("'(.*)'", str(caught.value))
    assert advice
    assert find_run(advice[1]).name == "best.safetensors"


@pytest.mark.parametrize(
    ("words", "suffix", "rest"),
    [
        (["a=1"], "", ["a=1"]),
        (["last", "a=1"], " last", ["a=1"]),
        (["a=1", "checkpoint=best"], " best", ["a=1"]),
    ],
)
def test_the_choice_of_weights_is_split_from_arguments(
    words: list[str], suffix: str, rest: list[str]
) -> None:
    assert split_choice(words) == (suffix, rest)


def test_a_folder_of_the_runs_name_is_not_in_the_way(runs: Path) -> None:
    Path("tuned").mkdir()
    assert str(find_run("tuned")) == "runs/tuned"
    Path("tuned", "last.safetensors").touch()
    assert str(find_run("tuned")) == "tuned"


@pytest.mark.parametrize(
    ("typed", "pattern"),
    [
        ("tumed", r"'tumed' .*\bruns/tumed: .*\bruns/tuned\b"),
        ("runs/tund", r"'runs/tund' .*\bruns/tuned\b"),
        ("/nowhere/else", r"'/nowhere/else' [^,]*: .*python -m trainer runs\b"),
    ],
)
def test_missing_files_are_refused(runs: Path, typed: str, pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern):
        find_run(typed)
