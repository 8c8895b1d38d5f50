"""The key `extends`: a file with the differences from another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import refusal
from tests.command_line import QUIET, ok, suggested, trainer
from trainer.errors import RecipeError
from trainer.recipe.loading import load, origins


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_file_has_what_it_extends_and_its_differences(tmp_path: Path) -> None:
    write(tmp_path, mine="extends: digits\nepochs: 3\noptimizer: {lr: 0.5}\n")
    assert (
        load(tmp_path / "mine.yaml").to_dict()
        == load("digits", "epochs=3", "optimizer.lr=0.5").to_dict()
    )
    assert load(tmp_path / "mine.yaml", "epochs=4").epochs == 4
    assert (
        load({"extends": "digits", "epochs": 3}).to_dict() == load("digits", "epochs=3").to_dict()
    )


def test_a_chain_of_files_is_found_from_each_files_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    write(
        tmp_path / "base",
        first="extends: mnist\nepochs: 3\nseed: 1\n",
        second="extends: first.yaml\nseed: 2\n",
    )
    write(tmp_path, mine="extends: base/second.yaml\nbatch_size: 64\n")
    monkeypatch.chdir(tmp_path / "base")
    loaded = load("../mine.yaml")
    assert (
        loaded.data.name,
        loaded.epochs,
        loaded.seed,
        loaded.batch_size,
    ) == ("mnist", 3, 2, 64)
    assert loaded.name == "mine"


def test_the_origin_of_a_key_is_known(tmp_path: Path) -> None:
    write(tmp_path, base="extends: digits\nseed: 1\n", mine="extends: base.yaml\nepochs: 3\n")
    actual = origins(tmp_path / "mine.yaml", "batch_size=64")
    assert actual["seed"] == str(tmp_path / "base.yaml")
    assert (actual["optimizer.lr"], actual["epochs"], actual["batch_size"]) == (
        "digits",
        "mine",
        "your words",
    )
    assert "compile" not in actual


def test_a_list_takes_the_place_of_the_parents(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="optimizer: {betas: [0.5, 0.6]}\n",
        mine="extends: base.yaml\noptimizer: {betas: [0.7, 0.8]}",
    )
    assert load(tmp_path / "mine.yaml").optimizer.betas == [0.7, 0.8]


# Cases, each with the text that the message contains, and with the file that it names if that is
# not the typed one.
WRONG = {
    "extends: digts\n": ("extends digts {folder} digits?", ""),
    "extends: other\n": ("extends other", ""),
    "extends: mine.yaml\n": ("extends mine.yaml", ""),
    "extends: ring.yaml\n": ("extends mine.yaml ring.yaml", ""),
    "extends: [digits, mnist]\n": ("extends [digits,mnist]", ""),
    "extends:\n": ("extends null", ""),
    "extends: {name: digits}\n": ("extends", ""),
    "extends: 2024\n": ("extends 2024", ""),
    "extends: ''\n": ("extends", ""),
    'extends: "a\\0b"\n': ("extends {folder}", ""),
    "extends: empty.yaml\n": ("empty.yaml", ""),
    "extends: picture.yaml\n": ("picture.yaml", ""),
    "extends: wrong.yaml\n": ("optimizer.lrr optimizer.lr?", "wrong.yaml"),
    "extends: range.yaml\n": ("mine augment.hflip=2", "range.yaml"),
    "extends: scale.yaml\n": ("augment.crop_scale[1]=2", "scale.yaml"),
    "extends: section.yaml\n": ("mine optimizr optimizer?", "section.yaml"),
    "extends: ~nobody-here/x.yaml\n": ("extends ~nobody-here/x.yaml", ""),
    "extends: digits\noptimizer:\n": ("mine optimizer=null optimizer.name=", ""),
    "extends: digits\noptimizer.lr: 1\n": ("optimizer.lr {{lr: 1}}", ""),
    "extends: digits\nnproc: 2\n": ("mine nproc python -m trainer", ""),
    "extends: digits\nbatch_size: 97\naccumulate: 2\n": ("mine batch_size=97 accumulate=2", ""),
    "extend: digits\n": ("mine extend extends?", ""),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_invalid_extends_is_one_line(tmp_path: Path, text: str) -> None:
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
    line = refusal(load, tmp_path / "mine.yaml", most=600)
    names, blamed = WRONG[text]
    assert not [name for name in names.format(folder=tmp_path).split() if name not in line], line
    if blamed:
        assert f"(in {tmp_path}/{blamed})" in line
    else:
        assert "(in " not in line.replace(f"(in {tmp_path}/mine.yaml, line ", "")
    for setting in suggested(line):
        load("digits", setting)


def test_a_word_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    write(tmp_path, mine="extends: digits\n")
    with pytest.raises(RecipeError, match=r"^mine: optimizer.lr=fast [^(]*$"):
        load(tmp_path / "mine.yaml", "optimizer.lr=fast")
    with pytest.raises(RecipeError, match=r"^mine: optimizer=null [^(]*$"):
        load(tmp_path / "mine.yaml", "optimizer=null")
    with pytest.raises(RecipeError, match=r"^extends=mnist .* recipe=mnist$"):
        load("digits", "extends=mnist")
    with pytest.raises(RecipeError, match=r"recipe=mnist$"):
        load("digits", extends="mnist")


@pytest.mark.slow
def test_a_runs_recipe_is_complete_without_the_files_it_came_from(tmp_path: Path) -> None:
    base = "extends: digits_single\nmodel: {name: mlp}\n"
    own = "extends: base.yaml\nmax_steps: 1\n"
    write(tmp_path, base=base, mine=own)
    ok("recipe=mine.yaml", "output=run", *QUIET, cwd=tmp_path)
    for name in ("base", "mine"):
        (tmp_path / f"{name}.yaml").unlink()
    saved = load(tmp_path / "run")
    assert "extends" not in (tmp_path / "run" / "recipe.yaml").read_text()
    assert (
        saved.mode,
        saved.model.name,
        saved.max_steps,
        saved.epochs,
    ) == ("single", "mlp", 1, 30)
    write(tmp_path, again="extends: run\nseed: 5\n")  # a run folder can be extended as well
    assert load(tmp_path / "again.yaml").to_dict() == saved.replace(seed=5).to_dict()
    completed = trainer("recipe=mine.yaml", cwd=tmp_path)
    assert completed.returncode == 2 and "recipe=mine.yaml" in completed.stderr
    write(tmp_path, base=f"{base}seed: 5\n", mine=own)
    completed = trainer("recipe=mine.yaml", "output=run", "resume=auto", *QUIET, cwd=tmp_path)
    assert completed.returncode == 2
    assert "seed: 0 there, 5 now" in completed.stderr
    assert "recipe=run " in completed.stderr
    assert "done" in ok("recipe=run", "output=run", "resume=auto", *QUIET, cwd=tmp_path).stdout
