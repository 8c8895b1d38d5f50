"""`recipes diff` and `recipes new`, through the real command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command_line import QUIET, ok, trainer
from trainer.recipe import load
from trainer.recipe.key_reference import MODELINE, schema_file


def test_diff_shows_the_keys_that_differ(tmp_path: Path) -> None:
    assert ok("recipes", "diff", "digits", "digits_hogwild").stdout == (
        "              digits  digits_hogwild\nmode          ddp     hogwild\noptimizer.lr  0.1     0.05\n"
    )
    (tmp_path / "mine.yaml").write_text("extends: digits\ndevices: [cpu, cpu]\n")
    told = ok("recipes", "diff", "recipe=digits", "mine.yaml", cwd=tmp_path).stdout.splitlines()
    assert [line.split(maxsplit=2) for line in told] == [["digits", "mine.yaml"], ["devices", "auto", "[cpu, cpu]"]]
    assert "the same" in ok("recipes", "diff", "digits", "digits").stdout


def test_a_new_file_is_short_and_works_at_once(tmp_path: Path) -> None:
    words = ["optimizer.lr=0.05", "mode=single", "model.name=mlp", "max_steps=1"]
    told = ok("recipes", "new", "my.yaml", "extends=digits", *words, cwd=tmp_path).stdout
    assert told.endswith(": python -m trainer recipe=my.yaml\n")
    lines = (tmp_path / "my.yaml").read_text().splitlines()
    assert lines[0].startswith("# my: digits ") and lines[0].endswith(" ".join(words))
    assert lines[1] == f"{MODELINE}{schema_file()}" and len(lines) < 25
    assert any(line.startswith("  lr: 0.05 ") and line.endswith("; digits has 0.1") for line in lines)
    assert load(tmp_path / "my.yaml").to_dict() == load("digits", *words).to_dict()
    ok("recipe=my.yaml", "output=run", *QUIET, cwd=tmp_path)


def test_it_tells_the_program_that_was_typed(tmp_path: Path) -> None:
    words, started = ("recipes", "new", "my.yaml", "extends=digits"), {"TRAINER_COMMAND": "../launch.sh"}
    told = ok(*words, cwd=tmp_path, env=started).stdout
    assert told.endswith(": ../launch.sh recipe=my.yaml\n")
    text = (tmp_path / "my.yaml").read_text()
    assert "\n#   ../launch.sh recipe=my.yaml  " in text and "\n#   ../launch.sh recipes my.yaml  " in text
    assert "python -m trainer" not in text


def test_keys_may_have_dashes_and_a_file_blanks(tmp_path: Path) -> None:
    told = ok(
        "recipes", "new", "my file.yaml", "--extends", "digits", "--epochs=3", "seed", "=", "4", cwd=tmp_path
    ).stdout
    assert told.endswith(": python -m trainer 'recipe=my file.yaml'\n")
    text = (tmp_path / "my file.yaml").read_text()
    assert "\n#   python -m trainer 'recipe=my file.yaml'  " in text
    assert load(tmp_path / "my file.yaml").to_dict() == load("digits", "epochs=3", "seed=4").to_dict()


def test_what_is_commented_out_works_when_it_is_taken_in(tmp_path: Path) -> None:
    for name, words in {"bare.yaml": [], "some.yaml": ["augment.hflip=0.5", "data.workers=0"]}.items():
        ok("recipes", "new", name, "extends=resnet50", *words, cwd=tmp_path)
        lines = (tmp_path / name).read_text().splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("extends: resnet50"))
        taken = [line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line for line in lines[first:]]
        assert taken != lines[first:]
        (tmp_path / "taken.yaml").write_text("\n".join(taken) + "\n")
        found = load(tmp_path / "taken.yaml")
        assert found.to_dict() == load(tmp_path / name).to_dict() == load("resnet50", *words).to_dict()


def test_a_word_of_several_lines_stays_a_value(tmp_path: Path) -> None:
    word = "data.root=a # b\n\n c"
    ok("recipes", "new", "my.yaml", "extends=digits", word, *["seed=1"], cwd=tmp_path)
    assert load(tmp_path / "my.yaml").to_dict() == load("digits", word, "seed=1").to_dict()
    assert load(tmp_path / "my.yaml").data.root == "a # b\n\n c"
    (tmp_path / "printed.yaml").write_text(ok("recipes", "my.yaml", cwd=tmp_path).stdout)
    assert load(tmp_path / "printed.yaml").to_dict() == load(tmp_path / "my.yaml").to_dict()


def test_a_new_file_finds_its_parent_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("extends: digits\nseed: 7\n")
    ok("recipes", "new", "sub/my.yml", "extends=base.yaml", "epochs=2", cwd=tmp_path)
    assert "\nextends: ../base.yaml\n" in (tmp_path / "sub" / "my.yml").read_text()
    assert load(tmp_path / "sub" / "my.yml").seed == 7
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(load("digits", "seed=9").to_yaml())
    ok("recipes", "new", "extends=run", "of_run.yaml", cwd=tmp_path)
    assert "\nextends: run\n" in (tmp_path / "of_run.yaml").read_text() and load(tmp_path / "of_run.yaml").seed == 9


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["new"], "recipes new needs a file to write: type recipes new my.yaml extends=digits"),
        (["new", "extends=digits"], "recipes new needs a file to write: type recipes new my.yaml extends=digits"),
        (
            ["new", "x.yaml"],
            "x.yaml needs one recipe to start from: type recipes new x.yaml extends=digits",
        ),
        (["new", "x.yaml", "extends=digits", "recipe=mnist"], "recipes new x.yaml needs one recipe to start from"),
        (["new", "x", "extends=digits"], "a recipe is a .yaml file: type recipes new x.yaml extends=digits"),
        (["new", "old.yaml", "extends=digits"], "old.yaml exists already and was not changed: choose another name"),
        (["new", "x.yaml", "extends=digts"], "recipe=digts: no such recipe or file; did you mean recipe=digits?"),
        (["new", "x.yaml", "extends=digits", "lr=1"], "digits: lr is not a key; did you mean optimizer.lr?"),
        (["new", "x.yaml", "extends=digits", "epochs=0"], "digits: epochs=0 must be 1 or more"),
        (["new", "x.yaml", "extends=digits", "=3"], "'=3' is not key=value"),
        (["new", "x.yaml", "digits"], "recipes new x.yaml: 'digits' is not key=value, as in extends=digits"),
        (["new", "x.yaml", "extends=digits", "epochs"], "recipes new x.yaml: 'epochs' is not key=value, as in"),
        (["new", "~nobody-here/x.yaml", "extends=digits"], "a path begins with ~ but there is no user of that name"),
        (["schema", "digits"], "recipes schema takes no words, as digits: type recipes schema > recipe.schema.json"),
        (
            ["digits", "nproc=2"],
            "nproc is not a key of a recipe; type it where you train: python -m trainer recipe=",
        ),
        (["diff", "digits"], "recipes diff compares two recipes, not 1: type recipes diff digits mnist"),
        (["diff", "digits", "mnist", "epochs=3"], "recipes diff compares two recipes, not 3"),
        (["diff", "digits", "mnits"], "recipe=mnits: no such recipe or file; did you mean recipe=mnist?"),
        (["difff", "digits", "mnist"], "recipes difff: no such recipe; did you mean recipes diff?"),
        (["key"], "recipes key: no such recipe; did you mean recipes keys?"),
        (["keys", "optimizer", "lr"], "recipes keys takes one section or key, not 2: type recipes keys optimizer"),
        (["digts"], "recipe=digts: no such recipe or file; did you mean recipe=digits?"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(words: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("seed: 1\n")
    told = trainer("recipes", *words, cwd=tmp_path)
    assert (told.returncode, told.stdout) == (2, "")
    assert expected in told.stderr and told.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
    assert (tmp_path / "old.yaml").read_text() == "seed: 1\n"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    told = trainer("recipes", "new", "absent/my.yaml", "extends=digits", cwd=tmp_path)
    assert told.returncode == 3
    assert re.fullmatch(r"trainer: error: absent/my\.yaml .*No such file or directory\n", told.stderr)
