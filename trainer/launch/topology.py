"""Choose the number of ranks and nodes and their rendezvous, from the environment and the recipe.

The first source that sets a value is used: the argument nproc=; the environment variables NPROC,
NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; torchrun's own variables, such as
PET_NPROC_PER_NODE; the tasks that mpirun or SLURM started; the devices of the recipe; the GPUs; the
cores.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import RecipeError
from trainer.processes import resources
from trainer.recipe import Recipe

# Maximum number of ranks on a CPU if neither the user nor a launcher sets it.
CPU_RANKS = 2
# Variable that the user sets -> variable of torchrun with the same meaning.
TORCHRUNS = {
    "NPROC": "PET_NPROC_PER_NODE",
    "NNODES": "PET_NNODES",
    "NODE_RANK": "PET_NODE_RANK",
    "MASTER_ADDR": "PET_MASTER_ADDR",
    "MASTER_PORT": "PET_MASTER_PORT",
}
# Variables that MPI launchers set: local rank, ranks on this node, global rank, ranks on all nodes.
MPI = (
    (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)
# Variables with the rank and the number of ranks that MVAPICH, jsrun and Flux set. This module only
# counts their ranks, and does not read how the ranks are distributed over nodes.
OTHERS = (
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """Number of ranks and nodes, and the address of their rendezvous.

    Attributes:
        nproc: number of ranks on this node.
        nnodes: number of nodes.
        node_rank: number of this node, from 0.
        master_addr: address of the first node.
        master_port: port of the first node; 0 for any free port.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def size(self) -> int:
        return self.nproc * self.nnodes


def choose_launch(
    environment: Mapping[str, str],
    nproc: str | None,
    recipe: Recipe,
) -> Launch:
    """Choose the number of ranks and nodes. If a node has several tasks, task 0 starts all ranks.

    Args:
        environment: environment variables.
        nproc: value of the argument nproc=, if any.
        recipe: recipe of the run. Its GPUs are counted only if their number matters.

    Raises:
        RecipeError: a value is malformed, several nodes have no common address, or mpirun or srun
            started several tasks of a command that runs in one process.
    """
    variables = {key: value for key, value in environment.items() if value}
    from_launcher = _read_mpi(variables) or _read_slurm(variables)
    if not from_launcher:
        # In an indexed job of Kubernetes, each pod is a node of the run, and this variable contains
        # the number of the pod.
        from_launcher = {"NODE_RANK": variables.get("JOB_COMPLETION_INDEX", "")}
    set_by_launcher = {key: value for key, value in from_launcher.items() if value}
    defaults = {"NNODES": "1", "MASTER_PORT": "29500"}
    variables = {**defaults, **set_by_launcher, **_read_torchrun(variables), **variables}
    tasks = tasks_started(environment)
    if tasks > 1 and recipe.processes == "one":
        raise RecipeError(
            _describe_tasks(tasks, f"mode={recipe.mode} runs in 1 process") + ", or type mode=ddp"
        )
    if tasks > 1 and "NNODES" not in from_launcher and "NODE_RANK" not in variables:
        raise RecipeError(
            f"{tasks} tasks were started, and their nodes are unknown: start one task on each "
            "node, with NNODES, NODE_RANK and MASTER_ADDR, or use srun, mpirun of Open MPI or "
            "MPICH, or torchrun"
        )
    nnodes = _parse_number(variables, "NNODES", 1, 65536)
    ranks = _count_ranks(variables, nproc, recipe)
    if tasks > 1 and ranks * nnodes == 1:
        name = "nproc" if nproc else "NPROC"
        raise RecipeError(_describe_tasks(tasks, f"{name}=1 asks for 1 process"))
    if nnodes == 1:
        return Launch(ranks)
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if name not in variables]
    if missing:
        raise RecipeError(
            f"NNODES={nnodes} needs {' and '.join(missing)}: on every node set NODE_RANK=0 to "
            f"{nnodes - 1}, MASTER_ADDR to the first node's name, and MASTER_PORT if 29500 is taken"
        )
    node_rank = _parse_number(variables, "NODE_RANK", 0, nnodes - 1)
    port = _parse_number(variables, "MASTER_PORT", 1, 65535)
    return Launch(ranks, nnodes, node_rank, variables["MASTER_ADDR"], port)


