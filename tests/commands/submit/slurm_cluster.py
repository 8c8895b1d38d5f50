"""A real SLURM of two nodes on this host, without munge: slurmctld and two slurmd, for as long as tests need it."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
    """Why there can be none here; empty where there can."""
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed: apt install slurmctld slurmd slurm-client" if absent else ""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """Two nodes, n0 and n1, and the partitions low and high; jobs of the second preempt those of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", *NODES):
            (folder / name).mkdir(parents=True)
        control, first, second = _free_ports(3)
        text = CONFIGURATION.format(
            host=socket.gethostname(), user=USER, folder=folder, control=control, first=first, second=second
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
        """As where the power fails: its slurmd, the steps on it, and what they started."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        its = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if its <= {*(process / "environ").read_bytes().split(b"\0")}:
                    parent = re.search(r"PPid:\s*(\d+)", (process / "status").read_text())
                    if parent and Path("/proc", parent[1], "comm").read_text().startswith("slurmstepd"):
                        os.kill(int(parent[1]), signal.SIGKILL)
                    os.kill(int(process.name), signal.SIGKILL)

    def run(self, *command: str) -> str:
        """What a command of SLURM's prints."""
        return subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=60).stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job."""
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
