"""Rank and job of this process, from the environment variables that its launcher sets.

Only `read_place` parses RANK together with the related variables. The module does not import torch,
so that start-up code can test for rank 0 without delay.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import SetupError

# Environment variable with the process id of the launcher, in ranks whose parent process is not the
# launcher but the fork server.
LAUNCHER = "TRAINER_LAUNCHER"


@dataclass(frozen=True)
class Place:
    """Rank of this process and number of ranks. The defaults are those of a single process.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        local_rank: index of this rank on its machine.
        local_size: number of ranks on this machine.
        restarts: number of times that torchrun has restarted this job.
        launched: whether a launcher (torchrun, ours or another one) started this process, which is
            recognized by the variables RANK and WORLD_SIZE.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    launched: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read the variables of torchrun, which other launchers may set too.

    Raises:
        SetupError: a variable is not a number.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Place()

    def number(name: str, default: int = 0) -> int:
        return int(environment.get(name, default))

    try:
        size = number("WORLD_SIZE")
        return Place(
            rank=number("RANK"),
            size=size,
            local_rank=number("LOCAL_RANK"),
            local_size=number("LOCAL_WORLD_SIZE", size),
            restarts=number("TORCHELASTIC_RESTART_COUNT"),
            launched=True,
        )
    except ValueError as error:
        raise SetupError(
            f"the launcher's variables RANK, WORLD_SIZE, LOCAL_RANK make no sense: {error}"
        ) from None


def check_meeting(me: Place) -> None:
    """Check that several ranks have an address at which they can connect.

    Raises:
        SetupError: MASTER_ADDR or MASTER_PORT is not set.
    """
    if me.size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise SetupError(
            f"RANK={me.rank} WORLD_SIZE={me.size} make this one of {me.size} ranks; MASTER_ADDR "
            "and MASTER_PORT do not say where they meet: unset RANK and WORLD_SIZE, or start the "
            "ranks with torchrun"
        )


def read_process_file(pid: int | str, name: str) -> str:
    """Return the contents of the file `name` in the directory of a process in /proc.

    Raises:
        OSError: the process does not exist or belongs to another user, or the system has no /proc.
    """
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def launcher() -> int:
    """Return the process id of the launcher of this rank."""
    return int(os.environ.get(LAUNCHER, os.getppid()))


def read_elastic_nodes() -> str:
    """Return the range of the number of machines of an elastic torchrun, such as "1:4".

    The result is empty if their number is fixed or unknown.
    """
    try:
        command_line = read_process_file(launcher(), "cmdline")
        typed = re.search(r"\0--nn\w*[=\0]([^\0]*)", command_line)
    except OSError:
        typed = None
    nodes = typed[1] if typed else os.environ.get("PET_NNODES", "")
    low, _, high = nodes.partition(":")
    if read_place().launched and high not in ("", low):
        return nodes
    return ""


def find_elastic_problems() -> str:
    """Return advice about the settings that an elastic torchrun lacks.

    The string is empty if no setting is missing, or if no elastic torchrun is known to be in use.
    """
    if not read_elastic_nodes():
        return ""
    missing = []
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        missing.append("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        missing.append("--max-restarts=100")
    if not missing:
        return ""
    return (
        f"start it on every machine with {' and '.join(missing)}: else one that joins or leaves "
        "can end the others too"
    )


def read_start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot.

    Raises:
        OSError, IndexError: the kernel does not report the start time.
    """
    return int(read_process_file(pid, "stat").rpartition(")")[2].split()[19])


def read_boot_id() -> str:
    """Return an identifier of the last boot of this machine.

    Raises:
        OSError: the kernel does not report the identifier.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def build_job_id() -> str:
    """Return a unique name of this job that does not change when torchrun restarts it.

    The name consists of the host, the process id of the launcher, and the start time of that
    process, because process ids are reused. Without a launcher, this process counts as the
    launcher.
    """
    owner = launcher() if read_place().launched else os.getpid()
    try:
        start = f"{read_boot_id()}-{read_start_ticks(owner)}"
    except (OSError, IndexError):
        start = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{os.uname().nodename}-{owner}-{start}"


def build_signature() -> str:
    """Return the text that a job writes into the lock of its run folder.

    The first line is the job's `build_job_id`. Under SLURM, the second line contains the ids of job
    and step, which are the same on every node and stay the same when the job is requeued.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return build_job_id()
    step = os.environ.get("SLURM_STEP_ID", "batch")
    return f"{build_job_id()}\nslurm-{job}.{step}"


def is_restart() -> bool:
    """Return whether torchrun has restarted this job or SLURM has requeued it."""
    return read_place().restarts > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def is_this_job(owner: str) -> bool:
    """Return whether this job wrote the signature `owner` before it was restarted."""
    job, _, slurm_step = owner.partition("\n")
    our_job, _, our_slurm_step = build_signature().partition("\n")
    if read_place().restarts > 0 and job == our_job:
        return True
    return is_restart() and bool(slurm_step) and slurm_step == our_slurm_step
