"""Which rank this process is, of which job: what its launcher says in the environment.

The only reader of RANK and its companions. Imports no torch: "printed once" is decided in milliseconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import SetupError

LAUNCHER = "TRAINER_LAUNCHER"  # the launcher's process id, in ranks that another process forks for it


@dataclass(frozen=True)
class Place:
    """This process among its peers, as the launcher says in the environment. Alone: rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0  # how often torchrun has restarted this job
    launched: bool = False  # under torchrun

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read torchrun's variables."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Place()

    def number(name: str, default: int) -> int:
        return int(environment.get(name, default))

    try:
        size = number("WORLD_SIZE", 1)
        return Place(
            number("RANK", 0),
            size,
            number("LOCAL_RANK", 0),
            number("LOCAL_WORLD_SIZE", size),
            number("TORCHELASTIC_RESTART_COUNT", 0),
            True,
        )
    except ValueError as error:
        raise SetupError(f"the launcher's variables RANK, WORLD_SIZE, LOCAL_RANK make no sense: {error}") from None


def check_meeting(me: Place) -> None:
    """Raises SetupError where variables make this one of several ranks and do not say where they meet."""
    if me.size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise SetupError(
            f"RANK={me.rank} WORLD_SIZE={me.size} make this one of {me.size} ranks; MASTER_ADDR and MASTER_PORT "
            "do not say where they meet: unset RANK and WORLD_SIZE, or start the ranks with torchrun"
        )


def launcher() -> int:
    """The process id of the launcher that started this rank, or had another process fork it."""
    return int(os.environ.get(LAUNCHER, os.getppid()))


def elastic_nodes() -> str:
    """How many machines a torchrun may have that come and go, as 1:4; empty where their number is fixed, or unknown."""
    try:
        with open(f"/proc/{launcher()}/cmdline", errors="replace") as file:
            typed = re.search(r"\0--nn\w*[=\0]([^\0]*)", file.read())
    except OSError:
        typed = None
    nodes = typed[1] if typed else os.environ.get("PET_NNODES", "")
    low, _, high = nodes.partition(":")
    return nodes if place().launched and high not in ("", low) else ""


def elastic_advice() -> str:
    """What to start torchrun with so that machines can come and go; empty where it has all."""
    if not elastic_nodes():
        return ""
    shared, given_up = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("USE_AGENT_STORE", "MAX_RESTARTS"))
    missing = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"] * (shared == "True")
    missing += ["--max-restarts=100"] * (given_up == "0")
    both = " and ".join(missing)
    return both and f"start it on every machine with {both}: else one that joins or leaves can end the others too"


def start_of(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot. Raises OSError or IndexError where it does not tell."""
    with open(f"/proc/{pid}/stat", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


def boot_id() -> str:
    """Which start of which machine this is. Raises OSError where the system does not tell."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def job_id() -> str:
    """A name of this job that its restarts share and no other job has: its launcher's process, and that one's start."""
    starter = launcher() if place().launched else os.getpid()
    try:
        started = f"{boot_id()}-{start_of(starter)}"
    except (OSError, IndexError):
        started = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{os.uname().nodename}-{starter}-{started}"


def signature() -> str:
    """What a job leaves in the folder that it holds: its `job_id`, and in a second line SLURM's name of this job and
    step, which a requeued job keeps on whatever node."""
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "batch")
    return f"{job_id()}\nslurm-{job}.{step}" if job else job_id()


def is_restart() -> bool:
    """Whether torchrun has restarted this job, or SLURM requeued it."""
    return place().restarts > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def is_this_job(owner: str) -> bool:
    """Whether a `signature` is of this job before it was restarted."""
    (job, _, batch), (our_job, _, our_batch) = owner.partition("\n"), signature().partition("\n")
    return (place().restarts > 0 and job == our_job) or (is_restart() and bool(batch) and batch == our_batch)
