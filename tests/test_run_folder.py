"""Choosing, claiming and continuing run folders; steps.csv after a resume."""

import csv
import os
from pathlib import Path

import pytest

from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.recipe import load
from trainer.run_folder import RunFolder, StepsFile, write_atomically


def recipe(folder, *words):
    return load("digits", f"output={folder}", *words)


def test_a_fresh_folder_is_named_and_unique(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RunFolder(load("digits"))
    assert first.path.parts[0] == "runs" and first.path.name.startswith("digits-ddp-2")
    first.close()
    (first.path / ".lock").write_text("another job")
    second = RunFolder(load("digits"))
    assert second.path != first.path
    second.close()


def test_two_runs_in_one_folder(tmp_path):
    first = RunFolder(recipe(tmp_path / "run"))
    with pytest.raises(FolderInUseError, match="in use"):
        RunFolder(recipe(tmp_path / "run"))
    first.close()


def test_a_used_folder_is_continued_only_on_request(tmp_path):
    first = RunFolder(recipe(tmp_path / "run"))
    first.write_recipe(recipe(tmp_path / "run"))
    first.close()
    with pytest.raises(FolderInUseError, match="resume=auto"):
        RunFolder(recipe(tmp_path / "run"))
    with pytest.raises(RecipeError, match="batch_size: 96 there, 32 now"):
        RunFolder(recipe(tmp_path / "run", "resume=auto", "batch_size=32"))
    again = RunFolder(recipe(tmp_path / "run", "resume=auto", "mode=single", "data.workers=1", "logging.every_steps=1"))
    assert again.resuming
    again.close()


def test_a_restart_of_the_same_job_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.run_folder.job_id", lambda: "job 1")
    first = RunFolder(recipe(tmp_path / "run"))
    first.write_recipe(recipe(tmp_path / "run"))
    first.close()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    again = RunFolder(recipe(tmp_path / "run"))
    assert again.resuming
    again.close()
    monkeypatch.setattr("trainer.run_folder.job_id", lambda: "job 2")
    with pytest.raises(FolderInUseError):
        RunFolder(recipe(tmp_path / "run"))


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="output="):
        RunFolder(recipe(tmp_path / "file" / "run"))


def test_steps_after_the_checkpoint_are_dropped(tmp_path):
    def row(step):
        return {"step": step, "epoch": 0, "seconds": 1, "train_loss": 0.5, "lr": 0.1, "samples_per_sec": 9}

    first = StepsFile(tmp_path, 0)
    for step in (1, 2, 3):
        first.add(row(step))
    first.close()
    with (tmp_path / "steps.csv").open("a") as file:
        file.write("4,0,1")  # killed in mid-row
    second = StepsFile(tmp_path, 2)
    second.add(row(3))
    second.close()
    with (tmp_path / "steps.csv").open(newline="") as file:
        assert [int(r["step"]) for r in csv.DictReader(file)] == [1, 2, 3]


def test_replacing_leaves_the_old_text_when_it_fails(tmp_path, monkeypatch):
    target: Path = tmp_path / "result.json"
    write_atomically(target, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(target, "new")
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["result.json"]
