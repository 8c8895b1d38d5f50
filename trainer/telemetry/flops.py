"""Floating point operations of a model, and the published peaks of cards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.devices.precision import computed_in

# Dense peaks in TFLOP/s from NVIDIA's data sheets, of GeForce and RTX from its white papers on Ampere (GA102), Ada and
# Blackwell, by torch's name of the card: a chip has others in other shapes, and a part of one (MIG) none. fp32 is
# without tensor cores, the 16-bit ones add up in fp32; what a card computes by other means only has no peak.
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_HOPPER, _AMPERE = (67.0, 495.0, 989.0, 989.0), (19.5, 156.0, 312.0, 312.0)
_NVL = (60.0, 417.5, 835.5, 835.5)
PEAK_TFLOPS: dict[str, tuple[float | None, ...]] = {
    "NVIDIA B200": (75.0, 1125.0, 2250.0, 2250.0),
    "NVIDIA GH200 480GB": _HOPPER,
    "NVIDIA GH200 144G HBM3e": _HOPPER,
    "NVIDIA H200": _HOPPER,
    "NVIDIA H200 NVL": _NVL,
    "NVIDIA H100 NVL": _NVL,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H100 PCIe": (51.0, 378.0, 756.0, 756.0),
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
    "NVIDIA L40S": (91.6, 183.0, 362.0, 362.0),
    "NVIDIA L40": (90.5, 90.5, 181.0, 181.0),
    "NVIDIA L4": (30.3, 60.0, 121.0, 121.0),
    "NVIDIA A40": (37.4, 74.8, 149.7, 149.7),
    "NVIDIA A30": (10.3, 82.0, 165.0, 165.0),
    "NVIDIA A10": (31.2, 62.5, 125.0, 125.0),
    "NVIDIA RTX 6000 Ada Generation": (91.1, 182.1, 364.2, 364.2),
    "NVIDIA RTX A6000": (38.7, 77.4, 154.8, 154.8),
    "NVIDIA GeForce RTX 5090": (104.8, 104.8, 209.5, 209.5),
    "NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, 165.2),
    "NVIDIA GeForce RTX 3090": (35.6, 35.6, 71.2, 71.2),
    "Tesla V100-SXM2-16GB": (15.7, None, 125.0, None),
    "Tesla V100-SXM2-32GB": (15.7, None, 125.0, None),
    "Tesla V100-PCIE-16GB": (14.0, None, 112.0, None),
    "Tesla V100-PCIE-32GB": (14.0, None, 112.0, None),
    "Tesla T4": (8.1, None, 65.0, None),
}
# Bytes a second to and from a card's memory, from NVIDIA's data sheets.
PEAK_BANDWIDTH = {
    "NVIDIA H200": 4800e9, "NVIDIA H100 80GB HBM3": 3350e9, "NVIDIA H100 PCIe": 2000e9,
    "NVIDIA A100-SXM4-40GB": 1555e9, "NVIDIA A100-SXM4-80GB": 2039e9, "NVIDIA A100-PCIE-40GB": 1555e9,
    "NVIDIA A100 80GB PCIe": 1935e9, "NVIDIA L40S": 864e9, "NVIDIA L40": 864e9, "NVIDIA L4": 300e9,
    "NVIDIA A40": 696e9, "NVIDIA A30": 933e9, "NVIDIA A10": 600e9, "Tesla V100-SXM2-16GB": 900e9,
    "Tesla V100-SXM2-32GB": 900e9, "Tesla V100-PCIE-16GB": 900e9, "Tesla V100-PCIE-32GB": 900e9, "Tesla T4": 320e9,
}  # fmt: skip


def training_flops(model: nn.Module, shape: Sequence[int]) -> int:
    """Those of training on it: 3 x forward (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B), or, where
    parameters are frozen, forward and the backward passes that are left. Raises as `pass_flops`.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return 3 * pass_flops(model, shape)
    return pass_flops(model, shape, backward=True)


def _convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """As many as forward for each of the gradients of inputs and weights; torch's own leaves groups out of account."""
    transposed, wanted = rest[4], rest[7]
    return int(sum(wanted[:2]) * 2 * math.prod(x if transposed else gradient) * math.prod(weight[1:]))


def pass_flops(model: nn.Module, shape: Sequence[int], backward: bool = False) -> int:
    """Floating point operations of one pass forward, and `backward`, on a batch of `shape`, counted on shapes alone.

    Raises NotImplementedError: the model has an operator that cannot run on them.
    """
    probe = copy.deepcopy(model).to("meta").eval()
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward}
    )
    with torch.set_grad_enabled(backward), counter:
        output = probe(torch.empty(tuple(shape), device="meta"))
        if backward:
            output.sum().backward()
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's published dense peak in FLOP/s in a precision, or None where it is not known."""
    if device.type != "cuda":
        return None
    known = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    peak = known[_PRECISIONS.index(computed_in(precision, device))] if known else None
    return None if peak is None else 1e12 * peak
