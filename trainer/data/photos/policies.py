"""Automatic augmentation of whole batches.

The policies and their random draws are those of torchvision, but each operation here runs once for
many images. An operation accepts images (n, C, H, W) uint8 and one magnitude per image. On the CPU,
for images of at least 8 x 8 pixels, its results equal those of torchvision for single images to the
last bit, which a test checks.

On one CPU thread, torchvision's image-by-image processing of 256 images takes 2.7 to 3.0 times as
long as this module for 32 x 32 pixels, 1.5 to 1.8 times for 64 x 64, and 0.6 times for 224 x 224.
`BATCHED` is the largest size for which this module is used on a CPU. On a GPU, this module is used
for all sizes, because image-by-image processing launches about ten kernels per image.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from trainer.data.photos.copies import copy_to_device

# Maximum number of pixels of an image for which this module is used on a CPU. For larger images,
# torchvision's own operations are faster.
BATCHED = 96 * 96
# One number per image.
Magnitudes = Sequence[float]
# Name of an operation in torchvision, and its magnitude.
Step = tuple[str, float]


def record_steps(policy: Any) -> Callable[[Tensor], list[Step]]:
    """Return a function that draws the steps of `policy` for an image without applying them.

    The draws depend on the size of the image, not on its pixels. This function replaces the
    method of `policy` that applies a step, so `policy` itself no longer changes images.
    """
    steps = []

    def record(image: Tensor, operation: str, magnitude: float, **_: Any) -> Tensor:
        steps.append((operation, magnitude))
        return image

    # torchvision's policies apply every step through this method.
    policy._apply_image_or_video_transform = record

    def draw(image: Tensor) -> list[Step]:
        steps.clear()
        policy.forward(image)
        return [step for step in steps if step[0] != "Identity"]

    return draw


def apply(images: Tensor, plans: Sequence[Sequence[Step]]) -> Tensor:
    """Apply to each image the steps of its plan, in place.

    The n-th steps of all plans run together: each operation runs once, for all images that need it.

    Args:
        images: (n, H, W, C) uint8.
        plans: the steps of each image.
    """
    for number in range(max(map(len, plans), default=0)):
        listed = []
        for row, plan in enumerate(plans):
            if len(plan) > number:
                operation, magnitude = plan[number]
                listed.append((operation, row, magnitude))
        listed.sort()
        rows = copy_to_device(torch.tensor([row for _, row, _ in listed]), images.device)
        chosen = images.index_select(0, rows).permute(0, 3, 1, 2)
        results = []
        stop = 0
        for operation, group in groupby(listed, key=lambda step: step[0]):
            magnitudes = [magnitude for _, _, magnitude in group]
            start = stop
            stop += len(magnitudes)
            result = OPERATIONS[operation](chosen[start:stop], magnitudes)
            results.append(result.permute(0, 2, 3, 1))
        images.index_copy_(0, rows, torch.cat(results))
    return images


def _make_column(
    values: Magnitudes,
    images: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return one number per image on the device of `images`, (n, 1, 1, 1)."""
    column = copy_to_device(torch.tensor(values, dtype=dtype), images.device)
    return column[:, None, None, None]


def _add(
    base: Tensor,
    other: Tensor,
    magnitudes: Magnitudes,
) -> Tensor:
    """Return base - magnitude * other as uint8.

    The sum is rounded once, as in torch.add with an alpha.
    """
    # The order of operations and the rounding of alpha are those of torchvision.
    alpha = _make_column([1.0 - (1.0 + m) for m in magnitudes], base).double()
    total = base.double() + alpha * other.double()
    return total.float().clamp_(0, 255).to(torch.uint8)


