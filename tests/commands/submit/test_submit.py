"""The command `submit slurm`: its arguments and its batch script.

Arguments are checked like those of training, except that they are for another machine. The script
is run by bash with stand-ins for SLURM's programs.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command_line import environment
from tests.pages import GUIDE
from trainer import errors, load_recipe
from trainer.commands.submit import command, parse_time
from trainer.processes.interrupts import SAVE_SECONDS

SLURM = ["slurm", "recipe=digits", "nproc=2", "time=01:00:00", "cpus=8"]
_FINAL = (errors.RecipeError, errors.SetupError, errors.CheckpointError, errors.NotFiniteError)
_FINAL += (errors.DeviceMemoryError, errors.FolderInUseError, errors.DiskFullError)
HOPELESS = tuple(kind.code for kind in _FINAL)  # exit codes that another try cannot mend


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slrum"], "submit slurm"),
        (["kubernetes", "recipe=digits"], "guide nodes"),
        (["slurm"], "recipe="),
        (["slurm"], "cpus="),
        (["slurm", "time=1:00:00"], "nproc="),
        (["slurm", "recipe=digits"], "nproc="),
        (["slurm", "recipe=digits"], "time="),
        (["slurm", "recipe=digits", "nproc=2", "time=1:00:00"], "cpus="),
        ([*SLURM, "nodes=0"], "nodes=0"),
        ([*SLURM, "nodes=two"], "nodes=two"),
        ([*SLURM, "time=1h"], "time=24:00:00"),
        ([*SLURM, "time=90"], "time=24:00:00"),
        ([*SLURM, "time=00:02:00"], "grace="),
        ([*SLURM, "cpus=1.5"], "cpus"),
        ([*SLURM, "memory=64"], "memory=64GiB"),
        ([*SLURM, "array=seed:[1,2]"], "array"),
        ([*SLURM, "partition=a;b"], "partition=a;b"),
        ([*SLURM, "resume=never"], "resume=never"),
        ([*SLURM, "output=~/x"], "~"),
        ([*SLURM, "epoch=3"], "epochs"),
        ([*SLURM, "accumulate=2", "batch_size=97"], "97"),
        ([*SLURM, "model.name=resnet5"], "resnet50"),
        ([*SLURM, "mode=single"], "mode=single"),
        ([*SLURM, "nodes=2", "mode=hogwild"], "2 nodes"),
        ([*SLURM, "devices=[cuda:0]"], "1 device"),
        (["slurm", "recipe=digits", "mode=split", "time=1:00:00", "cpus=8"], "devices="),
    ],
)
def test_an_error_is_one_line(words: list[str], said: str) -> None:
    last = {word.partition("=")[0]: word for word in words}  # Each key has one value.
    with pytest.raises(errors.RecipeError) as error:
        command([*last.values()])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_no_gpu_and_no_torch_are_needed() -> None:
    words = ["slurm", "recipe=resnet50", "nproc=8", "nodes=2", "time=1:00:00", "cpus=8"]
    code = f"import sys; from trainer.commands.submit import command; print(command({words}))"
    code += "; assert 'torch' not in sys.modules"
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert "--gpus-per-node=8" in completed.stdout


def test_time() -> None:
    assert [parse_time(text) for text in ("1:00:00", "2-12:00:00", "00:00:30")] == [
        3600,
        216000,
        30,
    ]


def test_the_guides_manifest_knows_the_exit_codes_and_the_time_to_save() -> None:
    page = (GUIDE / "nodes.md").read_text().partition("```text\napiVersion")[2]
    service, job = yaml.safe_load_all("apiVersion" + page.partition("```")[0])
    spec = job["spec"]
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [*HOPELESS]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= load_recipe("resnet50").grace + SAVE_SECONDS
    assert (
        service["spec"]["selector"]["batch.kubernetes.io/job-name"]
        == job["metadata"]["name"]
        == pod["subdomain"]
    )
    start = pod["containers"][0]["command"][:4]
    words = pod["containers"][0]["command"][4:]
    assert start[:3] == ["python", "-m", "trainer"]
    assert load_recipe("resnet50", *words[1:-2])


# --- the batch script
# --------------------------------------------------------------------------------------------------

STANDS_IN = {
    "srun": 'printf "%s\\0" "$@" >srun.words; exit ${CODE:-0}',
    "scontrol": 'echo "$@" >>requeued',
}


def script(*words: str) -> str:
    return command([*SLURM, *words])


def run(
    text: str,
    folder: Path,
    **variables: str,
) -> tuple[int, list[str], bool]:
    """The exit code, what srun was given, and whether the job was queued again."""
    for name, body in STANDS_IN.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    names = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    completed = subprocess.run(
        ["bash"], input=text, cwd=folder, env=names, text=True, capture_output=True
    )
    assert completed.stderr == ""
    arguments = (folder / "srun.words").read_bytes().decode().split("\0")[:-1]
    again = (folder / "requeued").exists()
    (folder / "requeued").unlink(missing_ok=True)
    return completed.returncode, arguments, again


def test_only_what_another_try_can_mend_is_queued_again(tmp_path: Path) -> None:
    text = script("requeues=3")
    codes = (0, 1, 130, *HOPELESS, 7, 143)
    assert [code for code in codes if run(text, tmp_path, CODE=str(code))[2]] == [7, 143]
    assert run(text, tmp_path, CODE="5")[0] == 5
    tries = [
        run(
            text,
            tmp_path,
            CODE="143",
            SLURM_RESTART_COUNT=str(count),
        )
        for count in (1, 2, 3)
    ]
    assert [again for _, _, again in tries] == [True, True, False]
    assert tries[2][0] == 143
    assert "queued again" in (tmp_path / "runs" / "digits" / "slurm-7.log").read_text()


@pytest.mark.parametrize(
    "value", ["/a b/'c\"$HOME`id`\\", "/x;rm -rf #", "/\N{SNOWMAN}*?!\n#SBATCH --nodes=99"]
)
def test_odd_paths_arrive_as_typed(value: str, tmp_path: Path) -> None:
    text = script(f"data.root={value}", f"output=runs{value}")
    _, arguments, _ = run(text, tmp_path)
    assert f"data.root={value}" in arguments and f"output=runs{value}" in arguments
    assert Path(f"{tmp_path}/runs{value}/slurm-7.log").exists()
    read_by_sbatch = itertools.takewhile(lambda line: line.startswith("#"), text.split("\n"))
    assert not any(line.startswith("#SBATCH --nodes=99") for line in read_by_sbatch)


def test_the_script_requests_the_resources_of_the_recipe() -> None:
    lines = script(
        "nodes=3", "memory=64GiB", "partition=gpu", "account=me", "grace=100"
    ).splitlines()
    for option in (
        "nodes=3",
        "ntasks-per-node=1",
        "gpus-per-node=2",
        "cpus-per-task=8",
        "mem=64G",
        "time=01:00:00",
        "partition=gpu",
        "account=me",
        "requeue",
        "open-mode=append",
        "signal=USR1@130",
    ):
        assert f"#SBATCH --{option}" in lines
    assert not any("gpus" in line for line in script("devices=[cpu]").splitlines())
