"""Files and runs with what is no more are read; words with it are refused."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import losses, ok, trainer
from trainer.errors import RecipeError
from trainer.recipe import flatten, load, removed
from trainer.recipe.loading import load_stored
from trainer.recipe.removed import REMOVED
from trainer.recipe.text import as_yaml, typed

STORED = Path(__file__).parent / "stored"


def tree_of(word):
    """What a file holds in which that stands; a key that is no more, with some value that it had."""
    key, equals, text = word.partition("=")
    tree = {"true": True, "false": False}.get(text, text) if equals else 7
    for name in reversed(key.split(".")):
        tree = {name: tree}
    return tree


@pytest.mark.parametrize("word", REMOVED)
def test_each_row_is_read_from_a_file_and_refused_typed(word, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(removed, "_told", set())
    row, tree, file = REMOVED[word], tree_of(word), tmp_path / "old.yaml"
    file.write_text(as_yaml(tree))
    found = flatten(load(file, "seed=3").to_dict())
    told = capsys.readouterr().err
    (key, value), *_ = flatten(tree).items()
    assert told.count("\n") == 1 and f"{key}={typed(value)}" in told and row.sentence in told
    if row.instead:
        assert row.instead in told and f"{row.instead.partition('=')[0]}" in found
        assert found == flatten(load(None, row.instead, "seed=3").to_dict())
    load(file)
    assert capsys.readouterr().err == "", "once in a process"
    load_stored(tree, "a checkpoint")
    assert "a checkpoint: " in capsys.readouterr().err
    for typing in (lambda: load(None, f"{key}={typed(value)}"), lambda: load(tree), lambda: load(None, **tree)):
        with pytest.raises(RecipeError) as refused:
            typing()
        assert row.sentence in str(refused.value)


def test_a_default_that_every_old_file_has_is_left_out_in_silence(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("optimizer: {trust: 0.001, lr: 0.5}\n")
    assert load(tmp_path).optimizer.lr == 0.5 and capsys.readouterr().err == ""


@pytest.fixture
def stored(tmp_path):
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), [("auto_and_ram", "0.0616"), ("lars", "0.4389")])
def test_an_old_run_is_evaluated_and_predicted_with(name, loss, stored):
    assert loss in ok("evaluate", f"checkpoint={name}", "plugin=tiny", cwd=stored).stdout
    assert "dark" in ok("predict", name, "plugin=tiny", "photos/val/dark/0.png", cwd=stored).stdout


@pytest.mark.slow
def test_an_old_run_goes_on(stored):
    ok("recipe=auto_and_ram", "output=auto_and_ram", "resume=auto", "plugin=tiny", cwd=stored)
    expected = [0.483546, 0.215480, 0.073014, 0.025547, 0.016662, 0.008889]  # of the version that began it
    assert losses(stored / "auto_and_ram") == pytest.approx(expected, rel=1e-3)


def test_a_run_of_what_is_no_more_is_not_continued(stored):
    before = sorted(stored.rglob("*"))
    done = trainer("recipe=lars", "output=lars", "resume=auto", "plugin=tiny", cwd=stored)
    assert done.returncode == 2 and "model.init_from=lars" in done.stderr, done.stderr
    assert {path for path in stored.rglob("*") if "checkpoints" in path.parts} <= set(before)