def _scale(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    return images.mul(_make_column([1.0 + m for m in magnitudes], images))


def _colour(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    if images.shape[1] == 1:
        return images
    return _add(_scale(images, magnitudes), vision.rgb_to_grayscale(images), magnitudes)


def _contrast(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    grey = vision.rgb_to_grayscale(images) if images.shape[1] == 3 else images
    scaled = _scale(images, magnitudes)
    mean = grey.float().mean(dim=(1, 2, 3), keepdim=True)
    return _add(scaled, mean, magnitudes)


def _sharpness(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    if min(images.shape[-2:]) <= 2:
        return images
    # Blur by adding neighbors. Sums of whole numbers are exact, but a convolution on a GPU may
    # round to TF32.
    whole = images.float()
    middle = whole[..., 1:-1, :]
    lines = whole[..., :-2, :] + middle + whole[..., 2:, :]
    inner = middle[..., 1:-1]
    boxes = lines[..., :-2] + lines[..., 1:-1] + lines[..., 2:]
    blurred = (boxes + 4 * inner).div_(13).round_()
    sharp = images.clone()
    sharp[..., 1:-1, 1:-1] = _add(inner, blurred - inner, magnitudes)
    return sharp


def _posterize(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    masks = []
    for magnitude in magnitudes:
        bits = int(magnitude)
        masks.append(((1 << bits) - 1) << (8 - bits))
    return images & _make_column(masks, images, torch.uint8)


def _solarize(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    threshold = _make_column([255.0 * m for m in magnitudes], images)
    return torch.where(images >= threshold, images.bitwise_not(), images)


def _affine(images: Tensor, matrices: Sequence[Sequence[float]]) -> Tensor:
    """Transform each image bilinearly by an affine map.

    The origin is the center of the image, and pixels outside the image are black.

    Args:
        images: (n, C, H, W) uint8.
        matrices: the 2 x 3 matrix of each image's inverse map, row by row.
    """
    count, _, height, width = images.shape
    device = images.device
    # On a GPU, a product in float32 may round to TF32 and be half a pixel off.
    kind = torch.float64 if device.type == "cuda" else torch.float32
    half_size = torch.tensor([0.5 * width, 0.5 * height])
    theta = torch.tensor(matrices, dtype=torch.float32).reshape(count, 2, 3)
    theta = theta.transpose(1, 2) / half_size
    theta = copy_to_device(theta.to(kind), device)
    right = (width - 1.0) * 0.5
    bottom = (height - 1.0) * 0.5
    points = torch.ones(1, height, width, 3, device=device)
    points[..., 0] = torch.linspace(-right, right, steps=width, device=device)
    rows = torch.linspace(-bottom, bottom, steps=height, device=device)
    points[..., 1] = rows[:, None]
    points = points.to(kind).view(1, -1, 3)
    grid = points.expand(count, -1, -1).bmm(theta).float()
    grid = grid.view(count, height, width, 2)
    sampled = F.grid_sample(
        images.float(),
        grid,
        mode="bilinear",
        padding_mode="zeros",
        align_corners=False,
    )
    return sampled.round_().to(torch.uint8)


def _shear_x(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    """Shear around the upper left corner, as the authors of AutoAugment do."""
    y = 0.5 * images.shape[-2]
    slopes = map(math.tan, _compute_angles(magnitudes))
    return _affine(images, [[1.0, slope, slope * y, 0.0, 1.0, 0.0] for slope in slopes])


def _shear_y(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    x = 0.5 * images.shape[-1]
    y = 0.5 * images.shape[-2]
    slopes = [math.sin(angle) / math.cos(angle) for angle in _compute_angles(magnitudes)]
    matrices = [[1.0, 0.0, 0.0, slope, 1.0, slope * x - y + y] for slope in slopes]
    return _affine(images, matrices)


def _compute_angles(magnitudes: Magnitudes) -> list[float]:
    """Return the angles of shears in radians.

    The order of operations is that of torchvision, here and where the angles are used, so that all
    numbers are rounded equally.
    """
    return [math.radians(math.degrees(math.atan(m))) for m in magnitudes]


def _rotate(images: Tensor, magnitudes: Magnitudes) -> Tensor:
    angles = [m % 360 for m in magnitudes]
    matrices = []
    for angle in angles:
        turn = math.radians(angle)
        cos = math.cos(turn)
        sin = math.sin(turn)
        matrices.append([cos, -sin, 0.0, sin, cos, 0.0])
    rotated = _affine(images, matrices)
    # For multiples of 90 degrees, torchvision moves whole pixels.
    for right_angle in sorted({angle for angle in angles if angle % 90 == 0}):
        chosen = [row for row, angle in enumerate(angles) if angle == right_angle]
        rows = copy_to_device(torch.tensor(chosen), images.device)
        bilinear = vision.InterpolationMode.BILINEAR
        whole = vision.rotate(images[rows], right_angle, interpolation=bilinear)
        rotated.index_copy_(0, rows, whole)
    return rotated


OPERATIONS: dict[str, Callable[[Tensor, Magnitudes], Tensor]] = {
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": lambda images, shifts: _affine(
        images, [[1.0, 0.0, -int(x), 0.0, 1.0, 0.0] for x in shifts]
    ),
    "TranslateY": lambda images, shifts: _affine(
        images, [[1.0, 0.0, 0.0, 0.0, 1.0, -int(y)] for y in shifts]
    ),
    "Rotate": _rotate,
    "Brightness": lambda images, magnitudes: (
        _scale(images, magnitudes).clamp_(0, 255).to(torch.uint8)
    ),
    "Color": _colour,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": lambda images, _: vision.autocontrast(images),
    "Equalize": lambda images, _: vision.equalize(images),
    "Invert": lambda images, _: images.bitwise_not(),
}
