"""Each card, and whether it computes and copies rightly."""

from __future__ import annotations

from itertools import permutations

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards, health

CARDS = "cards"
GIB = 2**30


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
    return here.count
