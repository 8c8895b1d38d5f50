"""Each card, the links between them, and whether it computes and copies rightly."""

from __future__ import annotations

import glob
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from typing import TYPE_CHECKING, Any

from trainer.commands.doctor.findings import Findings
from trainer.devices import cards, health

if TYPE_CHECKING:
    import torch

CARDS = "cards"
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI's numbers: a maker, and the class of graphics and 3D controllers
GIB = 2**30


def check_cards(report: Findings) -> int:
    """Rows of every card and of the ways between them; returns how many torch can use."""
    here = cards.detect()
    if here.fault is not None:
        report.problem(str(here.fault))
    if not here.count:
        nodes, _ = cards.device_nodes()
        report.row(CARDS, "none", "torch can use none of those here" if here.fault else "training runs on the CPU")
        if not nodes and (lost := _without_driver()):
            report.problem(
                f"an NVIDIA card is on the PCI bus ({lost}) but no driver serves it: install NVIDIA's driver (Ubuntu: "
                "sudo ubuntu-drivers install) and restart; until then training runs on the CPU"
            )
        return 0
    import torch

    devices = [torch.device("cuda", index) for index in range(here.count)]
    usable = [device for device in devices if _card(report, device, here.count)]
    if len(usable) > 1:
        _links(report, usable)
    return len(usable) if len(usable) == here.count else 0


def _card(report: Findings, device: torch.device, count: int) -> bool:
    """A card's row; whether it computes."""
    before = len(report.problems)
    report.trying(str(device), health.check_card, device, count)
    computes = len(report.problems) == before
    about = report.trying(str(device), _about, device) or "cannot be asked"
    report.row(CARDS, str(device), f"{about}, {'computes correctly' if computes else 'CANNOT BE USED'}")
    _managed(report, device)
    return computes


def _about(device: torch.device) -> str:
    import torch

    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    return f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, compute capability {major}.{minor}"


def _links(report: Findings, devices: list[torch.device]) -> None:
    """Which cards reach which directly, and whether copies arrive."""
    import torch

    reaches = torch.cuda.can_device_access_peer
    for device in devices:
        peers = [str(other) for other in devices if other != device and reaches(device, other)]
        reach = "all others" if len(peers) == len(devices) - 1 else ", ".join(peers) or "none (through the host)"
        report.row("between cards", f"{device} reaches directly", reach)
    ways = list(permutations(devices, 2))
    before = len(report.problems)
    report.trying("copies between cards", health.check_copies, ways)
    right = len(report.problems) == before
    report.row("between cards", "copies", f"right in all {len(ways)} ways" if right else "WRONG, see below")


def _managed(report: Findings, device: torch.device) -> None:
    """What NVIDIA's management library adds, where nvidia-ml-py is installed and knows the card."""
    ask = _asking(device)
    mig = ask("nvmlDeviceGetMigMode")
    if mig is not None and mig[0]:
        report.row(CARDS, "", "divided (MIG): a process sees one part")
    errors = ask("nvmlDeviceGetTotalEccErrors", 1, 0)  # uncorrected, since the driver was loaded
    if errors:
        had = f"{device} has had {errors} uncorrected memory errors"
        report.problem(f"{had}: sudo nvidia-smi --gpu-reset, or leave it out")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    slow = dict.fromkeys(name for bit, name in THROTTLES.items() if reasons & bit)
    if slow:
        report.row(CARDS, "", f"slowed down by: {', '.join(slow)}")
    active = sum(ask("nvmlDeviceGetNvLinkState", link) == 1 for link in range(18))
    if active:
        report.row(CARDS, "", f"NVLink: {active} links active")


THROTTLES = {0x8: "the hardware", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}


def _asking(device: torch.device) -> Callable[..., Any]:
    """Asks NVIDIA's management library of a card: a function's name and arguments give its answer.

    None for what the card does not know, and for everything where nvidia-ml-py is not installed or lacks the card.
    """
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # whatever it is, it is no reason to end a run
        return lambda *_: None

    def ask(function: str, *args: Any) -> Any:
        with suppress(Exception):  # not every card knows everything
            return getattr(pynvml, function)(card, *args)
        return None

    return ask


def _without_driver() -> str:
    """The PCI address of an NVIDIA graphics card."""
    for vendor in sorted(glob.glob("/sys/bus/pci/devices/*/vendor")):
        with suppress(OSError), open(vendor) as maker, open(vendor.replace("/vendor", "/class")) as kind:
            if maker.read().strip() == NVIDIA and kind.read().startswith(DISPLAY):
                return vendor.split("/")[-2]
    return ""
