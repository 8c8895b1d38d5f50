"""Jobs of `submit slurm | sbatch` on a real SLURM: two nodes train, and an interrupted job loses
nothing.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command_line import digest, environment, ok, result

NODES = ("n0", "n1")


USER = getpass.getuser()


CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A requeued job is held for as long; without it two minutes.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
SchedulerParameters=batch_sched_delay=1,sched_interval=5
SelectType=select/linear
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=n[0-1] Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=n[0-1] PriorityTier=10 State=UP
"""


def missing() -> str:
    """Return why SLURM cannot run here, or ""."""
    absent = [
        name for name in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None
    ]
    return (
        f"{', '.join(absent)} not installed: apt install slurmctld slurmd slurm-client"
        if absent
        else ""
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """A cluster of two nodes, n0 and n1, with the partitions low and high; jobs of the second
    preempt those of the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", *NODES):
            (folder / name).mkdir(parents=True)
        control, first, second = _free_ports(3)
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            user=USER,
            folder=folder,
            control=control,
            first=first,
            second=second,
        )
        (folder / "slurm.conf").write_text(text)
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = {"control": self._start("slurmctld", "-D")}
        for node in NODES:
            self.start(node)
        try:
            self.until(lambda: self.run("sinfo", "-h", "-o", "%T").strip() == "idle", 60)
        except TimeoutError:
            self.close()
            raise

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(command, env=self.variables, stdout=log, stderr=log)

    def start(self, node: str) -> None:
        """Start a node, or start it again."""
        self._daemons[node] = self._start("slurmd", "-D", "-N", node)

    def kill(self, node: str) -> None:
        """Kill a node's slurmd, its steps and their processes, like a power failure."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        its = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if its <= {*(process / "environ").read_bytes().split(b"\0")}:
                    parent = re.search(r"PPid:\s*(\d+)", (process / "status").read_text())
                    if parent and Path("/proc", parent[1], "comm").read_text().startswith(
                        "slurmstepd"
                    ):
                        os.kill(int(parent[1]), signal.SIGKILL)
                    os.kill(int(process.name), signal.SIGKILL)

    def run(self, *command: str) -> str:
        """Return the output of a command of SLURM."""
        return subprocess.run(
            command, env=self.variables, capture_output=True, text=True, timeout=60
        ).stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the properties of a job in SLURM."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))

    def ended(self, number: str, seconds: float) -> dict[str, str]:
        """The same, once the job is done for good."""
        final = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY")
        self.until(lambda: self.job(number)["JobState"] in final, seconds)
        return self.job(number)

    @staticmethod
    def until(done: Callable[[], bool], seconds: float) -> None:
        """Wait for it. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds:g} s")
            time.sleep(0.5)

    def close(self) -> None:
        """End all jobs and daemons."""
        self.run("scancel", "--full", "--user", USER)
        with suppress(TimeoutError):
            self.until(lambda: not self.run("squeue", "-h").strip(), 45)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait(30)


MISSING = missing()
pytestmark = [
    pytest.mark.full("minutes: SLURM's clock is coarse"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
# A model that is slow until its job is requeued.
SLOW = """
import os, time
from torch import nn
from trainer import register_model

class Slow(nn.Sequential):
    def forward(self, inputs):
        time.sleep(0 if int(os.environ.get("SLURM_RESTART_COUNT") or 0)
            else float(os.environ.get("PAUSE", 0)))
        return super().forward(inputs)

@register_model("slow")
def slow(num_classes, channels, image_size):
    return Slow(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
TRAINING = (
    "recipe=digits",
    "plugin=slow",
    "model.name=slow",
    "mode=ddp",
    "devices=[cpu]",
    "epochs=2",
)
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
    names = {
        "SLURM_CONF": str(cluster.folder / "slurm.conf"),
        "MASTER_ADDR": "127.0.0.1",
        "PAUSE": pause,
    }
    names["TRAINER_COMMAND"] = f"{sys.executable} -m trainer"
    script = ok(
        "submit",
        "slurm",
        *TRAINING,
        *ASKED,
        *words,
        env=names,
        cwd=cluster.folder,
    ).stdout
    reported = {**environment(**names)}
    completed = subprocess.run(
        ["sbatch"],
        input=script,
        env=reported,
        cwd=cluster.folder,
        capture_output=True,
        text=True,
    )
    return re.findall(r"Submitted batch job (\d+)", completed.stdout)[0]


def log(cluster: Cluster, output: str) -> str:
    return "\n".join(path.read_text() for path in (cluster.folder / output).glob("slurm-*.log"))


def training(cluster: Cluster, output: str) -> bool:
    """Whether some steps are saved."""
    return len([*(cluster.folder / output / "checkpoints").glob("step-*/manifest.json")]) >= 2


def check_end(
    cluster: Cluster, number: str, output: str, undisturbed: str, seconds: float = 240
) -> None:
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
    assert job["JobState"] == "COMPLETED" and job["NumNodes"] == "2", (
        job,
        log(cluster, "runs/whole"),
    )
    assert result(cluster.folder / "runs/whole")["world_size"] == 2
    return digest(cluster.folder / "runs" / "whole" / "last.safetensors")


def test_two_nodes_train_like_two_processes(
    cluster: Cluster, undisturbed: str, tmp_path: Path
) -> None:
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
