"""The Tab key: the printed scripts, in a real bash and, where there is one, a real zsh."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.command_line import PROJECT, ok
from trainer.cli.completion import SHELLS, script
from trainer.cli.known_keys import COMMANDS
from trainer.commands.export import SUFFIXES
from trainer.recipe import checks, shipped_recipes


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


def test_an_installed_package_has_the_code_of_the_shells() -> None:
    shipped = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["trainer"]
    assert {"cli/*.sh", *(f"cli/*.{shell}" for shell in SHELLS)} <= {*shipped}


def test_the_script_tells_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "made by: python -m trainer completion bash\n" in script("bash")
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    assert "made by: ./launch.sh completion zsh\n" in script("zsh")


def test_values(sourced: Path) -> None:
    assert {*completed(sourced, "trainer export runs/x format=")} == {*SUFFIXES}
    assert completed(sourced, "trainer mode=loc") == ["local_sgd"]
    assert {*completed(sourced, "trainer recipe=digits precision=")} == {"fp32", "tf32", "bf16", "fp16"}
    schedules = {"interleaved1f1b", "interleavedzerobubble"} - {*checks.refused_schedules()}
    assert {*completed(sourced, "trainer pipeline.schedule=inter")} == schedules
    assert {*completed(sourced, "trainer compile=")} == {"true", "false"}
    assert completed(sourced, "trainer epochs=") == []
    assert {*shipped_recipes()} <= {*completed(sourced, "trainer recipe=")}


@pytest.mark.parametrize("newer", [False, True])
def test_only_schedules_that_this_torch_runs_are_offered(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "torch_has", lambda what: newer)
    text = script("bash")
    assert all((f"pipeline.schedule={name}" in text) == newer for name in checks.SPLIT_BACKWARD)
    assert "pipeline.schedule=interleaved1f1b" in text and "pipeline.schedule=null" in text


def test_files(sourced: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "photos").mkdir()
    assert completed(sourced, "trainer recipe=min", cwd=tmp_path) == ["mine.yaml"]
    assert completed(sourced, "trainer data.root=pho", cwd=tmp_path) == ["photos/"]
    assert completed(sourced, "trainer recipes new m", cwd=tmp_path) == ["mine.yaml"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in that has two runs, beside what is none."""
    folder = tmp_path_factory.mktemp("trained")
    for run in ("first", "second"):
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "recipe.yaml").touch()
        (folder / "runs" / run / "best.safetensors").touch()
    (folder / "runs" / "no_run").mkdir()
    (folder / "photos").mkdir()
    (folder / "my.yaml").touch()
    (folder / "notes.txt").touch()
    (folder / "cache" / "pets-1a2b").mkdir(parents=True)
    (folder / "cache" / "pets-1a2b" / "about.json").touch()
    return folder


