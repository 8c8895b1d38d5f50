"""The words of `submit`: checked as training checks them, for other machines; what is missing is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command_line import environment
from tests.commands.submit.test_slurm import HOPELESS
from trainer import __main__ as cli
from trainer import load_recipe
from trainer.commands.submit import command, seconds
from trainer.errors import RecipeError
from trainer.processes.interrupts import SAVING

SLURM = ["slurm", "recipe=digits", "nproc=2", "time=01:00:00", "cpus=8"]


def refused(*words: str) -> str:
    with pytest.raises(RecipeError) as error:
        command(words)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "submit slurm"),
        (["slrum"], "submit slurm"),
        (["kubernetes", "recipe=digits"], "guide nodes"),
        (["slurm"], "recipe="),
        (["slurm", "recipe=digits"], "nproc="),
        (["slurm", "recipe=digits", "nproc=2"], "time="),
        (["slurm", "recipe=digits", "nproc=2", "time=1:00:00"], "cpus="),
        ([*SLURM, "nodes=0"], "nodes=0"),
        ([*SLURM, "nodes=two"], "nodes=two"),
        ([*SLURM, "time=1h"], "time=24:00:00"),
        ([*SLURM, "time=90"], "time=24:00:00"),
        ([*SLURM, "time=00:02:00"], "grace="),
        ([*SLURM, "cpus=1.5"], "cpus"),
        ([*SLURM, "memory=64"], "memory=64GiB"),
        ([*SLURM, "array=seed:[1,2]"], "output=runs/seed-2"),
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
def test_what_is_wrong_is_one_line(words: list[str], said: str) -> None:
    last = {word.partition("=")[0]: word for word in words}  # each key once
    assert said in refused(*last.values())


def test_no_gpu_and_no_torch_are_needed() -> None:
    code = (
        f"import sys; from trainer.commands.submit import command; print(command({[*SLURM, 'recipe=resnet50'][:1]!r} + "
    )
    code += "['recipe=resnet50', 'nproc=8', 'nodes=2', 'time=1:00:00', 'cpus=8'])); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--gpus-per-node=8" in done.stdout


@pytest.mark.parametrize(("text", "value"), [("1:00:00", 3600), ("2-12:00:00", 216000), ("00:00:30", 30)])
def test_time(text: str, value: int) -> None:
    assert seconds(text) == value


def test_the_guides_manifest_knows_the_exit_codes_and_the_time_to_save() -> None:
    page = (Path(cli.__file__).parent / "guide" / "nodes.md").read_text()
    service, job = yaml.safe_load_all(
        page.partition("type `kubectl apply -f job.yaml`:\n\n```text\n")[2].partition("```")[0]
    )
    spec = job["spec"]
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [*HOPELESS]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= load_recipe("resnet50").grace + SAVING
    assert service["spec"]["selector"]["batch.kubernetes.io/job-name"] == job["metadata"]["name"] == pod["subdomain"]
    start, words = pod["containers"][0]["command"][:4], pod["containers"][0]["command"][4:]
    assert start[:3] == ["python", "-m", "trainer"] and load_recipe("resnet50", *words[1:-2])
