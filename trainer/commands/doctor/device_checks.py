"""Each card, and whether it computes and copies rightly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards, health

CARDS = "cards"
GIB = 2**30
ALIKE = 0.85  # times as fast as the fastest card that others may be, without a word of it


def check_cards(report: Findings) -> int:
    """Rows of every card and of the copies between them; returns how many there are where all compute."""
    here = cards.detect()
    if here.fault is not None:
        report.problem(str(here.fault))
    if not here.count:
        report.row(CARDS, "none", "torch can use none of those here" if here.fault else "training runs on the CPU")
        return 0
    import torch

    devices, before = [torch.device("cuda", index) for index in range(here.count)], len(report.problems)
    for device in devices:
        known = len(report.problems)
        report.trying(str(device), health.check_card, device, here.count)
        computes = "computes correctly" if len(report.problems) == known else "CANNOT BE USED"
        free, total = report.trying(str(device), torch.cuda.mem_get_info, device) or (0, 0)
        name = report.trying(str(device), torch.cuda.get_device_name, device)
        report.row(CARDS, str(device), f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {computes}")
    if len(report.problems) > before:
        return 0
    if ways := list(permutations(devices, 2)):
        report.trying("copies between cards", health.check_copies, ways)
        right = len(report.problems) == before
        report.row(CARDS, "copies", f"right in all {len(ways)} ways" if right else "WRONG, see below")
        speeds = [report.trying(f"speed of {device}", health.speed, device) or 0.0 for device in devices]
        report.row(CARDS, "speed", how_alike(list(map(str, devices)), speeds))
    return here.count


def how_alike(names: Sequence[str], speeds: Sequence[float]) -> str:
    """Whether the cards are as fast, and what ranks of unlike ones gain by unequal parts of a batch."""
    slow, fast = speeds.index(min(speeds)), speeds.index(max(speeds))
    if speeds[slow] >= ALIKE * speeds[fast] or not speeds[slow]:
        return "all as fast, in matrix products" if speeds[slow] else "not measured"
    gain = sum(speeds) / len(speeds) / speeds[slow]
    return (
        f"{names[slow]} is {speeds[slow] / speeds[fast]:.2g} times as fast as {names[fast]}, in matrix products: "
        f"shares=auto gives up to {gain:.2f} times the images/s of equal parts"
    )