RUNS = {"runs/first", "runs/second"}
TABLE: list[tuple[str, set[str]]] = [
    ("trainer runs ", {"show", "delete"}),
    ("trainer runs de", {"delete"}),
    ("trainer runs show ", RUNS),
    ("trainer runs show fi", {"first"}),
    ("trainer runs show runs/fi", {"runs/first"}),
    ("trainer runs show first ", set()),
    ("trainer runs delete ", RUNS | {"yes="}),
    ("trainer runs delete yes=", {"true", "false"}),
    ("./launch.sh export ", RUNS | {"format=", "output=", "plugin="}),
    ("./launch.sh export runs/first/be", {"runs/first/best.safetensors"}),
    ("./launch.sh export first f", {"format="}),
    ("trainer evaluate checkpoint=", RUNS),
    ("trainer predict checkpoint=runs/s", {"runs/second"}),
    ("trainer predict checkpoint=runs/second/b", {"runs/second/best.safetensors"}),
    ("trainer predict checkpoint=no", {"notes.txt"}),
    ("trainer recipe=finetune model.init_from=", RUNS),
    ("trainer recipe=", RUNS | {"my.yaml", *shipped_recipes()}),
    ("trainer recipe=ru", RUNS),
    ("trainer recipe=pho", {"photos/"}),
    ("trainer plan recipe=my", {"my.yaml"}),
    ("trainer recipes ", {"diff", "new", "keys", "schema", *shipped_recipes()}),
    ("trainer recipes diff digits runs/f", {"runs/first"}),
    ("trainer recipes diff digits mnist ", set()),
    ("trainer recipes new my.yaml ext", {"extends="}),
    ("trainer recipes new my.yaml extends=", RUNS | {"my.yaml", *shipped_recipes()}),
    ("trainer recipes new my.yaml extends=dig", {name for name in shipped_recipes() if name.startswith("dig")}),
    ("trainer recipes new my.yaml extends=digits epo", {"epochs="}),
    ("trainer recipes keys schedule.na", {"schedule.name"}),
    ("trainer recipes digits epo", {"epochs="}),
    ("trainer cache ", {"build", "verify", "delete", "data.cache_dir="}),
    ("trainer cache build rec", {"recipe="}),
    ("trainer cache delete p", {"pets-1a2b"}),
    ("trainer submit slu", {"slurm"}),
    ("trainer submit slurm ti", {"time=", "timeout="}),
    ("trainer submit slurm recipe=digits --g", {"--go"}),
    ("trainer guide mod", {"modes"}),
    ("trainer completion ", {"bash", "zsh"}),
    ("trainer help ev", {"evaluate"}),
    ("trainer runs --", {"--help", "--json"}),
    ("trainer doctor ", set()),
    ("trainer prove ", {"minutes=", "devices=", "output="}),
    ("trainer recipe=digits eva", set()),
    ("trainer evaluate rec", set()),
    ("trainer recipe=digits model.name=resnet20", {"resnet20"}),
    ("trainer recipe=digits resume=au", {"auto"}),
    ("./launch.sh tens", {"tensorboard"}),
    ("python -m trainer runs del", {"delete"}),
    ("torchrun --nproc_per_node=2 -m trainer evaluate checkpoint=runs/f", {"runs/first"}),
]


@pytest.mark.parametrize(("line", "expected"), TABLE)
def test_what_can_stand_there(
    sourced: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: set[str]
) -> None:
    monkeypatch.setenv("TRAINER_DATA", str(trained))
    function = "_trainer_after_m" if " -m " in line else "_trainer"
    assert {*completed(sourced, line, function, cwd=trained)} == expected


def test_a_folder_without_runs_and_names_with_blanks(sourced: Path, tmp_path: Path) -> None:
    assert completed(sourced, "trainer runs show ", cwd=tmp_path) == []
    assert {*completed(sourced, "trainer recipe=", cwd=tmp_path)} == {*shipped_recipes()}
    (tmp_path / "runs" / "my run").mkdir(parents=True)
    (tmp_path / "runs" / "my run" / "recipe.yaml").touch()
    assert completed(sourced, "trainer runs delete r", cwd=tmp_path) == ["runs/"]  # readline quotes what comes then


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_finds_what_bash_finds(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "completion.zsh").write_text(script("zsh"))
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
    done = subprocess.run(
        ["zsh", "-fc", commands, "zsh", str(tmp_path / "completion.zsh"), str(tmp_path / "lines")],
        cwd=trained, env={**os.environ, "TRAINER_DATA": str(trained)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(zip([line for line, _ in TABLE], done.stdout.split("\n"), strict=False))
    assert {line: {*words.split()} for line, words in found.items()} == dict(TABLE)


def test_a_word_with_blanks_that_looks_like_the_program_ends(sourced: Path) -> None:
    """zsh hands over a quoted word as one, with its blanks."""
    commands = 'source "$1"; _trainer_found "" python "echo -m trainer recipe=digits"'
    subprocess.run(["bash", "--norc", "-c", commands, "bash", sourced], check=True, capture_output=True, timeout=20)


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
    assert "compdef _trainer trainer" in text and " mode=hogwild " in text and " optimizer.lr= " in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True, timeout=60)
