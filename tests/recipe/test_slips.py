"""Slips in recipe files: each is answered with its own line, and with what to write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import trainer
from trainer.errors import RecipeError
from trainer.recipe import load, shipped_recipes
from trainer.recipe.recipe_pages import commented, write_new
from trainer.recipe.slips import first_slip

TABLE = [
    ("a: 1", "extends: digits\nepochs:3\nbatch_size: 64\n", "line 2: put a blank after the colon: epochs: 3"),
    ("the last line", "extends: digits\nepochs:3\n", "line 2: put a blank after the colon: epochs: 3"),
    ("the only line", "epochs:3\n", "line 1: put a blank after the colon: epochs: 3"),
    ("a comment", "epochs:3   # few\nseed: 1\n", "line 1: put a blank after the colon: epochs: 3"),
    ("in a section", "optimizer:\n  lr:0.1\n  momentum: 0.9\n", "line 2: put a blank after the colon: lr: 0.1"),
    ("alone in a section", "optimizer:\n  lr:0.1\n", "line 2: put a blank after the colon: lr: 0.1"),
    ("Windows", "seed: 1\r\nepochs:3\r\nbatch_size: 64\r\n", "line 2: put a blank after the colon: epochs: 3"),
    ("a mark", "\ufeffepochs:3\nseed: 1\n", "line 1: put a blank after the colon: epochs: 3"),
    ("a tab", "optimizer:\n\tlr: 0.1\n", "line 2: a tab is no indent in YAML: write two blanks before lr: 0.1"),
    ("key = value", "seed: 1\nepochs = 3\n", "line 2: a file has a colon where a command has =: write epochs: 3"),
    ("key=value", "epochs=3\nbatch_size=64\n", "line 1: a file has a colon where a command has =: write epochs: 3"),
    ("= in a section", "optimizer:\n  lr = 0.1\n", "line 2: a file has a colon where a command has =: write lr: 0.1"),
    ("= with a dot", "optimizer.lr = 0.1\nseed: 1\n", "line 1: a file has a colon where a command has =: write "
     "optimizer: {lr: 0.1}"),
    ("words", "recipe=digits epochs=3\n", "line 1: one key a line, with a colon: write extends: digits"),
    ("a command", "python -m trainer recipe=digits\n", "line 1: this is a command: a file has a line for each key"),
    ("a pattern", "model:\n  freeze: [conv1, layer[12]]\n", "line 2: put what has brackets in it in quotes: freeze: "
     "[conv1, 'layer[12]']"),
    ("an open list", "devices: [cpu, cpu\nepochs: 3\n", "line 1: devices: [cpu, cpu is not closed: put ] behind it"),
    ("a star", "data:\n  root: *.tar\n", "line 2: put it in quotes: root: '*.tar'"),
    ("braces", "data:\n  root: {a,b}.tar\n", "line 2: put it in quotes: root: '{a,b}.tar'"),
    ("a colon in a text", "output: runs: first\n", "line 1: put a text with a colon in quotes: output: 'runs: first'"),
    ("an open quote", "output: 'first\nepochs: 3\n", "line 1: the quote is not closed: write output: 'first'"),
    ("a list of keys", "- seed: 1\n- epochs: 3\n", "line 1: keys have no dash: write seed: 1"),
    ("a list in a section", "optimizer:\n  - lr: 0.1\n", "line 2: keys have no dash: write lr: 0.1"),
    ("twice", "epochs: 3\nseed: 1\nepochs: 4\n", "line 3: epochs stands in line 1 already: keep one of them"),
    ("a section twice", "model:\n  name: cnn\nmodel:\n  freeze: 1\n", "line 3: model stands in line 1 already: put the "
     "keys of both below one"),
    ("no indent", "optimizer:\nlr: 0.1\n", "line 2: lr belongs to optimizer: put two blanks before it"),
    ("indented", "seed: 1\n  epochs: 3\n", "line 2: epochs belongs to no section: begin it at the left edge"),
    ("the first line", " seed: 1\nepochs: 3\n", "line 1: seed belongs to no section: begin it at the left edge"),
    ("too far", "optimizer:\n  lr: 0.1\n   momentum: 0.9\n", "line 3: keys of a section begin in one column: put 2 "
     "blanks before momentum, as in line 2"),
    ("not far enough", "optimizer:\n   lr: 0.1\n  momentum: 0.9\n", "line 3: keys of a section begin in one column: "
     "put 3 blanks before momentum, as in line 2"),
    ("a comma", "seed: 1\nepochs: 3,\n", "line 2: a line ends without a comma: write epochs: 3"),
    ("a comma after extends", "extends: digits,\nepochs: 3\n", "line 1: a line ends without a comma: write extends: "
     "digits"),
    ("curly quotes", "extends: \u201cdigits\u201d\n", "line 1: quotes are straight or left out: write extends: digits"),
    ("another blank", "seed: 1\nepochs:\u00a03\n", "line 2: a sign that only looks like a blank stands in it (U+00A0): "
     "type the line anew: epochs: 3"),
    ("a wide colon", "epochs\uff1a 3\nseed: 1\n", "line 1: its : is another sign that looks like it: write epochs: 3"),
    ("no value", "extends: digits\nepochs\n", "line 2: a colon and a value are missing: write epochs: VALUE"),
    ("no colon", "optimizer\n  lr: 0.1\n", "line 1: put a colon behind it: optimizer:"),
    ("a section's value", "optimizer: adamw\n", "line 1: optimizer is a section: write optimizer: {name: adamw}"),
    ("a recipe's name", "digits\n", "line 1: write extends: digits"),
    ("//", "seed: 1\n// few\nepochs: 3\n", "line 2: a comment begins with #: write # few"),
    ("two in one", "epochs: 3 seed: 4\n", "line 1: one key a line: write seed: 4 in a line of its own"),
    ("two documents", "seed: 1\n---\nepochs: 3\n", "line 2: --- begins another document: leave it out"),
    ("Latin-1", b"seed: 1\n# f\xfcnf\nepochs: 3\n", "line 2: not UTF-8: save the file as UTF-8 text in your editor"),
    ("no sign", "seed: 1\nepochs: 3\x01\n", "line 2: it holds a character that cannot be seen: take it out"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_line_and_what_to_write(tmp_path: Path, content: str | bytes, expected: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError) as told:
        load(file)
    assert str(told.value).startswith(f"{file}: {expected}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("seed: 1\nepochs: '3'\n", "epochs=3 must be an integer; leave the quotes out (in FILE, line 2)"),
        ("compile: 'no'\n", "compile=no must be true or false (in FILE, line 1)"),
        ("seed: 1\nmax_steps: 1e4\n", "max_steps=10000.0 must be an integer, or null; write 10000 (in FILE, line 2)"),
        ("optimizer:\n  lr: 0,1\n", "optimizer.lr=0,1 must be a number; write 0.1 (in FILE, line 2)"),
        ("seed: 1\n\nbatchsize: 3\n", "batchsize is not a key; did you mean batch_size? (in FILE, line 3)"),
        ("model:\n  nam: cnn\n", "model.nam is not a key; did you mean model.name? (in FILE, line 2)"),
    ],
)
def test_a_wrong_key_or_value_is_told_with_its_line(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError) as told:
        load(file)
    assert str(told.value) == f"my: {expected.replace('FILE', str(file))}"


def test_also_in_a_file_that_another_extends(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("extends: parent.yaml\nepochs: 3\n")
    (tmp_path / "parent.yaml").write_text("seed: 1\nbatch_size:64\nmode: single\n")
    with pytest.raises(RecipeError, match=r"parent\.yaml: line 2: put a blank after the colon: batch_size: 64$"):
        load(tmp_path / "my.yaml")


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
    with pytest.raises(RecipeError, match=r"^my: epochs=x must be an integer$"):
        load(file, "epochs=x")


@pytest.mark.parametrize("content", ["output: runs\n  epochs=3\n", 'output: "runs\n  first"\n'])
def test_a_file_that_is_right_is_not_blamed_for_a_word(tmp_path: Path, content: str) -> None:
    (tmp_path / "my.yaml").write_text(content)
    with pytest.raises(RecipeError, match=r"^my: epochs=x must be an integer$"):
        load(tmp_path / "my.yaml", "epochs=x")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("optimizer: &o\n  lr: abc\n", "my: optimizer.lr=abc must be a number (in FILE, line 2)"),
        ("data:\n  root: >-\n    mean: 3\nbatchsize: 3\n", "my: batchsize is not a key; did you mean batch_size? "
         "(in FILE, line 4)"),
        ("data:\n  root: *photos\n", "FILE: line 2: put it in quotes: root: '*photos'"),
        ("data:\n  root: !photos\n", "FILE: line 2: put it in quotes: root: '!photos'"),
        ("data:\n  root: >\n    a: b\n  mean:3\n", "FILE: line 4: put a blank after the colon: mean: 3"),
    ],
)  # fmt: skip
def test_names_types_and_texts_of_yaml_are_no_slips(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError) as told:
        load(file)
    assert str(told.value) == expected.replace("FILE", str(file))


@pytest.mark.parametrize("name", shipped_recipes())
def test_nothing_is_found_in_what_we_write(name: str, tmp_path: Path) -> None:
    write_new(str(tmp_path / "new.yaml"), [f"extends={name}", "epochs=3", "model.freeze=[a,'b[12]']"])
    texts = [shipped_recipes()[name].read_text(), load(name).to_yaml(), commented(name)]
    for text in [*texts, (tmp_path / "new.yaml").read_text()]:
        assert first_slip(text, shipped_recipes()) is None
