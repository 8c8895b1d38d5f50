"""Check that GPUs compute correctly, and that copies between them are correct.

A run checks its GPUs at its start. `python -m trainer doctor` checks all GPUs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

from trainer.errors import DeviceMemoryError, SetupError, is_out_of_memory, read_line
from trainer.recipe.text import list_some

if TYPE_CHECKING:
    import torch

# An interval between two queries of a device adds at most this number of seconds to the waiting
# time. In a longer interval, this process was stopped, so the rest of the interval does not count.
MAX_QUERY_SECONDS = 0.5
# Number of int32 elements in a copy that is checked.
PATTERN_SIZE = 1 << 20


def check_card(device: torch.device, count: int) -> None:
    """Check that a GPU computes a sum correctly.

    Args:
        device: The GPU.
        count: Number of GPUs on this machine.

    Raises:
        SetupError: The GPU does not compute, or computes wrongly.
        DeviceMemoryError: The GPU's memory is full.
    """
    import torch

    others = [f"cuda:{index}" for index in range(count) if index != device.index]
    remedy = "train on the CPU with devices=[cpu]"
    if others:
        remedy = f"leave it out with devices=[{','.join(others)}]"
    name = str(device)
    try:
        # torch prints long warnings about an unsupported GPU. The error below is one line.
        with warnings.catch_warnings(action="ignore"):
            name = f"{device} ({torch.cuda.get_device_name(device)})"
        total = int(torch.arange(4096, device=device).sum())
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceMemoryError(
                f"{name} is full before anything was loaded: nvidia-smi lists the programs that "
                f"use it; or {remedy}"
            ) from error
        # The message contains the reason, such as "no kernel image is available" for a GPU that
        # torch does not support.
        raise SetupError(
            f"{name} does not compute with torch {torch.__version__} ({read_line(error)}): {remedy}"
        ) from error
    if total != 4096 * 4095 // 2:
        raise SetupError(
            f"{name} computes wrongly (a sum came out as {total}): the card is faulty; {remedy}"
        )


def measure_speed(device: torch.device) -> float:
    """Return how many products of two 1024 x 1024 float32 matrices a GPU computes per second.

    The result is the highest rate of 8 measurements, with 1, 2, 4, ..., 128 products.
    """
    import torch

    matrix = torch.ones(1024, 1024, device=device)
    best = 0.0
    for power in range(8):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(2**power):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
        best = max(best, 2**power / (time.perf_counter() - start))
    return best


def find_unfinished(devices: Iterable[torch.device], seconds: float) -> torch.device | None:
    """Wait for the devices, and return the first whose stream is still busy after `seconds`.

    Time in which this process is stopped does not count. The devices are queried in a loop, because
    torch's own wait never returns if a device hangs, and handles no signals.

    Returns:
        The first busy device; None if all streams became idle in time.
    """
    import torch

    waited = 0.0
    before = time.monotonic()
    for device in devices:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        while not event.query():
            now = time.monotonic()
            waited += min(now - before, MAX_QUERY_SECONDS)
            before = now
            if waited > seconds:
                return device
            time.sleep(1e-4)
    return None


def list_copy_pairs(devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.device]]:
    """List the pairs (source, target) of devices between which one process copies tensors.

    Stages copy between neighbors in `devices`. Replicas copy between the first device and each
    other device. Both directions are listed.
    """
    first, *others = devices
    pairs = []
    for source, target in [*pairwise(devices), *zip(repeat(first), others)]:
        if source != target:
            pairs.extend([(source, target), (target, source)])
    return list(dict.fromkeys(pairs))


def copies_correctly(source: torch.device, target: torch.device, pattern: int) -> bool:
    """Copy a pattern from one GPU to another, and return whether it arrives unchanged.

    Each value of `pattern` yields different numbers, and the target is filled with zeros first.
    Otherwise, numbers of an earlier copy could hide that nothing is copied.
    """
    import torch

    numbers = torch.arange(PATTERN_SIZE, dtype=torch.int32) * 2 + 2 * pattern * PATTERN_SIZE + 1
    sent = numbers.to(source)
    received = torch.zeros(PATTERN_SIZE, dtype=torch.int32, device=target)
    received.copy_(sent, non_blocking=True)
    return torch.equal(received.cpu(), numbers)


def check_copies(pairs: Sequence[tuple[torch.device, torch.device]]) -> None:
    """Check copies from the first to the second device of each pair.

    Raises:
        SetupError: A copy is wrong.
    """
    wrong = [
        f"{source} to {target}"
        for number, (source, target) in enumerate(pairs, 1)
        if not copies_correctly(source, target, number)
    ]
    if wrong:
        raise SetupError(
            f"copies from card to card are wrong ({list_some(wrong)}): switch the IOMMU "
            "or PCIe ACS off; until then train with NCCL_P2P_DISABLE=1 and mode=ddp, or on one card"
        )
