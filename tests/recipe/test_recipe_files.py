"""Wrong recipe files are answered with the line, and right ones are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import refusal
from tests.command_line import trainer
from trainer.recipe import load


@pytest.mark.parametrize(
    ("content", "number", "names"),
    [
        ("extends: digits\nepochs:3\nbatch_size: 64\n", 2, "key: value"),
        ("extends: digits\nepochs = 3\n", 2, "key: value"),
        ("optimizer:\n\tlr: 0.1\n", 2, "character"),
        ("output: 'first\nepochs: 3\n", 1, "quoted"),
        ("devices: [cpu, cpu\nepochs: 3\n", 1, "']'"),
        ("output: runs: first\n", 1, "quotes"),
        ("epochs: 3\nseed: 1\nepochs: 4\n", 3, "duplicate epochs keep"),
        (b"seed: 1\n# f\xfcnf\nepochs: 3\n", 2, "UTF-8"),
        ("epochs: 3\n seed: 1\n", 2, "mapping"),
    ],
)
def test_a_file_that_is_no_yaml_is_reported_with_its_line(
    content: str | bytes, number: int, names: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(load, file)
    assert message.startswith(f"{file}: line {number}: ") and all(
        name in message for name in names.split()
    ), message


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
        completed = trainer("plan", f"recipe={recipe}", cwd=tmp_path)
        assert (
            completed.returncode == 2
            and "shadow: " in completed.stderr
            and "HIDDEN" not in completed.stderr
        ), completed.stderr


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
def test_valid_files_stay_valid(tmp_path: Path, content: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(content.encode())
    load(file)
    # And no line of the file is blamed.
    assert refusal(load, file, "epochs=x").startswith("my: epochs=x must")
