"""Automatic augmentation of whole batches: torchvision's policies and draws, its operations once for many images.

An operation here takes (n, C, H, W) uint8 images and a magnitude each, and gives what torchvision gives for each image
alone, to the last bit on the CPU (from 8 x 8 pixels on): a test holds them against each other.
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
from torchvision.transforms.v2.functional._geometry import _get_inverse_affine_matrix

from trainer.data.photos.copies import on_device

Step = tuple[str, float]  # an operation's name in torchvision, and its magnitude


def recorded(policy: Any) -> Callable[[Tensor], list[Step]]:
    """What a policy of torchvision draws for an image, which is only asked for its size."""
    steps: list[Step] = []

    def note(image: Tensor, operation: str, magnitude: float, **_: Any) -> Tensor:
        steps.append((operation, magnitude))
        return image

    policy._apply_image_or_video_transform = note

    def draw(image: Tensor) -> list[Step]:
        steps.clear()
        policy.forward(image)
        return [step for step in steps if step[0] != "Identity"]

    return draw


def apply(images: Tensor, plans: Sequence[Sequence[Step]]) -> Tensor:
    """Do to each of the (n, H, W, C) uint8 images, in place, what its plan says, one operation on many at a time."""
    for depth in range(max(map(len, plans), default=0)):
        listed = sorted((plan[depth][0], row, plan[depth][1]) for row, plan in enumerate(plans) if len(plan) > depth)
        rows = on_device(torch.tensor([row for _, row, _ in listed]), images.device)
        chosen = images.index_select(0, rows).permute(0, 3, 1, 2)
        done, stop = [], 0
        for operation, group in groupby(listed, key=lambda one: one[0]):
            magnitudes = [magnitude for _, _, magnitude in group]
            start, stop = stop, stop + len(magnitudes)
            done.append(OPERATIONS[operation](chosen[start:stop], magnitudes).permute(0, 2, 3, 1))
        images.index_copy_(0, rows, torch.cat(done))
    return images


def _each(values: Sequence[float], images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number an image, (n, 1, 1, 1)."""
    return on_device(torch.tensor(values, dtype=dtype), images.device)[:, None, None, None]


def _added(base: Tensor, other: Tensor, shares: Sequence[float]) -> Tensor:
    """base + share x other as uint8, rounded once as torch's `add` with an alpha does, where pixels lie on the edge."""
    share = _each(shares, base).double()
    return (base.double() + share * other.double()).float().clamp_(0, 255).to(torch.uint8)


def _brightness(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    return images.mul(_each([1.0 + m for m in magnitudes], images)).clamp_(0, 255).to(torch.uint8)


def _colour(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    if images.shape[1] == 1:
        return images
    own = _each([1.0 + m for m in magnitudes], images)
    return _added(images * own, vision.rgb_to_grayscale(images), [1.0 - (1.0 + m) for m in magnitudes])


def _contrast(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    grey = vision.rgb_to_grayscale(images) if images.shape[1] == 3 else images
    own = _each([1.0 + m for m in magnitudes], images)
    mean = grey.float().mean(dim=(1, 2, 3), keepdim=True)
    return _added(images * own, mean, [1.0 - (1.0 + m) for m in magnitudes])


def _sharpness(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    if min(images.shape[-2:]) <= 2:
        return images
    whole = images.float()  # sums of whole numbers: exact, where a convolution on a GPU may round to TF32
    lines = whole[..., :-2, :] + whole[..., 1:-1, :] + whole[..., 2:, :]
    inner = whole[..., 1:-1, 1:-1]
    blurred = (lines[..., :-2] + lines[..., 1:-1] + lines[..., 2:] + 4 * inner).div_(13).round_()
    sharp = images.clone()
    sharp[..., 1:-1, 1:-1] = _added(inner, blurred - inner, [1.0 - (1.0 + m) for m in magnitudes])
    return sharp


def _posterized(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    bits = [int(m) for m in magnitudes]
    return images & _each([((1 << b) - 1) << (8 - b) for b in bits], images, torch.uint8)


def _solarized(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    return torch.where(images >= _each([255.0 * m for m in magnitudes], images), images.bitwise_not(), images)


def _moved(images: Tensor, matrices: Sequence[Sequence[float]]) -> Tensor:
    """Sample each image, bilinearly, black outside, where its inverse affine matrix says."""
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


def _sheared(images: Tensor, magnitudes: Sequence[float], axis: int) -> Tensor:
    height, width = images.shape[-2:]
    corner = [-0.5 * width, -0.5 * height]
    angles = [math.degrees(math.atan(m)) for m in magnitudes]
    shears = [[angle, 0.0] if axis == 0 else [0.0, angle] for angle in angles]
    return _moved(images, [_get_inverse_affine_matrix(corner, 0.0, [0.0, 0.0], 1.0, shear) for shear in shears])


def _shifted(images: Tensor, magnitudes: Sequence[float], axis: int) -> Tensor:
    shifts = [[float(int(m)), 0.0] if axis == 0 else [0.0, float(int(m))] for m in magnitudes]
    return _moved(images, [_get_inverse_affine_matrix([0.0, 0.0], 0.0, shift, 1.0, [0.0, 0.0]) for shift in shifts])


def _rotated(images: Tensor, magnitudes: Sequence[float]) -> Tensor:
    angles = [m % 360 for m in magnitudes]
    matrices = [_get_inverse_affine_matrix([0.0, 0.0], -angle, [0.0, 0.0], 1.0, [0.0, 0.0]) for angle in angles]
    turned = _moved(images, matrices)
    for angle in sorted({angle for angle in angles if angle % 90 == 0}):  # torchvision moves whole pixels, where it can
        rows = on_device(torch.tensor([row for row, own in enumerate(angles) if own == angle]), images.device)
        whole = vision.rotate(images[rows], angle, interpolation=vision.InterpolationMode.BILINEAR)
        turned.index_copy_(0, rows, whole)
    return turned


OPERATIONS: dict[str, Callable[[Tensor, Sequence[float]], Tensor]] = {
    "ShearX": lambda images, magnitudes: _sheared(images, magnitudes, 0),
    "ShearY": lambda images, magnitudes: _sheared(images, magnitudes, 1),
    "TranslateX": lambda images, magnitudes: _shifted(images, magnitudes, 0),
    "TranslateY": lambda images, magnitudes: _shifted(images, magnitudes, 1),
    "Rotate": _rotated,
    "Brightness": _brightness,
    "Color": _colour,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterized,
    "Solarize": _solarized,
    "AutoContrast": lambda images, _: vision.autocontrast(images),
    "Equalize": lambda images, _: vision.equalize(images),
    "Invert": lambda images, _: images.bitwise_not(),
}
