"""The cards' health: does this torch compute correctly on each, and copy correctly from one to another?

A run asks it of the cards that it trains on, as it starts, and `python -m trainer doctor` of all.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainer.errors import DeviceMemoryError, SetupError, is_out_of_memory

if TYPE_CHECKING:
    import torch

STOPPED = 0.5  # seconds between two looks at a device: more, and this process was stopped
PATTERN = 1 << 20  # numbers of 4 bytes, in a copy that is checked


def check_card(device: torch.device, count: int) -> None:
    """Compute a little on a card, of `count` there are. Raises SetupError, or DeviceMemoryError where it is full."""
    import torch

    others = [f"cuda:{index}" for index in range(count) if index != device.index]
    without = f"leave it out with devices=[{','.join(others)}]" if others else "train on the CPU with devices=[cpu]"
    name = str(device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own pages about a card that it has no code for
            name = f"{device} ({torch.cuda.get_device_name(device)})"
        total = int(torch.arange(4096, device=device).sum())
    except RuntimeError as error:
        if is_out_of_memory(error):
            what = f"{name} is full before anything was loaded: nvidia-smi lists the programs that hold it"
            raise DeviceMemoryError(f"{what}; or {without}") from error
        reason = " ".join(str(error).split())[:160]  # "no kernel image is available": torch has no code for it
        raise SetupError(f"{name} does not compute with torch {torch.__version__} ({reason}): {without}") from error
    if total != 4096 * 4095 // 2:
        raise SetupError(f"{name} computes wrongly (a sum came out as {total}): the card is faulty; {without}")


def speed(device: torch.device) -> float:
    """Matrix products of 1024 x 1024 numbers in a second, in float32: the best of a few rounds of a moment."""
    import torch

    matrix, best = torch.ones(1024, 1024, device=device), 0.0
    for power in range(8):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(2**power):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
        best = max(best, 2**power / (time.perf_counter() - begun))
    return best


def unfinished(devices: Iterable[torch.device], seconds: float) -> torch.device | None:
    """The first device whose current stream is still busy after this many seconds in which this process ran, if any.

    Asked again and again: a wait for a device that has hung never ends, and no signal is heard in it.
    """
    import torch

    waited, before = 0.0, time.monotonic()
    for device in devices:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        while not event.query():
            now = time.monotonic()
            waited += min(now - before, STOPPED)
            before = now
            if waited > seconds:
                return device
            time.sleep(1e-4)
    return None


def edges(devices: Sequence[torch.device]) -> list[tuple[torch.device, torch.device]]:
    """The ways that one process's copies take: between neighbours and to and from the first, each way once."""
    first = devices[0]
    ways = [*pairwise(devices), *((first, device) for device in devices[1:])]
    both = [way for a, b in ways for way in ((a, b), (b, a))]
    return [way for way in dict.fromkeys(both) if way[0] != way[1]]


def copies(source: torch.device, target: torch.device, pattern: int) -> bool:
    """Whether a copy from card to card arrives, compared through the host.

    The target is written over first: memory that held the same numbers before would hide a copy that does nothing.
    """
    import torch

    numbers = torch.arange(PATTERN, dtype=torch.int32) * 2 + 2 * pattern * PATTERN + 1
    there, here = numbers.to(source), torch.zeros(PATTERN, dtype=torch.int32, device=target)
    here.copy_(there, non_blocking=True)
    return torch.equal(here.cpu(), numbers)


def check_copies(ways: Sequence[tuple[torch.device, torch.device]]) -> None:
    """Copy a pattern along each way. Raises SetupError where copies between cards come out wrong."""
    wrong = [f"{a} to {b}" for number, (a, b) in enumerate(ways) if not copies(a, b, number + 1)]
    if wrong:
        raise SetupError(
            f"copies from card to card come out wrong ({', '.join(wrong[:4])}{' ...' * (len(wrong) > 4)}): switch the "
            "IOMMU or PCIe ACS off; until then train with NCCL_P2P_DISABLE=1 and mode=ddp, or on one card"
        )
