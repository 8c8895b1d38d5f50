"""The mode that CONTRIBUTING shows: added to a copy of the project as it is described there."""

from __future__ import annotations

import ast
import re
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.command_line import PROJECT, QUIET, environment, losses, ok, result
from trainer.modes import STRATEGIES
from trainer.modes.base import Strategy
from trainer.recipe import MODES
from trainer.saving.journal import JOURNAL, read_journal

PAGE = (PROJECT / ".github" / "CONTRIBUTING.md").read_text()
MODULE, ROW, RECIPE = re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL)[:3]
RUN = ["model.name=cnn_gn", "batch_size=64", "augment.crop=none", "ema=0.9"]
RUN += ["schedule.warmup_epochs=0", "optimizer.lr=0.001", "max_steps=12", "epochs=1", *QUIET]


def insert(file, *changes):
    """Insert texts into a file: pairs of the line's text after which, and what is inserted."""
    text = file.read_text()
    for anchor, inserted in changes:
        assert text.count(anchor) == 1, anchor
        text = text.replace(anchor, anchor + inserted)
    file.write_text(text)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the new mode: the four files that CONTRIBUTING names."""
    copy = tmp_path_factory.mktemp("project")
    for folder in ("trainer", "recipes"):
        without_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / folder, copy / folder, ignore=without_caches)
    package = copy / "trainer"
    (package / "modes" / "twins.py").write_text(MODULE)
    insert(
        package / "modes" / "__init__.py",
        ("from trainer.modes.split import Split\n", "from trainer.modes.twins import Twins\n"),
        ("STRATEGIES: dict[str, type[Strategy]] = {\n", '    "twins": Twins,\n'),
    )
    insert(
        package / "recipe" / "mode_table.py",
        ("Mode = Literal[", '"twins", '),
        ("TRAITS = {\n", ROW),
    )
    (copy / "recipes" / "digits_twins.yaml").write_text(RECIPE)
    return copy


def train(project, *words, fault=""):
    """Run the copy's command line on the new mode."""
    return subprocess.run(
        [sys.executable, "-m", "trainer", *RUN, "recipe=digits_twins", *words],
        cwd=project,
        env=environment(PYTHONPATH=str(project), TRAINER_FAULT=fault),
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_the_example_is_short_and_overrides_what_the_contract_lists():
    assert len(MODULE.splitlines()) <= 40
    listed = set(re.findall(r"^    - (.*?):", Strategy.__doc__, re.MULTILINE))
    names = set(re.findall(r"`(\w+)`", " ".join(listed)))
    assert len(names) == 8 and all(callable(getattr(Strategy, name)) for name in names)
    (mode,) = [node for node in ast.parse(MODULE).body if isinstance(node, ast.ClassDef)]
    methods = {node.name for node in mode.body if isinstance(node, ast.FunctionDef)}
    assert methods <= names


def test_every_mode_of_the_table_has_a_class():
    assert {*STRATEGIES} == {*MODES}


@pytest.mark.slow
def test_the_example_trains_as_single_and_is_resumed_to_the_bit(project, tmp_path):
    ok(*RUN, "recipe=digits_single", f"output={tmp_path / 'single'}")
    whole = train(project, f"output={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    assert result(tmp_path / "whole")["mode"] == "twins"
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    for key in ("val_loss", "val_top1"):
        expected = result(tmp_path / "single")[key]
        assert result(tmp_path / "whole")[key] == pytest.approx(expected, rel=1e-5)
    words = [f"output={tmp_path / 'killed'}", "save.every_steps=5", "resume=auto"]
    killed = train(project, *words, fault="kill@0:8")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = train(project, *words)
    assert resumed.returncode == 0, resumed.stderr
    attempts, _ = read_journal(tmp_path / "killed" / JOURNAL)
    assert attempts[-1].resumed == 5
    assert result(tmp_path / "killed")["steps"] == 12
    expected, resumed_weights = (
        load_file(tmp_path / name / "last.safetensors") for name in ("whole", "killed")
    )
    assert expected.keys() == resumed_weights.keys()
    assert all(expected[name].equal(resumed_weights[name]) for name in expected)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
