"""A run is found by its path and by its name below runs, and a slip is told the name that may be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import CheckpointError
from trainer.saving.run_names import run_named


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
    assert str(run_named(typed)) == meant
    assert run_named(str(runs / "tuned")) == runs / "tuned"


def test_a_folder_of_the_runs_name_is_not_in_the_way(runs: Path) -> None:
    Path("tuned").mkdir()
    assert str(run_named("tuned")) == "runs/tuned"
    Path("tuned", "last.safetensors").touch()
    assert str(run_named("tuned")) == "tuned"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("tumed", "'tumed' is not there, nor runs/tumed: did you mean runs/tuned?"),
        ("runs/tund", "did you mean runs/tuned?"),
        ("/nowhere/else", "'/nowhere/else' is not there: "),
    ],
)
def test_what_is_not_there(runs: Path, typed: str, told: str) -> None:
    with pytest.raises(CheckpointError) as error:
        run_named(typed)
    assert told in str(error.value)
