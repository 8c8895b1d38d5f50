"""Set torch's switches for a recipe's `precision`, and find the precision that a device uses."""

from contextlib import AbstractContextManager, nullcontext

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass: autocast, or a null context for fp32 and tf32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def set_precision(precision: str) -> None:
    """Enable TF32 on CUDA for precision=tf32, and disable it for all other values.

    By default, torch uses TF32 for convolutions, but not for matrix products.
    """
    # These older switches also set the newer ones (`fp32_precision`), and compiled code reads both.
    # If the newer ones are set, reading the older ones raises an error (torch 2.14).
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def has_tf32(device: torch.device) -> bool:
    """Return whether the device is an NVIDIA GPU with TF32: Ampere or newer."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def is_emulated(precision: str, device: torch.device) -> bool:
    """Return whether a device is known to have no instructions for a precision.

    NVIDIA GPUs before Ampere emulate bf16. CPUs with AVX2 but without AVX-512 emulate bf16 and
    fp16: a matrix product in bf16 takes five times as long as in fp32.
    """
    if precision not in AUTOCAST:
        return False
    if device.type == "cuda":
        return precision == "bf16" and torch.version.hip is None and not has_tf32(device)
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision that a device computes in: fp32 for tf32 if it has no TF32."""
    if precision == "tf32" and not has_tf32(device):
        return "fp32"
    return precision


def describe_precision(precision: str, device: torch.device) -> str | None:
    """Return a note for the user if another precision would be faster, else None."""
    if precision == "fp32" and has_tf32(device):
        return "fp32 in full: precision=tf32 or bf16 is faster on this card"
    return None
