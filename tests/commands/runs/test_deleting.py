"""Runs are removed once the user agrees, all or none, and nothing that no run wrote."""

import os
import re
import sys

import pytest

from tests.commands.runs.folders import make
from trainer.commands import runs
from trainer.errors import FolderInUseError, RecipeError
from trainer.saving import locks


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


class Terminal:
    """Somebody who answers."""

    def __init__(self, answer):
        self.answer = answer

    def isatty(self):
        return True

    def readline(self):
        return self.answer

    def fileno(self):
        raise OSError


def test_names_paths_and_several(home, tmp_path):
    for name in ("a", "b", "deep/c", "keep"):
        make(home / name)
    text = runs.command(["delete", "a", "runs/b/", str(home / "deep" / "c"), "a", "yes=true"])
    deleted = [line.split(" (")[0] for line in text.splitlines()]
    assert deleted == ["deleted runs/a", "deleted runs/b", f"deleted {home}/deep/c"]
    assert sorted(os.listdir(home)) == ["deep", "keep"] and os.listdir(home / "deep") == []


def test_all_that_runs_write_is_removed(home):
    folder = make(home / "a")
    for name in ("journal.jsonl", "skipped.csv", "worst.csv", ".worst.csv.0123", "slurm-7.log", "stacks-rank0.txt"):
        (folder / name).touch()
    assert runs.command(["delete", "a", "yes=true"]).startswith("deleted runs/a (") and not (home / "a").exists()


@pytest.mark.parametrize(
    ("answer", "gone"), [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False), ("", False)]
)
def test_it_asks(home, monkeypatch, capsys, answer, gone):
    make(home / "a")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    text = runs.command(["delete", "a"])
    assert (home / "a").exists() != gone and text.startswith("deleted runs/a" if gone else "nothing was deleted")
    out = capsys.readouterr().out
    assert "runs/a: completed, top1 95.00%, " in out and "delete this run? y/N" in out


def test_nobody_to_ask(home, monkeypatch):
    make(home / "a")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RecipeError, match="yes=true"):
        runs.command(["delete", "a"])
    assert runs.command(["delete", "a", "yes=false"]) == "nothing was deleted\n"
    with pytest.raises(RecipeError, match=r"yes=ja .*true"):
        runs.command(["delete", "a", "yes=ja"])
    assert (home / "a" / "last.safetensors").exists()


def test_a_running_one_is_refused_and_nothing_is_deleted(home):
    make(home / "a")
    make(home / "b")
    held = locks.hold(home / "b", "run")
    with pytest.raises(FolderInUseError, match="runs/b is running"):
        runs.command(["delete", "a", "b", "yes=true"])
    os.close(held)
    assert (home / "a").exists() and (home / "b" / "result.json").exists()


def test_what_no_run_wrote_stays(home):
    """Also where the run folder was one's own before: of what people give such names too, only the run's are taken."""
    make(home / "a")
    (home / "a" / "photos").mkdir()
    (home / "a" / "photos" / "best.safetensors").write_text("mine too")
    for name in ("notes.md", "resnet.safetensors", "model.safetensors", "contact_sheet.png", "split.csv"):
        (home / "a" / name).write_text("x")
    (home / "a" / ".export-abc").mkdir()  # of an export that was killed
    text = runs.command(["delete", "a", "yes=true"])
    assert re.fullmatch(r"deleted .*runs/a.*: notes\.md, photos, resnet\.safetensors\n", text)
    assert sorted(os.listdir(home / "a")) == ["notes.md", "photos", "resnet.safetensors"]
    assert os.listdir(home / "a" / "photos") == ["best.safetensors"]


def test_links_lead_nowhere(home, tmp_path):
    make(home / "a")
    disk = tmp_path / "disk"
    (home / "a" / "checkpoints").rename(disk)
    (home / "a" / "checkpoints").symlink_to(disk)
    (home / "latest").symlink_to("a")
    with pytest.raises(RecipeError, match=r"runs/latest .*\blink\b.*/runs/a\b"):
        runs.command(["delete", "latest", "yes=true"])
    runs.command(["delete", "a", "yes=true"])
    assert not (home / "a").exists() and os.listdir(disk) == ["step-00000028"]


@pytest.mark.parametrize("name", [".", "..", "runs", "photos", "table", "file.txt", "/"])
def test_what_is_no_run_stays(home, tmp_path, name):
    (home / "photos").mkdir(parents=True)
    (home / "photos" / "recipe.yaml").write_text("mode: ddp")
    (home / "table").mkdir()
    (home / "table" / "compare.json").write_text("{}")
    (home / "file.txt").write_text("x")
    with pytest.raises(RecipeError):
        runs.command(["delete", name, "yes=true"])
    assert (home / "photos" / "recipe.yaml").exists() and (home / "table" / "compare.json").exists()


def test_the_folder_one_is_in(home, monkeypatch):
    make(home / "a")
    monkeypatch.chdir(home / "a")
    with pytest.raises(RecipeError, match=r"runs/a .*\bcd \.\."):
        runs.command(["delete", ".", "yes=true"])
    assert (home / "a" / "result.json").exists()
