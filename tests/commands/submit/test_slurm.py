"""The batch script of `submit slurm`, run by bash with stand-ins for SLURM's programs."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from trainer.commands.submit import command
from trainer.errors import (
    CheckpointError,
    DeviceMemoryError,
    DiskFullError,
    FolderInUseError,
    NotFiniteError,
    RecipeError,
    SetupError,
)

_FINAL = (RecipeError, SetupError, CheckpointError, NotFiniteError, DeviceMemoryError, FolderInUseError, DiskFullError)
HOPELESS = tuple(kind.code for kind in _FINAL)  # exit codes that another try cannot mend
ASKED = ["slurm", "recipe=digits", "nproc=2", "time=01:00:00", "cpus=8"]
STANDS_IN = {"srun": 'printf "%s\\0" "$@" >srun.words; exit ${CODE:-0}', "scontrol": 'echo "$@" >>requeued'}


@pytest.fixture
def script():
    def write(*words: str) -> str:
        return command([*ASKED, *words])

    return write


def run(text: str, folder: Path, **variables: str) -> tuple[int, list[str], bool]:
    """The exit code, what srun was given, and whether the job was queued again."""
    for name, body in STANDS_IN.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    names = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    done = subprocess.run(["bash"], input=text, cwd=folder, env=names, text=True, capture_output=True)
    assert done.stderr == ""
    given = (folder / "srun.words").read_bytes().decode().split("\0")[:-1]
    again = (folder / "requeued").exists()
    (folder / "requeued").unlink(missing_ok=True)
    return done.returncode, given, again


def test_only_what_another_try_can_mend_is_queued_again(script, tmp_path: Path) -> None:
    text = script("requeues=3")
    assert {code: run(text, tmp_path, CODE=str(code))[2] for code in (0, 1, 130, *HOPELESS, 7, 143)} == {
        **dict.fromkeys((0, 1, 130, *HOPELESS), False),
        7: True,
        143: True,
    }
    assert run(text, tmp_path, CODE="5")[0] == 5
    tries = [run(text, tmp_path, CODE="143", SLURM_RESTART_COUNT=str(count)) for count in (1, 2, 3)]
    assert [again for _, _, again in tries] == [True, True, False]
    assert tries[2][0] == 143
    assert "queued again" in (tmp_path / "runs" / "digits" / "slurm-7.log").read_text()


@pytest.mark.parametrize("value", ["/a b/'c\"$HOME`id`\\", "/x;rm -rf #", "/\N{SNOWMAN}*?!\n#SBATCH --nodes=99"])
def test_odd_paths_arrive_as_typed(value: str, script, tmp_path: Path) -> None:
    text = script(f"data.root={value}", f"output=runs{value}")
    _, given, _ = run(text, tmp_path)
    assert f"data.root={value}" in given and f"output=runs{value}" in given
    assert Path(f"{tmp_path}/runs{value}/slurm-7.log").exists()
    read_by_sbatch = itertools.takewhile(lambda line: line.startswith("#"), text.split("\n"))
    assert not any(line.startswith("#SBATCH --nodes=99") for line in read_by_sbatch)


def test_what_slurm_is_asked_for(script) -> None:
    lines = script("nodes=3", "memory=64GiB", "partition=gpu", "account=me", "grace=100").splitlines()
    for option in (
        "nodes=3", "ntasks-per-node=1", "gpus-per-node=2", "cpus-per-task=8", "mem=64G", "time=01:00:00",
        "partition=gpu", "account=me", "requeue", "open-mode=append", "signal=USR1@130",
    ):  # fmt: skip
        assert f"#SBATCH --{option}" in lines
    assert not any("gpus" in line for line in script("devices=[cpu]").splitlines())
