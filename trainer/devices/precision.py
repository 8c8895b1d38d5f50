"""What a recipe's `precision` means to torch, and what a device makes of it."""

from __future__ import annotations

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(precision: str) -> None:
    """Let fp32 matrix products and convolutions on CUDA round to TF32, or keep them in full fp32.

    torch's own default is a mixture: convolutions in TF32, matrix products in fp32. Set by the older names of torch's
    switches: they set the newer ones (`fp32_precision`) too, and compiled code reads both. Set by the newer names, the
    older raise when they are read (torch 2.14).
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def has_tf32(device: torch.device) -> bool:
    """Whether the device is an NVIDIA card with TF32: Ampere and newer."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def has_bf16(device: torch.device) -> bool:
    """Whether a card computes in bf16 itself: NVIDIA's before Ampere emulate it, slowly."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def computed_in(precision: str, device: torch.device) -> str:
    """The precision that a device really computes in: TF32 is fp32 where there is none."""
    return "fp32" if precision == "tf32" and not has_tf32(device) else precision


def note(precision: str, device: torch.device) -> str | None:
    """What to know of a precision on a device; None where there is nothing."""
    if computed_in(precision, device) != precision:
        return f"{precision} is computed as fp32: this device has no TF32"
    if precision == "fp32" and has_tf32(device):
        return "fp32 in full: precision=tf32 or bf16 is faster on this card"
    return None
