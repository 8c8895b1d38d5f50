"""How many ranks on how many nodes, and where they meet: a pure function of the environment and the recipe.

The first that says counts: the nproc= word, NPROC and torchrun's names for several nodes, the same as torchrun reads
them (PET_NPROC_PER_NODE), what mpirun or SLURM started, the recipe's devices, the GPUs, the cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.errors import RecipeError
from trainer.recipe import Recipe

CPU_RANKS = 2  # at most, where nobody says otherwise
TORCHRUNS = {name: f"PET_{name}" for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
TORCHRUNS["NPROC"] = "PET_NPROC_PER_NODE"
# Of a process that a launcher of MPI's kind started: its rank on this node, the ranks here, its rank, all ranks.
MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("LOCAL_RANK", "LOCAL_SIZE", "RANK", "SIZE")),  # Open MPI
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)
# Rank and number of tasks, of launchers that are not read: MVAPICH, jsrun, Flux.
OTHERS = tuple((f"{name}_RANK", f"{name}_SIZE") for name in ("MV2_COMM_WORLD", "JSM_NAMESPACE"))
OTHERS += (("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),)


@dataclass(frozen=True)
class Launch:
    """How many ranks, and where they meet."""

    nproc: int = 1  # ranks on this node
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: one that is free

    @property
    def size(self) -> int:
        return self.nproc * self.nnodes


def choose_launch(
    environment: Mapping[str, str], nproc: str | None, recipe: Recipe, cuda: Callable[[], int], cores: int
) -> Launch:
    """Ranks and nodes from the nproc= word, NPROC and companions, PET_*, mpirun, SLURM, devices, cores: the first that
    says. Of several tasks on a node, task 0 starts all ranks there.

    Raises:
        RecipeError: what is given makes no sense, several nodes do not say where they meet, or mpirun or srun started
            several tasks of what is one process.
    """
    given = {key: value for key, value in environment.items() if value}
    started = _mpi(given) or _slurm(given) or {"NODE_RANK": given.get("JOB_COMPLETION_INDEX", "")}  # Kubernetes
    variables = {**{key: value for key, value in started.items() if value}, **_torchruns(given), **given}
    tasks = tasks_started(environment)
    if tasks > 1 and recipe.processes == "one":
        raise RecipeError(_one_of(tasks, f"mode={recipe.mode} runs in 1 process") + ", or type mode=ddp")
    if tasks > 1 and "NNODES" not in started and "NODE_RANK" not in variables:
        raise RecipeError(
            f"{tasks} tasks were started, and which of them is on which node is not known here: start one on each "
            "node, with NNODES, NODE_RANK and MASTER_ADDR, or use srun, Open MPI's or MPICH's mpirun, or torchrun"
        )
    nnodes = _whole(variables, "NNODES", 1, 1, 65536)
    ranks = _ranks(variables, nproc, recipe, cuda, cores)
    if tasks > 1 and ranks * nnodes == 1:
        raise RecipeError(_one_of(tasks, f"{'nproc' if nproc else 'NPROC'}=1 asks for 1 process"))
    if nnodes == 1:
        return Launch(ranks)
    absent = [name for name in ("NODE_RANK", "MASTER_ADDR") if name not in variables]
    if absent:
        raise RecipeError(
            f"NNODES={nnodes} needs {' and '.join(absent)}: on every node set NODE_RANK=0 to {nnodes - 1}, "
            "MASTER_ADDR to the first node's name, and MASTER_PORT if 29500 is taken"
        )
    node_rank = _whole(variables, "NODE_RANK", 0, 0, nnodes - 1)
    port = _whole(variables, "MASTER_PORT", 29500, 1, 65535)
    return Launch(ranks, nnodes, node_rank, variables["MASTER_ADDR"], port)


def _ranks(variables: Mapping[str, str], nproc: str | None, recipe: Recipe, cuda: Callable[[], int], cores: int) -> int:
    if nproc is not None:
        return _whole({"nproc": nproc}, "nproc", 1, 1, 4096)
    if recipe.processes == "one" or (recipe.processes == "either" and "NPROC" not in variables):
        return 1
    if "NPROC" in variables:
        return _whole(variables, "NPROC", 1, 1, 4096)
    if recipe.devices != "auto" and recipe.devices != ["cpu"]:
        return len(recipe.devices)
    stages = recipe.pipeline.stages if recipe.traits.staged else None
    gpus = cuda() if recipe.devices == "auto" and not recipe.traits.shared_memory else 0
    if stages:
        return max(stages, gpus // stages * stages)
    return gpus or max(1, min(cores, CPU_RANKS))


def _whole(variables: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = variables.get(name, str(default))
    if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
        other = TORCHRUNS.get(name, "")
        typed = other if variables.get(other) == text else name
        raise RecipeError(f"{typed}={text[:40]} must be a whole number from {low} to {high}")
    return int(text)


def _torchruns(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables as torchrun reads them, PET_NPROC_PER_NODE and so on: what operators of clusters set."""
    variables = {name: environment[other] for name, other in TORCHRUNS.items() if other in environment}
    host, _, port = environment.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    if host and port.isdigit():
        variables = {"MASTER_ADDR": host, "MASTER_PORT": port, **variables}
    if variables.get("NPROC") in ("auto", "gpu", "cpu", "xpu"):
        del variables["NPROC"]  # as many as there are, which is what happens anyway
    low, _, high = variables.get("NNODES", "1").partition(":")
    if high and high != low:
        raise RecipeError(
            f"PET_NNODES={low}:{high}: a run has one number of nodes: set NNODES={high}, or start torchrun yourself"
        )
    return {**variables, "NNODES": low} if "NNODES" in variables else variables


