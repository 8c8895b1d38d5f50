"""Files and runs with removed keys are read, and arguments with them are refused."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from tests.command_line import losses, ok, trainer
from trainer.errors import RecipeError
from trainer.recipe import load, removed
from trainer.recipe.loading import load_stored
from trainer.recipe.removed import REMOVED
from trainer.recipe.text import format_yaml, format_yaml_document
from trainer.saving.run_folder import RunFolder
from trainer.training.trained import read_recipe

STORED = Path(__file__).parent / "stored"


def with_word(word, tree):
    """Return a file that contains the argument. A removed key gets some value that it had."""
    key, equals, text = word.partition("=")
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = yaml.safe_load(text) if equals else 7
    return tree, f"{key}={format_yaml(node[last])}"


@pytest.mark.parametrize("word", REMOVED)
def test_each_row_is_read_from_every_kind_of_file_and_refused_typed(
    word, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(removed, "_reported", set())
    row = REMOVED[word]
    run = tmp_path / "run"
    weights = tmp_path / "weights.safetensors"
    tree, message = with_word(word, {})
    whole, _ = with_word(word, load(None).to_dict())
    (tmp_path / "old.yaml").write_text(format_yaml_document(tree))
    run.mkdir()
    (run / "recipe.yaml").write_text(format_yaml_document(whole))
    expected = load(None, *[row.instead] * bool(row.instead)).to_dict()
    for place, read in {
        "old.yaml": lambda: load(tmp_path / "old.yaml"),
        str(run / "recipe.yaml"): lambda: load(run),
        str(weights): lambda: read_recipe(weights, {"recipe": json.dumps(whole)}),
        "a comparison": lambda: load_stored(tree, "a comparison"),
    }.items():
        assert read().to_dict() == expected
        output = capsys.readouterr().err
        assert output.count("\n") == 1
        assert message in output
        assert row.instead in output
        assert row.sentence in output
        assert place in output
        read()
        assert capsys.readouterr().err == "", "once in a process"
    for typing in (lambda: load(None, message), lambda: load(tree), lambda: load(None, **tree)):
        with pytest.raises(RecipeError) as refused:
            typing()
        assert row.sentence in str(refused.value)
    again = load(run, f"output={run}", "resume=auto")
    if row.same:
        with closing(RunFolder(again)) as folder:
            assert folder.resuming
    else:
        with pytest.raises(RecipeError, match=f"with {word}, .*model.init_from={run}"):
            RunFolder(again)


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
    # The version that started it.
    expected = [
        0.483546,
        0.215480,
        0.073014,
        0.025547,
        0.016662,
        0.008889,
    ]
    assert losses(stored / "auto_and_ram") == pytest.approx(expected, rel=1e-3)


def test_a_run_with_a_removed_feature_is_not_continued(stored):
    before = sorted(stored.rglob("*"))
    completed = trainer("recipe=lars", "output=lars", "resume=auto", "plugin=tiny", cwd=stored)
    assert completed.returncode == 2 and "model.init_from=lars" in completed.stderr, (
        completed.stderr
    )
    assert {path for path in stored.rglob("*") if "checkpoints" in path.parts} <= set(before)


def test_the_replacement_of_lars_is_offered():
    for argument in ("optimizer.name=lars", "optimizer.trust=0.01"):
        with pytest.raises(RecipeError) as refused:
            load("digits", argument)
        assert "optimizer.name=timm:lars" in str(refused.value)