def _count_ranks(variables: Mapping[str, str], nproc: str | None, recipe: Recipe) -> int:
    if nproc is not None:
        return _parse_number({"nproc": nproc}, "nproc", 1, 4096)
    if recipe.processes == "one" or (recipe.processes == "either" and "NPROC" not in variables):
        return 1
    if "NPROC" in variables:
        return _parse_number(variables, "NPROC", 1, 4096)
    if recipe.devices != "auto" and recipe.devices != ["cpu"]:
        return len(recipe.devices)
    stages = None
    if recipe.traits.staged:
        stages = recipe.pipeline.stages
    gpus = resources.count_requested_cuda(recipe)
    if stages:
        return max(stages, gpus // stages * stages)
    return gpus or min(resources.count_cores(), CPU_RANKS)


def _parse_number(variables: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = variables[name]
    if not re.fullmatch(r"\d{1,9}", text) or not low <= int(text) <= high:
        torchrun_name = TORCHRUNS.get(name, "")
        if variables.get(torchrun_name) == text:
            name = torchrun_name
        raise RecipeError(f"{name}={text[:40]} must be a whole number from {low} to {high}")
    return int(text)


def _read_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the variables of torchrun (PET_NPROC_PER_NODE, ...), which cluster operators set."""
    variables = {
        name: environment[other] for name, other in TORCHRUNS.items() if other in environment
    }
    host, _, port = environment.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    if host and port.isdigit():
        variables = {"MASTER_ADDR": host, "MASTER_PORT": port, **variables}
    if variables.get("NPROC") in ("auto", "gpu", "cpu", "xpu"):
        # These values mean one rank per device, which is our default.
        del variables["NPROC"]
    low, _, high = variables.get("NNODES", "1").partition(":")
    if high and high != low:
        raise RecipeError(
            f"PET_NNODES={low}:{high} is a range, and a run has a fixed number of nodes: set "
            f"NNODES={high}, or start torchrun yourself"
        )
    if "NNODES" in variables:
        variables["NNODES"] = low
    return variables


def task_of_node(environment: Mapping[str, str]) -> int:
    """Return the local rank that mpirun or srun gave this process, or 0 without them."""
    # Ranks of torchrun inherit the variables of an mpirun or srun that started torchrun, so ignore
    # these variables.
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return 0
    names = [local for local, _, rank, size in MPI if {local, rank, size} <= set(environment)]
    if "SLURM_STEP_ID" in environment:
        names.append("SLURM_LOCALID")
    if not names:
        return 0
    text = environment.get(names[0], "")
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    return 0


def tasks_started(environment: Mapping[str, str]) -> int:
    """Return the number of tasks that mpirun or srun started on all nodes, or 1 without them."""
    # Ranks of torchrun inherit the variables of an mpirun or srun that started torchrun, so ignore
    # these variables.
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return 1
    names = [*OTHERS, *((rank, size) for _, _, rank, size in MPI)]
    texts = [environment.get(size, "") for rank, size in names if rank in environment]
    if "SLURM_STEP_ID" in environment:
        # SLURM writes "4(x2),1" for two nodes with four tasks each and one node with one task.
        written = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", written)
        counts = [int(tasks) * int(nodes or 1) for tasks, nodes in groups]
        texts.append(str(sum(counts)))
    sizes = [int(text) for text in texts if re.fullmatch(r"\d{1,9}", text)]
    return max([1, *sizes])


def check_alone(command: str, environment: Mapping[str, str], shared: bool) -> None:
    """Refuse a command that each task of mpirun or srun would repeat.

    Args:
        command: name of the command.
        environment: environment variables.
        shared: whether ranks of torchrun divide the work of this command.

    Raises:
        RecipeError: mpirun or srun started several tasks.
    """
    tasks = tasks_started(environment)
    if tasks > 1:
        instead = ""
        if shared:
            instead = (
                f", or type torchrun --standalone --nproc_per_node={tasks} -m trainer {command} ..."
            )
        raise RecipeError(_describe_tasks(tasks, f"{command} runs in 1 process") + instead)


def _describe_tasks(tasks: int, reason: str) -> str:
    return f"{reason}, and mpirun or srun started {tasks}: start it once, without them"


def bound_by_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether mpirun may have bound this task to a part of the cores."""
    return "RANK" not in environment and bool(_read_mpi(environment).get("NPROC"))


def _read_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Return NPROC, NNODES and NODE_RANK for the ranks and nodes that mpirun chose.

    The result is empty unless mpirun started several processes.
    """
    for names in MPI:
        texts = [environment.get(name, "") for name in names]
        if not all(text.isdigit() for text in texts):
            continue
        local_rank, local_size, rank, size = map(int, texts)
        if size < 2:
            continue
        # This assumes that ranks are numbered node by node, which is mpirun's default. If there is
        # a remainder, the assumption is wrong, and the number of the node is unknown. Some other
        # numberings leave no remainder, so they are not detected.
        node_rank, remainder = divmod(rank - local_rank, local_size)
        return {
            # If a node has a single task, leave the number of ranks open: this task then starts one
            # rank per device.
            "NPROC": str(local_size) if local_size > 1 else "",
            "NNODES": str(-(-size // local_size)),
            "NODE_RANK": "" if remainder else str(node_rank),
        }
    return {}


def _read_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `TORCHRUNS` (NPROC, NNODES, ...) for a SLURM step (srun).

    A variable is missing if SLURM does not determine it. The result is empty outside a step.
    """
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    if "SLURM_STEP_ID" not in environment or not nodes:
        return {}
    variables = {"NNODES": nodes, "NODE_RANK": environment.get("SLURM_NODEID", "0")}
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if tasks and int(tasks[0]) > 1:
        variables["NPROC"] = tasks[0]
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = first_host(hosts)
    if first:
        variables["MASTER_ADDR"] = first
    job = environment.get("SLURM_JOB_ID", "")
    if job.isdigit():
        # Operating systems choose ephemeral ports above 30000, so the port of a job is lower.
        variables["MASTER_PORT"] = str(10000 + int(job) % 20000)
    return variables


def first_host(text: str) -> str:
    """Return the first host of SLURM's compressed list: n08 for "n[08-10,2],gpu1"."""
    # The pattern also matches an empty string, so there is always exactly one match.
    [first] = re.findall(r"^(?:\[[^]]*\]|[^,\[])*", text)
    name = re.sub(r"\[(\d+)[^]]*\]", r"\1", first)
    if "[" in name:
        raise RecipeError(
            f"SLURM's list of nodes '{text[:80]}' cannot be parsed: set MASTER_ADDR yourself"
        )
    return name
