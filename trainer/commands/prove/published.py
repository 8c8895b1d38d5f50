"""What others published of the same cards, by torch's own name of a card; of others nothing is known."""

from __future__ import annotations

from typing import Any

# Bytes a second to and from a card's memory, from NVIDIA's data sheets.
PEAK_BANDWIDTH = {
    "NVIDIA H200": 4800e9, "NVIDIA H100 80GB HBM3": 3350e9, "NVIDIA H100 PCIe": 2000e9,
    "NVIDIA A100-SXM4-40GB": 1555e9, "NVIDIA A100-SXM4-80GB": 2039e9, "NVIDIA A100-PCIE-40GB": 1555e9,
    "NVIDIA A100 80GB PCIe": 1935e9, "NVIDIA L40S": 864e9, "NVIDIA L40": 864e9, "NVIDIA L4": 300e9,
    "NVIDIA A40": 696e9, "NVIDIA A30": 933e9, "NVIDIA A10": 600e9, "Tesla V100-SXM2-16GB": 900e9,
    "Tesla V100-SXM2-32GB": 900e9, "Tesla V100-PCIE-16GB": 900e9, "Tesla V100-PCIE-32GB": 900e9, "Tesla T4": 320e9,
}  # fmt: skip
SCRIPT = {
    "what": "NVIDIA's own PyTorch script, mixed precision, photos read from disk, container 21.03",
    "source": "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
}
IMAGES_PER_SEC = {  # of training: card, network, number of cards
    ("NVIDIA A100-SXM4-80GB", "resnet50", 1): 2470,
    ("NVIDIA A100-SXM4-80GB", "resnet50", 8): 16621,
    ("Tesla V100-SXM2-16GB", "resnet50", 1): 1200,
    ("Tesla V100-SXM2-16GB", "resnet50", 8): 8322,
    ("Tesla V100-SXM2-32GB", "resnet50", 1): 1156,
    ("Tesla V100-SXM2-32GB", "resnet50", 8): 8056,
}


def published(card: str, model: str, devices: int) -> list[dict[str, Any]]:
    """Figures of this network on as many of this card."""
    rate = IMAGES_PER_SEC.get((card, model, devices))
    return [] if rate is None else [{"images_per_sec": rate, **SCRIPT}]
