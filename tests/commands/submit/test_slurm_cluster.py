"""What `submit slurm | sbatch` submits, on a real SLURM: two nodes train, and what ends a job loses nothing."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import digest, environment, ok, result
from tests.commands.submit import slurm_cluster
from tests.commands.submit.slurm_cluster import Cluster

MISSING = slurm_cluster.missing()
pytestmark = [pytest.mark.full("minutes: SLURM's clock is coarse"), pytest.mark.skipif(bool(MISSING), reason=MISSING)]
# A model that is slow until its job is requeued.
SLOW = """
import os, time
from torch import nn
from trainer import register_model

class Slow(nn.Sequential):
    def forward(self, inputs):
        time.sleep(0 if int(os.environ.get("SLURM_RESTART_COUNT") or 0) else float(os.environ.get("PAUSE", 0)))
        return super().forward(inputs)

@register_model("slow")
def slow(num_classes, channels, image_size):
    return Slow(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
TRAINING = ("recipe=digits", "plugin=slow", "model.name=slow", "mode=ddp", "devices=[cpu]", "epochs=2")
TRAINING += ("save.every_steps=2", "grace=10", "logging.every_steps=1", "logging.tensorboard=false")
ASKED = ("nproc=1", "cpus=1", "time=00:02:00", "partition=low")
PAUSE = "4"  # seconds a step: 28 steps take longer than the time limit


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        one = Cluster(tmp_path_factory.mktemp("slurm"))
    except (OSError, TimeoutError) as error:
        pytest.skip(f"SLURM is installed and does not start here: {error}")
    (one.folder / "slow.py").write_text(SLOW)
    yield one
    one.close()


def submitted(cluster: Cluster, *words: str, pause: str = "0") -> str:
    """The number of the job."""
    names = {"SLURM_CONF": str(cluster.folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1", "PAUSE": pause}
    names["TRAINER_COMMAND"] = f"{sys.executable} -m trainer"
    script = ok("submit", "slurm", *TRAINING, *ASKED, *words, env=names, cwd=cluster.folder).stdout
    told = {**environment(**names)}
    done = subprocess.run(["sbatch"], input=script, env=told, cwd=cluster.folder, capture_output=True, text=True)
    return re.findall(r"Submitted batch job (\d+)", done.stdout)[0]


def log(cluster: Cluster, output: str) -> str:
    return "\n".join(path.read_text() for path in (cluster.folder / output).glob("slurm-*.log"))


def training(cluster: Cluster, output: str) -> bool:
    """Whether some steps are saved."""
    return len([*(cluster.folder / output / "checkpoints").glob("step-*/manifest.json")]) >= 2


def check_end(cluster: Cluster, number: str, output: str, undisturbed: str, seconds: float = 240) -> None:
    job = cluster.ended(number, seconds)
    text = log(cluster, output)
    assert job["JobState"] == "COMPLETED", (job, text)
    assert int(job["Restarts"]) >= 1, text
    assert "resuming at step" in text, text
    assert result(cluster.folder / output)["status"] == "completed"
    assert digest(cluster.folder / output / "last.safetensors") == undisturbed, text


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> str:
    """The weights that a job on two nodes ends with."""
    job = cluster.ended(submitted(cluster, "nodes=2", "output=runs/whole"), 240)
    assert job["JobState"] == "COMPLETED" and job["NumNodes"] == "2", (job, log(cluster, "runs/whole"))
    assert result(cluster.folder / "runs/whole")["world_size"] == 2
    return digest(cluster.folder / "runs" / "whole" / "last.safetensors")


def test_two_nodes_train_like_two_processes(cluster: Cluster, undisturbed: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    ok(*TRAINING, "nproc=2", "output=here", cwd=tmp_path)
    assert digest(tmp_path / "here" / "last.safetensors") == undisturbed


def test_the_time_limit(cluster: Cluster, undisturbed: str) -> None:
    number = submitted(cluster, "nodes=2", "output=runs/limit", pause=PAUSE)
    check_end(cluster, number, "runs/limit", undisturbed, 360)


def test_preemption(cluster: Cluster, undisturbed: str) -> None:
    number = submitted(cluster, "nodes=2", "output=runs/preempted", pause=PAUSE)
    cluster.until(lambda: training(cluster, "runs/preempted"), 120)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 5")
    check_end(cluster, number, "runs/preempted", undisturbed)


def test_a_node_is_killed(cluster: Cluster, undisturbed: str) -> None:
    number = submitted(cluster, "nodes=2", "output=runs/killed", pause=PAUSE)
    cluster.until(lambda: training(cluster, "runs/killed"), 120)
    cluster.kill("n1")
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", 120)
    cluster.start("n1")
    check_end(cluster, number, "runs/killed", undisturbed)
