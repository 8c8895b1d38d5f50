"""What others published of the same cards: limits from data sheets, and images a second with their source.

Nothing is told of a card that is not listed by torch's own name of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Bytes a second to and from a card's memory, from NVIDIA's data sheets.
PEAK_GIGABYTES = {
    "NVIDIA H200": 4800, "NVIDIA H100 80GB HBM3": 3350, "NVIDIA H100 PCIe": 2000, "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100-SXM4-80GB": 2039, "NVIDIA A100-PCIE-40GB": 1555, "NVIDIA A100 80GB PCIe": 1935, "NVIDIA L40S": 864,
    "NVIDIA L40": 864, "NVIDIA L4": 300, "NVIDIA A40": 696, "NVIDIA A30": 933, "NVIDIA A10": 600,
    "Tesla V100-SXM2-16GB": 900, "Tesla V100-SXM2-32GB": 900, "Tesla V100-PCIE-16GB": 900,
    "Tesla V100-PCIE-32GB": 900, "Tesla T4": 320,
}  # fmt: skip


class Figure(NamedTuple):
    """Training images a second that somebody published."""

    model: str
    devices: int
    images_per_sec: int
    what: str
    source: str


_EXAMPLES = "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5"
_MIXED = "NVIDIA's own PyTorch script, mixed precision, photos read from disk, container 21.03"
PUBLISHED: dict[str, tuple[Figure, ...]] = {
    "NVIDIA A100-SXM4-80GB": (
        Figure("resnet50", 1, 2470, _MIXED, _EXAMPLES),
        Figure("resnet50", 8, 16621, _MIXED, _EXAMPLES),
    ),
    "Tesla V100-SXM2-16GB": (
        Figure("resnet50", 1, 1200, _MIXED, _EXAMPLES),
        Figure("resnet50", 8, 8322, _MIXED, _EXAMPLES),
    ),
    "Tesla V100-SXM2-32GB": (
        Figure("resnet50", 1, 1156, _MIXED, _EXAMPLES),
        Figure("resnet50", 8, 8056, _MIXED, _EXAMPLES),
    ),
}


def beside(card: str, model: str, devices: int) -> list[dict[str, Any]]:
    """Published figures of this network on as many of this card."""
    return [
        {"images_per_sec": figure.images_per_sec, "what": figure.what, "source": figure.source}
        for figure in PUBLISHED.get(card, ())
        if (figure.model, figure.devices) == (model, devices)
    ]


def peak_bandwidth(card: str) -> float | None:
    """Bytes a second; None where it is not known."""
    return 1e9 * PEAK_GIGABYTES[card] if card in PEAK_GIGABYTES else None
