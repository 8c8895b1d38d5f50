"""`extends`: a file that says only what differs from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import QUIET, ok, trainer
from trainer.errors import RecipeError
from trainer.recipe import load, origins


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_file_has_what_it_extends_and_its_differences(tmp_path: Path) -> None:
    write(tmp_path, mine="extends: digits\nepochs: 3\noptimizer: {lr: 0.5}\n")
    assert load(tmp_path / "mine.yaml").to_dict() == load("digits", "epochs=3", "optimizer.lr=0.5").to_dict()
    assert load(tmp_path / "mine.yaml", "epochs=4").epochs == 4
    assert load({"extends": "digits", "epochs": 3}).to_dict() == load("digits", "epochs=3").to_dict()


def test_a_chain_of_files_is_found_from_each_files_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", first="extends: mnist\nepochs: 3\nseed: 1\n", second="extends: first.yaml\nseed: 2\n")
    write(tmp_path, mine="extends: base/second.yaml\nbatch_size: 64\n")
    monkeypatch.chdir(tmp_path / "base")
    found = load("../mine.yaml")
    assert (found.data.name, found.epochs, found.seed, found.batch_size) == ("mnist", 3, 2, 64)
    assert found.name == "mine"


def test_what_says_a_key_can_be_told(tmp_path: Path) -> None:
    write(tmp_path, base="extends: digits\nseed: 1\n", mine="extends: base.yaml\nepochs: 3\n")
    found = origins(tmp_path / "mine.yaml", "batch_size=64")
    assert found["seed"] == str(tmp_path / "base.yaml")
    assert (found["optimizer.lr"], found["epochs"], found["batch_size"]) == ("digits", "mine", "your words")
    assert "compile" not in found


def test_a_list_takes_the_place_of_the_parents(tmp_path: Path) -> None:
    write(tmp_path, base="optimizer: {betas: [0.5, 0.6]}\n", mine="extends: base.yaml\noptimizer: {betas: [0.7, 0.8]}")
    assert load(tmp_path / "mine.yaml").optimizer.betas == [0.7, 0.8]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "extends: digts\n",
            "extends: digts is neither a recipe nor a file in {folder}; did you mean extends: ",
        ),
        ("extends: other\n", "did you mean extends: other.yaml? "),
        ("extends: mine.yaml\n", "mine.yaml: extends goes round in a circle: mine.yaml -> mine.yaml"),
        ("extends: ring.yaml\n", "extends goes round in a circle: mine.yaml -> ring.yaml -> mine.yaml"),
        ("extends: [digits, mnist]\n", "extends: [digits,mnist] must be one recipe's name or file, as in digits"),
        ("extends:\n", "extends: null must be one recipe's name or file"),
        ("extends: {name: digits}\n", "must be one recipe's name or file"),
        ("extends: 2024\n", "extends: 2024 must be one recipe's name or file"),
        ("extends: ''\n", "must be one recipe's name or file"),
        ('extends: "a\\0b"\n', "is neither a recipe nor a file in"),
        (f"extends: {'x' * 5000}\n", "cannot be read"),
        ("extends: empty.yaml\n", "empty.yaml: the file is empty"),
        ("extends: picture.yaml\n", "picture.yaml: a binary file, not a YAML recipe"),
        (
            "extends: wrong.yaml\n",
            "optimizer.lrr is not a key; did you mean optimizer.lr? (in {folder}/wrong.yaml, line 2)",
        ),
        ("extends: range.yaml\n", "mine: augment.hflip=2 must be 1 or less (in {folder}/range.yaml, line 1)"),
        ("extends: scale.yaml\n", "augment.crop_scale[1]=2 must be 1 or less (in {folder}/scale.yaml, line 1)"),
        (
            "extends: section.yaml\n",
            "mine: optimizr is not a key; did you mean optimizer? (in {folder}/section.yaml, line 1)",
        ),
        ("extends: recipes/digits.yaml\n", "nor a file in {folder}; did you mean extends: digits? "),
        ("extends: ~nobody-here/x.yaml\n", "extends: ~nobody-here/x.yaml cannot be read"),
        ("extends: digits\noptimizer:\n", "mine: optimizer=null must be a section, as in optimizer.name=...; leave an"),
        ("extends: digits\noptimizer.lr: 1\n", "optimizer.lr is not a key; write optimizer: {{lr: 1}}"),
        (
            "extends: digits\nnproc: 2\n",
            "mine: nproc is not a key of a recipe; type it where you train: python -m trainer",
        ),
        ("recipe: digits\n", "mine: recipe is not a key; did you mean extends?"),
        ("extends: digits\nepochs: 0\n", "mine: epochs=0 must be 1 or more"),
        ("extends: digits\nbatch_size: 97\naccumulate: 2\n", "mine: batch_size=97 does not divide"),
        ("optimizer: {extends: digits}\n", "mine: optimizer.extends is not a key"),
        ("extend: digits\n", "mine: extend is not a key; did you mean extends?"),
        ("_base_: digits\n", "mine: _base_ is not a key; did you mean extends?"),
        ("defaults: [digits]\n", "mine: defaults is not a key; did you mean extends?"),
    ],
)
def test_what_cannot_be_extended_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    write(
        tmp_path,
        mine=text,
        other="extends: digits\n",
        ring="extends: mine.yaml\n",
        empty="",
        wrong="extends: digits\noptimizer: {lrr: 1}\n",
        range="augment: {hflip: 2}\n",
        scale="augment: {crop_scale: [0.5, 2]}\n",
        section="optimizr: {lr: 1}\n",
    )
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "mine.yaml")
    line = str(caught.value)
    assert expected.format(folder=tmp_path) in line
    assert "\n" not in line and len(line) < 600
    if "(in " not in expected:
        assert "(in " not in line.replace(f"(in {tmp_path}/mine.yaml, line ", "")


def test_a_word_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    write(tmp_path, mine="extends: digits\n")
    with pytest.raises(RecipeError, match=r"^mine: optimizer.lr=fast must be a number$"):
        load(tmp_path / "mine.yaml", "optimizer.lr=fast")
    with pytest.raises(RecipeError, match=r"^mine: optimizer=null must be a section, .* leave an empty one out$"):
        load(tmp_path / "mine.yaml", "optimizer=null")
    with pytest.raises(RecipeError, match=r"^extends=mnist is a line of a YAML file; .* recipe=mnist$"):
        load("digits", "extends=mnist")
    with pytest.raises(RecipeError, match=r"recipe=mnist$"):
        load("digits", extends="mnist")


def test_a_runs_recipe_is_complete_without_the_files_it_came_from(tmp_path: Path) -> None:
    write(tmp_path, base="extends: digits_single\nmodel: {name: mlp}\n", mine="extends: base.yaml\nmax_steps: 1\n")
    ok("recipe=mine.yaml", "output=run", *QUIET, cwd=tmp_path)
    for name in ("base", "mine"):
        (tmp_path / f"{name}.yaml").unlink()
    saved = load(tmp_path / "run")
    assert "extends" not in (tmp_path / "run" / "recipe.yaml").read_text()
    assert (saved.mode, saved.model.name, saved.max_steps, saved.epochs) == ("single", "mlp", 1, 30)
    write(tmp_path, again="extends: run\nseed: 5\n")  # a run folder can be extended as well
    assert load(tmp_path / "again.yaml").to_dict() == saved.replace(seed=5).to_dict()
    told = trainer("recipe=mine.yaml", cwd=tmp_path)
    assert told.returncode == 2 and "no such recipe or file" in told.stderr
    write(
        tmp_path,
        base="extends: digits_single\nmodel: {name: mlp}\nseed: 5\n",
        mine="extends: base.yaml\nmax_steps: 1\n",
    )
    told = trainer("recipe=mine.yaml", "output=run", "resume=auto", *QUIET, cwd=tmp_path)
    assert told.returncode == 2 and "(seed: 0 there, 5 now); put it back, as recipe=run does, or" in told.stderr
    assert "done" in ok("recipe=run", "output=run", "resume=auto", *QUIET, cwd=tmp_path).stdout
