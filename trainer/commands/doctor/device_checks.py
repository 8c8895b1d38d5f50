"""Each card, and whether it computes and copies rightly."""

from __future__ import annotations

import glob
from contextlib import suppress
from itertools import permutations

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards, health

CARDS = "cards"
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI's numbers: a maker, and the class of graphics and 3D controllers
GIB = 2**30


def check_cards(report: Findings) -> int:
    """Rows of every card and of the copies between them; returns how many there are where all compute."""
    here = cards.detect()
    if here.fault is not None:
        report.problem(str(here.fault))
    if not here.count:
        report.row(CARDS, "none", "torch can use none of those here" if here.fault else "training runs on the CPU")
        if not cards.device_nodes()[0] and (lost := _without_driver()):
            report.problem(
                f"an NVIDIA card is on the PCI bus ({lost}) but no driver serves it: install NVIDIA's driver (Ubuntu: "
                "sudo ubuntu-drivers install) and restart; until then training runs on the CPU"
            )
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


def _without_driver() -> str:
    """The PCI address of an NVIDIA graphics card."""
    for vendor in sorted(glob.glob("/sys/bus/pci/devices/*/vendor")):
        with suppress(OSError), open(vendor) as maker, open(vendor.replace("/vendor", "/class")) as kind:
            if maker.read().strip() == NVIDIA and kind.read().startswith(DISPLAY):
                return vendor.split("/")[-2]
    return ""
