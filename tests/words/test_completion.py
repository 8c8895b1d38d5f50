"""The Tab key: the printed script, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import ok
from trainer.exporting import SUFFIXES
from trainer.recipe import shipped_recipes
from trainer.words.commands import COMMANDS
from trainer.words.completion import script


@pytest.fixture(scope="module")
def sourced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "completion.bash"
    path.write_text(ok("completion", "bash").stdout)
    return path


def completed(script: Path, line: str, function: str = "_trainer", cwd: Path | None = None) -> list[str]:
    """What bash is offered for a line with the cursor at its end."""
    commands = f'source {script}; COMP_LINE="$1" COMP_POINT=${{#1}}; {function} "${{1%% *}}"; '
    commands += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-euc", commands, "bash", line], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_keys(sourced: Path) -> None:
    found = completed(sourced, "trainer ")
    assert {*COMMANDS, "recipe=", "nproc=", "optimizer.lr=", "batch_size="} <= {*found}
    assert completed(sourced, "trainer eval") == ["evaluate"]
    found = {"optimizer.lr=", "optimizer.lr_per=", "optimizer.layer_decay="}
    assert {*completed(sourced, "trainer recipe=digits optimizer.l")} == found
    assert {*completed(sourced, "trainer data.ro")} == {"data.root="}
    assert completed(sourced, "trainer guide mod") == ["modes"]


def test_values(sourced: Path) -> None:
    assert {*completed(sourced, "trainer export runs/x format=")} == {*SUFFIXES}
    assert completed(sourced, "trainer mode=loc") == ["local_sgd"]
    assert {*completed(sourced, "trainer recipe=digits precision=")} == {"fp32", "tf32", "bf16", "fp16"}
    assert {*completed(sourced, "trainer pipeline.schedule=inter")} == {"interleaved1f1b", "interleavedzerobubble"}
    assert {*completed(sourced, "trainer compile=")} == {"true", "false"}
    assert completed(sourced, "trainer epochs=") == []
    assert {*shipped_recipes()} <= {*completed(sourced, "trainer recipe=")}


def test_files(sourced: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "photos").mkdir()
    assert completed(sourced, "trainer recipe=min", cwd=tmp_path) == ["mine.yaml"]
    assert completed(sourced, "trainer data.root=pho", cwd=tmp_path) == ["photos"]


@pytest.mark.parametrize("program", ["python", "python3", "torchrun"])
def test_python_and_torchrun_only_after_m_trainer(sourced: Path, program: str) -> None:
    assert completed(sourced, f"{program} -m trainer mode=hog", "_trainer_after_m") == ["hogwild"]
    assert completed(sourced, f"{program} -m pytest mode=hog", "_trainer_after_m") == []


def test_what_completed_python_before_still_does(sourced: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.bash"
    both.write_text(
        f"_mine() {{ COMPREPLY=(theirs); }}\ncomplete -F _mine python\nsource {sourced}\nsource {sourced}\n"
    )
    assert completed(both, "python -m pyt", "_trainer_after_m") == ["theirs"]
    assert completed(both, "python -m trainer mode=hog", "_trainer_after_m") == ["hogwild"]


def test_zsh_lists_the_same() -> None:
    text = script("zsh")
    assert "compdef _trainer trainer" in text and "'mode=hogwild'" in text and " optimizer.lr= " in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True, timeout=60)
