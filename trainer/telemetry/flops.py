"""Floating point operations of a model, and published peak rates of GPUs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.devices.precision import resolve_precision

# Published rates of GPUs, from NVIDIA's data sheets; for GeForce and RTX, from the white papers on
# Ampere (GA102), Ada and Blackwell. The key is the name that torch reports, because the rates of a
# chip depend on the form factor, and there are none for a MIG partition. The first columns are
# dense peak rates in TFLOP/s: fp32 without tensor cores, 16-bit formats with fp32 accumulation, and
# "-" for a format that the GPU only emulates. The last column is the memory bandwidth in GB/s, for
# the GPUs on which the command `prove` compares it.
CARDS = """
    card                           |   fp32   tf32   fp16   bf16   GB/s
    NVIDIA B200                    |     75   1125   2250   2250      -
    NVIDIA GH200 480GB             |     67    495    989    989      -
    NVIDIA GH200 144G HBM3e        |     67    495    989    989      -
    NVIDIA H200                    |     67    495    989    989   4800
    NVIDIA H200 NVL                |     60  417.5  835.5  835.5      -
    NVIDIA H100 NVL                |     60  417.5  835.5  835.5      -
    NVIDIA H100 80GB HBM3          |     67    495    989    989   3350
    NVIDIA H100 PCIe               |     51    378    756    756   2000
    NVIDIA A100-SXM4-40GB          |   19.5    156    312    312   1555
    NVIDIA A100-SXM4-80GB          |   19.5    156    312    312   2039
    NVIDIA A100-PCIE-40GB          |   19.5    156    312    312   1555
    NVIDIA A100 80GB PCIe          |   19.5    156    312    312   1935
    NVIDIA L40S                    |   91.6    183    362    362    864
    NVIDIA L40                     |   90.5   90.5    181    181    864
    NVIDIA L4                      |   30.3     60    121    121    300
    NVIDIA A40                     |   37.4   74.8  149.7  149.7    696
    NVIDIA A30                     |   10.3     82    165    165    933
    NVIDIA A10                     |   31.2   62.5    125    125    600
    NVIDIA RTX 6000 Ada Generation |   91.1  182.1  364.2  364.2      -
    NVIDIA RTX A6000               |   38.7   77.4  154.8  154.8      -
    NVIDIA GeForce RTX 5090        |  104.8  104.8  209.5  209.5      -
    NVIDIA GeForce RTX 4090        |   82.6   82.6  165.2  165.2      -
    NVIDIA GeForce RTX 3090        |   35.6   35.6   71.2   71.2      -
    Tesla V100-SXM2-16GB           |   15.7      -    125      -    900
    Tesla V100-SXM2-32GB           |   15.7      -    125      -    900
    Tesla V100-PCIE-16GB           |     14      -    112      -    900
    Tesla V100-PCIE-32GB           |     14      -    112      -    900
    Tesla T4                       |    8.1      -     65      -    320
"""


def look_up_published(card: str, column: str) -> float | None:
    """Return the rate of a GPU in a column of `CARDS`, in FLOP/s or B/s; None if unknown."""
    lines = CARDS.strip().splitlines()
    (_, titles), *rows = [line.split("|") for line in lines]
    for name, figures in rows:
        if name.strip() == card:
            figure = dict(zip(titles.split(), figures.split(), strict=True))[column]
            scale = 1e9 if column == "GB/s" else 1e12
            if figure != "-":
                return scale * float(figure)
    return None


def count_training_flops(model: nn.Module, shape: Sequence[int]) -> int:
    """Return the floating point operations of a training step on a batch of `shape`.

    A step costs as much as three forward passes (Chowdhery et al., "PaLM", arXiv:2204.02311,
    appendix B). If some parameters are frozen, the forward pass and the remaining operations of the
    backward pass are counted instead.

    Args:
        model: The model on the meta device. Its mode and its gradients change.
        shape: Shape of the batch.

    Raises:
        NotImplementedError: The model has an operator that cannot run on the meta device.
    """
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward}
    )
    with torch.set_grad_enabled(is_frozen), counter:
        output = model.eval()(torch.empty(tuple(shape), device="meta"))
        if is_frozen:
            output.sum().backward()
    operations = int(counter.get_total_flops())
    return operations if is_frozen else 3 * operations


def _convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    *rest: Any,
    **_: Any,
) -> int:
    """Count the operations of a convolution's backward pass.

    The gradient of the input and the gradient of the weight each cost as much as a forward pass.
    This replaces FlopCounterMode's own formula, which ignores groups.
    """
    is_transposed = rest[4]
    output_mask = rest[7]
    positions = math.prod(x if is_transposed else gradient)
    gradients = sum(output_mask[:2])
    return int(gradients * 2 * positions * math.prod(weight[1:]))


def look_up_peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the published dense peak of a device in FLOP/s; None if unknown.

    Args:
        device: Device of any type; only GPUs have a published peak.
        precision: Precision of the recipe.
    """
    if device.type != "cuda":
        return None
    return look_up_published(
        torch.cuda.get_device_name(device), resolve_precision(precision, device)
    )
