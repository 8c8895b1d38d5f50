"""Completion with the Tab key: the printed scripts in a real bash and, if installed, a real zsh."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.command_line import PROJECT, ok
from trainer.cli.command_table import COMMANDS
from trainer.cli.completion import SHELLS, build_script
from trainer.recipe import checks, shipped_recipes


@pytest.fixture(scope="module")
def sourced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "completion.bash"
    path.write_text(ok("completion", "bash").stdout)
    return path


def completed(script: Path, line: str) -> set[str]:
    """Return the suggestions of bash for a line with the cursor at its end."""
    commands = f'source {script}; COMP_LINE="$1" COMP_POINT=${{#1}}; _trainer; '
    commands += 'printf "%s\\n" "${COMPREPLY[@]}"'
    bash = ["bash", "--norc", "-euc", commands, "bash", line]
    process = subprocess.run(bash, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
    return {*process.stdout.split()}


def test_commands_and_keys(sourced: Path) -> None:
    assert {*COMMANDS, "recipe=", "nproc=", "optimizer.lr=", "batch_size="} <= completed(
        sourced, "trainer "
    )
    assert {*shipped_recipes()} <= completed(sourced, "trainer recipe=")


def test_an_installed_package_has_the_code_of_the_shells() -> None:
    shipped = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["trainer"]
    assert {"cli/*.sh", *(f"cli/*.{shell}" for shell in SHELLS)} <= {*shipped}


def test_the_script_contains_the_command_that_printed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ": python -m trainer completion bash\n" in build_script("bash")
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    assert ": ./launch.sh completion zsh\n" in build_script("zsh")


@pytest.mark.parametrize("newer", [False, True])
def test_only_schedules_that_this_torch_runs_are_offered(
    newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "torch_has", lambda what: newer)
    text = build_script("bash")
    assert all((f"pipeline.schedule={name}" in text) == newer for name in checks.SPLIT_BACKWARD)
    assert "pipeline.schedule=interleaved1f1b" in text and "pipeline.schedule=null" in text


TABLE: list[tuple[str, set[str]]] = [
    ("trainer eval", {"evaluate", "evaluate.every_steps="}),
    (
        "trainer recipe=digits optimizer.l",
        {"optimizer.lr=", "optimizer.lr_per=", "optimizer.layer_decay="},
    ),
    ("trainer mode=loc", {"local_sgd"}),
    ("trainer recipe=digits precision=", {"fp32", "tf32", "bf16", "fp16"}),
    ("trainer compile=", {"true", "false"}),
    ("trainer epochs=", set()),
    ("trainer recipe=mni", {name for name in shipped_recipes() if name.startswith("mni")}),
    ("trainer recipes dig", {name for name in shipped_recipes() if name.startswith("dig")}),
    ("trainer recipes ke", {"keys"}),
    ("trainer recipes digits epo", {"epochs="}),
    ("trainer submit slurm ti", {"time=", "timeout="}),
    ("trainer compare rep", {"repeats="}),
    ("trainer guide mod", {"modes"}),
    ("trainer completion ", {"bash", "zsh"}),
    ("trainer help ev", {"evaluate"}),
    ("trainer doctor ", set()),
    ("trainer runs --", {"--help"}),
    ("trainer recipe=digits eva", {"evaluate.every_steps="}),
    ("trainer evaluate recip", set()),
    ("trainer recipe=digits model.name=resnet20", {"resnet20"}),
    ("./launch.sh recipe=digits resume=au", {"auto"}),
    ("python -m trainer data.ro", {"data.root="}),
]


@pytest.mark.parametrize(("line", "expected"), TABLE)
def test_completion_lists_all_valid_continuations(
    sourced: Path, line: str, expected: set[str]
) -> None:
    assert completed(sourced, line) == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_finds_what_bash_finds(tmp_path: Path) -> None:
    (tmp_path / "completion.zsh").write_text(build_script("zsh"))
    (tmp_path / "lines").write_text("\n".join(line for line, _ in TABLE) + "\n")
    commands = r"""
compdef() { }
source $1
compset() { PREFIX=${PREFIX#*=}; }
compadd() { [[ $1 = -S ]] && shift 2; shift; print -rn -- "$* "; }
_files() { }
while IFS= read -r line; do
    words=(${=line})
    if [[ $line = *\  ]]; then words+=(""); fi
    CURRENT=$#words
    PREFIX=$words[-1]
    _trainer
    print
done < $2
"""
    zsh = ["zsh", "-fc", commands, "zsh", str(tmp_path / "completion.zsh"), str(tmp_path / "lines")]
    process = subprocess.run(zsh, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
    actual = dict(zip([line for line, _ in TABLE], process.stdout.split("\n"), strict=False))
    assert {line: {*words.split()} for line, words in actual.items()} == dict(TABLE)


def test_zsh_lists_the_same() -> None:
    text = build_script("zsh")
    assert "compdef _trainer trainer" in text
    assert " mode=hogwild " in text
    assert " optimizer.lr= " in text
