"""Count the GPUs that this torch can use, and find the reason if it cannot use all of them.

Every run and `python -m trainer doctor` count the GPUs at their start. On a machine without a GPU,
torch is not imported for the count. The module `health` checks whether the GPUs compute correctly.
"""

import glob
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.errors import RecipeError, SetupError, TrainerError, read_line

# Values of CUDA_VISIBLE_DEVICES that hide all GPUs, in lower case. SLURM sets NoDevFiles.
NONE_VISIBLE = {"", "-1", "none", "void", "nodevfiles"}
REINSTALL = "pip install --force-reinstall torch torchvision"
NO_NCCL = (
    f"this torch has no NCCL, which ranks on GPUs communicate through: {REINSTALL}, or train with "
    "devices=[cpu]"
)
# Pattern of files that exist if a GPU is partitioned by MIG. A process can use only one partition.
# So it is no fault if CUDA then counts fewer GPUs than there are device nodes.
MIG = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*"


@dataclass(frozen=True)
class Cards:
    """GPUs of this machine that torch can use.

    Attributes:
        count: Number of GPUs that torch can use.
        fault: Error that says why torch can use fewer GPUs than this machine has, or fewer than
            CUDA_VISIBLE_DEVICES lists; None if there is no such fault.
    """

    count: int = 0
    fault: TrainerError | None = None


def detect() -> Cards:
    """Count the GPUs that torch can use.

    torch is imported only if `list_device_nodes` finds a file. It is not a fault if the machine has
    no GPU, or if CUDA_VISIBLE_DEVICES hides all of them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA ignores -1 and all entries after it.
        if "-1" in names:
            names = names[: names.index("-1")]
        if visible.strip().lower() in NONE_VISIBLE or not names:
            return Cards()
    nodes, possible_nodes = list_device_nodes()
    if not nodes and not possible_nodes:
        return Cards()
    import torch

    count, reason = count_runtime_devices()
    if names is not None and count < len(names) and (count or "GPUs are available" in reason):
        valid = ",".join(names[:count]) or "0"
        message = (
            f"CUDA_VISIBLE_DEVICES={str(visible)[:80]} names {len(names)}, and CUDA sees {count} "
            f"of them: type CUDA_VISIBLE_DEVICES={valid}, or leave it unset for all; nvidia-smi -L "
            "lists them"
        )
        return Cards(count, RecipeError(message))
    machine = f"this machine has {len(nodes)} NVIDIA cards"
    if len(nodes) == 1:
        machine = "this machine has 1 NVIDIA card"
    if not count:
        # Without an NVIDIA device node, `possible_nodes` do not prove that there is a GPU for this
        # torch. For example, /dev/kfd belongs to AMD GPUs, which only torch for ROCm can use.
        if not nodes and torch.version.hip is None:
            return Cards()
        message = (
            f"torch {torch.__version__} cannot use it ({reason[:300] or 'CUDA gives no reason'}): "
            "check whether nvidia-smi lists it; or train on the CPU with devices=[cpu]"
        )
        if nodes:
            message = f"{machine}, but {message}"
        return Cards(fault=SetupError(message))
    if names is not None or count >= len(nodes) or glob.glob(MIG):
        return Cards(count)
    failed = len(_openable(nodes)) - count
    if failed <= 0:
        return Cards(count)
    usable = ",".join(f"cuda:{index}" for index in range(count))
    message = (
        f"{machine} and CUDA sees {count}: {failed} may have failed (see nvidia-smi and dmesg); "
        f"train on those it sees with devices=[{usable}]"
    )
    return Cards(count, SetupError(message))


def list_device_nodes() -> tuple[list[str], list[str]]:
    """List the device nodes of NVIDIA GPUs, and other paths that suggest that there may be a GPU.

    Returns:
        (nodes, possible_nodes): two lists of paths. `nodes` are the device nodes of NVIDIA GPUs.
        `possible_nodes` are weaker evidence. They contain /dev/kfd, which exists if AMD's compute
        driver is loaded, and one directory for each NVIDIA GPU that the driver has detected, even
        if this process has no device node for it.
    """
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*"))
    # Windows Subsystem for Linux has a single node for all GPUs.
    if not nodes and glob.glob("/usr/lib/wsl/lib/libcuda.so*"):
        nodes = glob.glob("/dev/dxg")
    return nodes, glob.glob("/dev/kfd") + glob.glob("/proc/driver/nvidia/gpus/*")


def _openable(nodes: Iterable[str]) -> list[str]:
    """List the nodes that this process has permission to use, including those of failed GPUs.

    A container or SLURM denies permission for the GPUs of other users, so their nodes are left out.
    Opening the node of a failed GPU raises a different error, so its node is listed.
    """
    allowed = []
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDWR))
        except PermissionError:
            continue
        except OSError:
            pass
        allowed.append(node)
    return allowed


def count_runtime_devices() -> tuple[int, str]:
    """Count the devices that the CUDA runtime can use.

    `torch.cuda.device_count()` asks the driver's management library instead. That library also
    counts GPUs that have failed and GPUs whose driver is too old, and it counts a GPU that is
    partitioned by MIG as one.

    Returns:
        (count, reason): the number of devices, and the reason if it is 0, otherwise "".
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return 0, f"it is built without CUDA: {REINSTALL}"
    with warnings.catch_warnings(record=True, action="always") as caught:
        count = torch._C._cuda_getDeviceCount()
        if count:
            return count, ""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return 0, read_line(error, 500)
    return 0, " ".join(str(warning.message) for warning in caught)