def task_of_node(environment: Mapping[str, str]) -> int:
    """This process's number among those that mpirun or srun started on this node; 0 where neither did."""
    if "RANK" in environment and "WORLD_SIZE" in environment:  # a rank, and no launcher
        return 0
    names = [local for local, _, rank, size in MPI if {local, rank, size} <= set(environment)]
    names += ["SLURM_LOCALID"] * ("SLURM_STEP_ID" in environment)
    text = environment.get(names[0], "") if names else ""
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0


def tasks_started(environment: Mapping[str, str]) -> int:
    """How many tasks mpirun or srun started on all nodes, this one included; 1 where neither did."""
    if "RANK" in environment and "WORLD_SIZE" in environment:  # a rank, and no launcher
        return 1
    named = [*OTHERS, *((rank, size) for _, _, rank, size in MPI)]
    sizes = [environment.get(size, "") for rank, size in named if rank in environment]
    if "SLURM_STEP_ID" in environment:
        each = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        sizes.append(str(sum(int(tasks) * int(nodes or 1) for tasks, nodes in each)))
    return max([1, *(int(size) for size in sizes if re.fullmatch(r"\d{1,9}", size))])


def check_alone(command: str, environment: Mapping[str, str], shared: bool) -> None:
    """Refuse what each task of mpirun or srun would do on its own; `shared`: torchrun's ranks divide its work."""
    tasks = tasks_started(environment)
    if tasks > 1:
        instead = f", or type torchrun --nproc_per_node={tasks} -m trainer {command} ..." if shared else ""
        raise RecipeError(_one_of(tasks, f"{command} runs in 1 process") + instead)


def _one_of(tasks: int, reason: str) -> str:
    return f"{reason}, and mpirun or srun started {tasks}: start it once, without them"


def bound_by_mpi(environment: Mapping[str, str]) -> bool:
    """Whether mpirun may have bound this task to its share of the cores."""
    return "RANK" not in environment and bool(_mpi(environment).get("NPROC"))


def _mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables as mpirun and its like set them, where they started several processes."""
    for names in MPI:
        local, here, rank, size = (environment.get(name, "") for name in names)
        if not all(text.isdigit() for text in (local, here, rank, size)) or int(size) < 2:
            continue
        first, alike = divmod(int(rank) - int(local), int(here))  # ranks go node by node, unless asked otherwise
        return {
            "NPROC": here if int(here) > 1 else "",  # one a node: it starts as many as there are devices
            "NNODES": str(-(-int(size) // int(here))),
            "NODE_RANK": str(first) if not alike else "",
        }
    return {}


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables as SLURM knows them, inside a step (srun) and nowhere else."""
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    if "SLURM_STEP_ID" not in environment or not nodes:
        return {}
    variables = {"NNODES": nodes, "NODE_RANK": environment.get("SLURM_NODEID", "0")}
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if tasks and int(tasks[0]) > 1:
        variables["NPROC"] = tasks[0]
    if name := first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")):
        variables["MASTER_ADDR"] = name
    job = environment.get("SLURM_JOB_ID", "")
    if job.isdigit():
        variables["MASTER_PORT"] = str(10000 + int(job) % 20000)  # below the ports that systems hand out themselves
    return variables


def first_host(text: str) -> str:
    """The first of SLURM's compressed list of hosts: n08 of "n[08-10,2],gpu1"."""
    first = re.match(r"(\[[^]]*\]|[^,\[])*", text)
    name = re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0] if first else "")
    if "[" in name:
        raise RecipeError(f"SLURM's list of nodes '{text[:80]}' is not understood: set MASTER_ADDR yourself")
    return name
