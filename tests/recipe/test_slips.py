"""Slips in recipe files: each is answered with its own line, and with what to write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import trainer
from trainer.errors import RecipeError
from trainer.recipe import load, shipped_recipes
from trainer.recipe.recipes_command import commented, write_new
from trainer.recipe.slips import first_slip

# Files with a slip, each with the number of its line, and with what that line is to be instead.
MENDED = {
    "a: 1": ("extends: digits\nepochs:3\nbatch_size: 64\n", 2, "epochs: 3"),
    "the last line": ("extends: digits\nepochs:3\n", 2, "epochs: 3"),
    "the only line": ("epochs:3\n", 1, "epochs: 3"),
    "a comment": ("epochs:3   # few\nseed: 1\n", 1, "epochs: 3"),
    "in a section": ("optimizer:\n  lr:0.1\n  momentum: 0.9\n", 2, "lr: 0.1"),
    "alone in a section": ("optimizer:\n  lr:0.1\n", 2, "lr: 0.1"),
    "Windows": ("seed: 1\r\nepochs:3\r\nbatch_size: 64\r\n", 2, "epochs: 3"),
    "a mark": ("\ufeffepochs:3\nseed: 1\n", 1, "epochs: 3"),
    "a tab": ("optimizer:\n\tlr: 0.1\n", 2, "lr: 0.1"),
    "key = value": ("seed: 1\nepochs = 3\n", 2, "epochs: 3"),
    "key=value": ("epochs=3\n", 1, "epochs: 3"),
    "= in a section": ("optimizer:\n  lr = 0.1\n", 2, "lr: 0.1"),
    "= with a dot": ("optimizer.lr = 0.1\nseed: 1\n", 1, "optimizer: {lr: 0.1}"),
    "words": ("recipe=digits epochs=3\n", 1, "extends: digits"),
    "a pattern": ("model:\n  freeze: [conv1, layer[12]]\n", 2, "freeze: [conv1, 'layer[12]']"),
    "a star": ("data:\n  root: *.tar\n", 2, "root: '*.tar'"),
    "an alias": ("data:\n  root: *photos\n", 2, "root: '*photos'"),
    "a type": ("data:\n  root: !photos\n", 2, "root: '!photos'"),
    "braces": ("data:\n  root: {a,b}.tar\n", 2, "root: '{a,b}.tar'"),
    "a colon in a text": ("output: runs: first\n", 1, "output: 'runs: first'"),
    "an open quote": ("output: 'first\nepochs: 3\n", 1, "output: 'first'"),
    "a list of keys": ("- seed: 1\n", 1, "seed: 1"),
    "a list in a section": ("optimizer:\n  - lr: 0.1\n", 2, "lr: 0.1"),
    "a comma": ("seed: 1\nepochs: 3,\n", 2, "epochs: 3"),
    "a comma after extends": ("extends: digits,\nepochs: 3\n", 1, "extends: digits"),
    "curly quotes": ("extends: \u201cdigits\u201d\n", 1, "extends: digits"),
    "another blank": ("seed: 1\nepochs:\u00a03\n", 2, "epochs: 3"),
    "a wide colon": ("epochs\uff1a 3\nseed: 1\n", 1, "epochs: 3"),
    "no colon": ("optimizer\n  lr: 0.1\n", 1, "optimizer:"),
    "a section's value": ("optimizer: adamw\n", 1, "optimizer: {name: adamw}"),
    "a recipe's name": ("digits\n", 1, "extends: digits"),
    "//": ("seed: 1\n// few\nepochs: 3\n", 2, "# few"),
    "after a text": ("data:\n  root: >\n    a: b\n  workers:3\n", 4, "workers: 3"),
}
# Others, with what the answer has to name.
NAMED = {
    "two lines with =": ("epochs=3\nbatch_size=64\n", 1, "epochs: 3"),
    "a command": ("python -m trainer recipe=digits\n", 1, "command"),
    "an open list": ("devices: [cpu, cpu\nepochs: 3\n", 1, "devices ]"),
    "two keys with a dash": ("- seed: 1\n- epochs: 3\n", 1, "dash seed"),
    "twice": ("epochs: 3\nseed: 1\nepochs: 4\n", 3, "epochs 1"),
    "a section twice": ("model:\n  name: cnn\nmodel:\n  freeze: 1\n", 3, "model 1"),
    "no indent": ("optimizer:\nlr: 0.1\n", 2, "lr optimizer two spaces"),
    "indented": ("seed: 1\n  epochs: 3\n", 2, "epochs left"),
    "the first line": (" seed: 1\nepochs: 3\n", 1, "seed left"),
    "too far": ("optimizer:\n  lr: 0.1\n   momentum: 0.9\n", 3, "momentum 2 spaces"),
    "not far enough": ("optimizer:\n   lr: 0.1\n  momentum: 0.9\n", 3, "momentum 3 spaces"),
    "no value": ("extends: digits\nepochs\n", 2, "epochs: value"),
    "two in one": ("epochs: 3 seed: 4\n", 1, "seed: 4"),
    "two documents": ("seed: 1\n---\nepochs: 3\n", 2, "---"),
    "Latin-1": (b"seed: 1\n# f\xfcnf\nepochs: 3\n", 2, "UTF-8"),
    "no sign": ("seed: 1\nepochs: 3\x01\n", 2, "character"),
}


def answer(file: Path, *words: str) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(RecipeError) as refused:
        load(file, *words)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("slip", MENDED)
def test_the_line_is_told_and_what_to_write_there_mends_it(slip: str, tmp_path: Path) -> None:
    content, number, instead = MENDED[slip]
    file = tmp_path / "my.yaml"
    file.write_bytes(content.encode())
    told = answer(file)
    assert told.startswith(f"{file}: line {number}: ") and told.endswith(instead), told
    lines = content.splitlines()
    lines[number - 1] = "  " * lines[number - 1].startswith((" ", "\t")) + instead
    file.write_text("\n".join(lines))
    load(file)


@pytest.mark.parametrize("slip", NAMED)
def test_the_line_is_told_and_what_is_wrong_with_it(slip: str, tmp_path: Path) -> None:
    content, number, names = NAMED[slip]
    file = tmp_path / "my.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    told = answer(file)
    assert told.startswith(f"{file}: line {number}: "), told
    assert not [name for name in names.split() if name.lower() not in told.lower()], told


@pytest.mark.parametrize(
    ("content", "number", "names"),
    [
        ("seed: 1\nepochs: '3'\n", 2, "epochs=3 integer quotes"),
        ("compile: 'no'\n", 1, "compile=no true false"),
        ("seed: 1\nmax_steps: 1e4\n", 2, "max_steps=10000.0 integer null 10000"),
        ("optimizer:\n  lr: 0,1\n", 2, "optimizer.lr=0,1 number 0.1"),
        ("seed: 1\n\nbatchsize: 3\n", 3, "batchsize batch_size?"),
        ("model:\n  nam: cnn\n", 2, "model.nam model.name?"),
        ("optimizer: &o\n  lr: abc\n", 2, "optimizer.lr=abc number"),
        ("data:\n  root: >-\n    mean: 3\nbatchsize: 3\n", 4, "batchsize batch_size?"),
    ],
)
def test_a_wrong_key_or_value_is_told_with_its_line(content: str, number: int, names: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(content)
    told = answer(file)
    assert told.startswith("my: ") and told.endswith(f"(in {file}, line {number})")
    assert not [name for name in names.split() if name not in told], told


def test_also_in_a_file_that_another_extends(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("extends: parent.yaml\nepochs: 3\n")
    (tmp_path / "parent.yaml").write_text("seed: 1\nbatch_size:64\nmode: single\n")
    told = answer(tmp_path / "my.yaml")
    assert told.startswith(f"{tmp_path / 'parent.yaml'}: line 2: ") and told.endswith("batch_size: 64")


@pytest.mark.parametrize(
    "text",
    [
        "root:$y$j9T$HIDDEN:19000:0:99999:7:::\ndaemon:*:19000:0\n",
        "epochs=HIDDEN\n",
        "seed: HIDDEN: 4\n",
        "password HIDDEN\nurl ${address}\n",
        "*HIDDEN: 1\n",
        "a: [HIDDEN\n",
    ],
)
def test_no_line_of_a_file_that_is_not_called_a_recipe_is_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text(text)
    (tmp_path / "my.yaml").write_text("extends: shadow\n")
    for recipe in ("my.yaml", "shadow"):
        done = trainer("plan", f"recipe={recipe}", cwd=tmp_path)
        assert done.returncode == 2 and "shadow: " in done.stderr and "HIDDEN" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "content",
    [
        "extends: digits\r\nepochs: 3\r\noptimizer:\r\n  lr: 1e-4\r\n",
        "\ufeffextends: digits\ncompile: off\ndeterministic: yes\nepochs:\t3\n",
        '{\n "extends": "digits",\n "epochs": 3,\n}\n',
        "model: {name: cnn,\n  freeze: [conv1]}\nseed: 1\n",
        "model:\n  freeze:\n  - conv1\n  - 'layer[12]'\n",
        "# epochs:3\nseed: 1   # epochs=3\n",
        "optimizer: &o\n  lr: 0.1\n",
        "optimizer: &o {lr: 0.1}\n",
        "epochs: &few 3\nseed: *few\n",
        "epochs: !!int 3\noptimizer: !!map\n  lr: !!float 1\n",
        "data:\n  root: &r !!str 2024\noutput: *r\n",
        "data:\n  root: >-\n    mean: 3\n\n    epochs:3\nseed: 1\n",
        "data:\n  root: |  # a text\n    epochs = 3\n     'lr: 0.1\n  name: imagefolder\n",
        "model:\n  freeze:\n  - >-\n    seed:1\n  - layer1\n",
    ],
)
def test_what_is_right_stays_right(tmp_path: Path, content: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(content.encode())
    load(file)
    assert first_slip(file.read_text(encoding="utf-8"), shipped_recipes()) is None
    assert answer(file, "epochs=x").startswith("my: epochs=x must")  # and no line of the file is blamed


@pytest.mark.parametrize("content", ["output: runs\n  epochs=3\n", 'output: "runs\n  first"\n'])
def test_a_file_that_is_right_is_not_blamed_for_a_word(tmp_path: Path, content: str) -> None:
    (tmp_path / "my.yaml").write_text(content)
    assert answer(tmp_path / "my.yaml", "epochs=x").startswith("my: epochs=x must")


@pytest.mark.parametrize("name", shipped_recipes())
def test_nothing_is_found_in_what_we_write(name: str, tmp_path: Path) -> None:
    write_new(str(tmp_path / "new.yaml"), [f"extends={name}", "epochs=3", "model.freeze=[a,'b[12]']"])
    texts = [shipped_recipes()[name].read_text(), load(name).to_yaml(), commented(name)]
    for text in [*texts, (tmp_path / "new.yaml").read_text()]:
        assert first_slip(text, shipped_recipes()) is None
