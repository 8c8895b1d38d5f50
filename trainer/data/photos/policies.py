"""Automatic augmentation of whole batches: torchvision's policies and draws, its operations once for many images.

An operation here takes (n, C, H, W) uint8 images and a magnitude each, and gives what torchvision gives for each image
alone, to the last bit on the CPU (from 8 x 8 pixels on): a test holds them against each other.

On one CPU thread, torchvision image by image takes 2.7 to 3.0 times as long for 256 images of 32 x 32, 1.5 to 1.8 times
for 64 x 64, and 0.6 times for 224 x 224: `BATCHED` says up to which size a batch goes through here. On a GPU, image by
image means some ten kernels for each image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data.photos.copies import on_device

BATCHED = 96 * 96  # pixels of an image: on a CPU torchvision's own operations are faster for larger ones
Step = tuple[str, float]  # an operation's name in torchvision, and its magnitude


def recorded(policy: Any) -> Callable[[Tensor], list[Step]]:
    """A function that draws a policy's steps for an image, of which only the size matters."""
    steps: list[Step] = []

    def record(image: Tensor, operation: str, magnitude: float, **_: Any) -> Tensor:
        steps.append((operation, magnitude))
        return image

    policy._apply_image_or_video_transform = record

    def draw(image: Tensor) -> list[Step]:
        steps.clear()
        policy.forward(image)
        return [step for step in steps if step[0] != "Identity"]

    return draw


def apply(images: Tensor, plans: Sequence[Sequence[Step]]) -> Tensor:
    """Apply each plan to its image of (n, H, W, C) uint8, in place, one operation to many images at a time."""
    for depth in range(max(map(len, plans), default=0)):
        listed = sorted((plan[depth][0], row, plan[depth][1]) for row, plan in enumerate(plans) if len(plan) > depth)
        rows = on_device(torch.tensor([row for _, row, _ in listed]), images.device)
        chosen = images.index_select(0, rows).permute(0, 3, 1, 2)
        done, stop = [], 0
        for operation, group in groupby(listed, key=lambda step: step[0]):
            magnitudes = [magnitude for _, _, magnitude in group]
            start, stop = stop, stop + len(magnitudes)
            done.append(OPERATIONS[operation](chosen[start:stop], magnitudes).permute(0, 2, 3, 1))
        images.index_copy_(0, rows, torch.cat(done))
    return images


def _column(values: Sequence[float], images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number for each image, (n, 1, 1, 1)."""
    return on_device(torch.tensor(values, dtype=dtype), images.device)[:, None, None, None]


def _add(base: Tensor, other: Tensor, magnitudes: Sequence[float]) -> Tensor:
    """base - magnitude x other as uint8, rounded once, as torch's `add` with an alpha rounds."""
    alpha = _column([1.0 - (1.0 + m) for m in magnitudes], base).double()
    return (base.double() + alpha * other.double()).float().clamp_(0, 255).to(torch.uint8)


def _scale(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    return images.mul(_column([1.0 + m for m in magnitudes], images))


def _colour(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    if images.shape[1] == 1:
        return images
    return _add(_scale(images, magnitudes), vision.rgb_to_grayscale(images), magnitudes)


def _contrast(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    grey = vision.rgb_to_grayscale(images) if images.shape[1] == 3 else images
    return _add(_scale(images, magnitudes), grey.float().mean(dim=(1, 2, 3), keepdim=True), magnitudes)


def _sharpness(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    if min(images.shape[-2:]) <= 2:
        return images
    whole = images.float()  # sums of whole numbers: exact, where a convolution on a GPU may round to TF32
    lines = whole[..., :-2, :] + whole[..., 1:-1, :] + whole[..., 2:, :]
    inner = whole[..., 1:-1, 1:-1]
    blurred = (lines[..., :-2] + lines[..., 1:-1] + lines[..., 2:] + 4 * inner).div_(13).round_()
    sharp = images.clone()
    sharp[..., 1:-1, 1:-1] = _add(inner, blurred - inner, magnitudes)
    return sharp


def _posterize(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    bits = [int(m) for m in magnitudes]
    return images & _column([((1 << b) - 1) << (8 - b) for b in bits], images, torch.uint8)


def _solarize(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    return torch.where(images >= _column([255.0 * m for m in magnitudes], images), images.bitwise_not(), images)


def _affine(images: Tensor, matrices: Sequence[Sequence[float]]) -> Tensor:
    """Sample each image bilinearly, black outside, at its inverse 2 x 3 matrix, of which the origin is the centre."""
    count, _, height, width = images.shape
    # On a GPU in float64, since a product in float32 may round to TF32 and be half a pixel off.
    kind = torch.float64 if images.device.type == "cuda" else torch.float32
    theta = torch.tensor(matrices, dtype=torch.float32).reshape(count, 2, 3).transpose(1, 2)
    theta = on_device((theta / torch.tensor([0.5 * width, 0.5 * height])).to(kind), images.device)
    at = torch.ones(1, height, width, 3, device=images.device)
    at[..., 0] = torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, steps=width, device=images.device)
    at[..., 1] = torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, steps=height, device=images.device)[:, None]
    grid = at.to(kind).view(1, -1, 3).expand(count, -1, -1).bmm(theta).float().view(count, height, width, 2)
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return sampled.round_().to(torch.uint8)


def _shear_x(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    """About the upper left corner, as AutoAugment's authors do."""
    y, slopes = 0.5 * images.shape[-2], [math.tan(angle) for angle in _angles(magnitudes)]
    return _affine(images, [[1.0, slope, slope * y, 0.0, 1.0, 0.0] for slope in slopes])


def _shear_y(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    x, y = 0.5 * images.shape[-1], 0.5 * images.shape[-2]
    slopes = [math.sin(angle) / math.cos(angle) for angle in _angles(magnitudes)]
    return _affine(images, [[1.0, 0.0, 0.0, slope, 1.0, slope * x - y + y] for slope in slopes])


def _angles(magnitudes: Sequence[float]) -> list[float]:
    """In radians, rounded in torchvision's order of operations, as are the sums in which they are used."""
    return [math.radians(math.degrees(math.atan(m))) for m in magnitudes]


def _rotate(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    angles = [m % 360 for m in magnitudes]
    turns = [(math.cos(turn), math.sin(turn)) for turn in map(math.radians, angles)]
    rotated = _affine(images, [[cos, -sin, 0.0, sin, cos, 0.0] for cos, sin in turns])
    for angle in sorted({angle for angle in angles if angle % 90 == 0}):  # torchvision moves whole pixels, where it can
        rows = on_device(torch.tensor([row for row, other in enumerate(angles) if other == angle]), images.device)
        whole = vision.rotate(images[rows], angle, interpolation=vision.InterpolationMode.BILINEAR)
        rotated.index_copy_(0, rows, whole)
    return rotated


OPERATIONS: dict[str, Callable[[Tensor, Sequence[float]], Tensor]] = {
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": lambda images, shifts: _affine(images, [[1.0, 0.0, -int(x), 0.0, 1.0, 0.0] for x in shifts]),
    "TranslateY": lambda images, shifts: _affine(images, [[1.0, 0.0, 0.0, 0.0, 1.0, -int(y)] for y in shifts]),
    "Rotate": _rotate,
    "Brightness": lambda images, magnitudes: _scale(images, magnitudes).clamp_(0, 255).to(torch.uint8),
    "Color": _colour,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": lambda images, _: vision.autocontrast(images),
    "Equalize": lambda images, _: vision.equalize(images),
    "Invert": lambda images, _: images.bitwise_not(),
}
