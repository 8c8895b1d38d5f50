"""What a recipe's `precision` means to torch, and what a device makes of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLEAR = 1.2  # times as fast that a precision has to be in a convolution to be advised
LEAST, PAIRS = 2, 24  # of convolutions that are timed
ENOUGH = 0.07  # seconds after which no further pair is timed
NEAR = 4  # the fastest times that have to be alike
SCATTER = 1.4  # times as much that they may be apart


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
    if precision in AUTOCAST and device.type == "cpu" and (times := 1 / cpu_speed(precision)) >= CLEAR:
        return f"precision=fp32 is {times:,.1f} times as fast as {precision} in convolutions on this processor"
    return None


@functools.cache
def cpu_speed(precision: str) -> float:
    """How many times as fast as in fp32 this CPU computes in bf16 or fp16: measured, for its flags do not say.

    A processor that lists avx512_bf16 may multiply in bf16 at half of fp32's speed, or at twice. A convolution with its
    gradients is timed in both, in turn, and the fastest of each counts. About 0.1 s, or two pairs if they take longer:
    fp16 can take 200 times as long as fp32.

    Other programs must not change what it says. So it is one thread, whose own time is counted: what it waits while
    others have the core is not, and threads of one convolution would wait for each other.

    Returns:
        nan where the times scatter too much to say: it is neither faster nor slower than anything.
    """
    other, fp32 = _convolution(AUTOCAST[precision]), _convolution(torch.float32)
    times: dict[Callable[[], object], list[float]] = {other: [], fp32: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for compute in times:  # finds its kernels, which a run does anyway
            compute()
        end = time.perf_counter() + ENOUGH
        while (pairs := len(times[fp32])) < LEAST or (pairs < PAIRS and time.perf_counter() < end):
            for compute, took in times.items():
                began = time.thread_time()
                compute()
                took.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return _ratio(times[fp32], times[other])


def _ratio(fp32: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast the other is, by the fastest of each; nan where the next fastest say something else."""
    (fastest, near), (others, others_near) = (
        (times[0], times[min(len(times), NEAR) - 1]) for times in (sorted(fp32), sorted(other))
    )
    low, high = fastest / others_near, near / others
    advice = [(ratio >= CLEAR) - (ratio <= 1 / CLEAR) for ratio in (low, high)]
    return fastest / others if advice[0] == advice[1] or high <= SCATTER * low else float("nan")


def _convolution(kind: torch.dtype) -> Callable[[], object]:
    """A small convolution and its gradients, of ones: nothing random is drawn."""
    with torch.inference_mode(False):
        images, weight = (
            torch.ones(shape, dtype=kind).to(memory_format=torch.channels_last).requires_grad_()
            for shape in ((2, 64, 16, 16), (64, 64, 3, 3))
        )

    def compute() -> object:
        with torch.inference_mode(False), torch.enable_grad():
            out = F.conv2d(images, weight, padding=1)
            return torch.autograd.grad(out, (images, weight), out)

    return compute
