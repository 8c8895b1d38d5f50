"""Augmentation: whole batches of small images, single photos, and what is done to both on the device.

Every draw is a function of (seed, epoch, sample index): see `sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from trainer.data import sampling
from trainer.data.photos import policies
from trainer.data.photos.copies import on_device
from trainer.data.sampling import Array, Mix
from trainer.recipe import AugmentRecipe
from trainer.recipe.image_sizes import ImageSize, sides


@contextmanager
def private_random_state() -> Iterator[None]:
    """Restore torch's CPU generator afterwards (torch.manual_seed would also reset CUDA's)."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


AUTO: dict[str, Any] = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment, "autoaugment": v2.AutoAugment}


class Auto:
    """torchvision's automatic policy, seeded anew for each sample. Use inside `private_random_state`."""

    def __init__(self, recipe: AugmentRecipe, seed: int, epoch: int, index: Array) -> None:
        bilinear, kind = vision.InterpolationMode.BILINEAR, AUTO.get(recipe.auto)
        self.policy: Callable[[Tensor], Tensor] | None = kind(interpolation=bilinear) if kind else None
        bits = sampling.hashed(seed, epoch, index, sampling.AUTO) >> np.uint64(1)
        self.seeds: list[int] = bits.tolist() if self.policy else []

    def __call__(self, row: int, image: Tensor) -> Tensor:
        if self.policy is None:
            return image
        torch.default_generator.manual_seed(self.seeds[row])
        return self.policy(image)

    def batch(self, images: Tensor) -> Tensor:
        """All of (n, H, W, C) images, in place, with the same result as one by one."""
        if self.policy is None:
            return images
        if images.device.type == "cpu" and images.shape[1] * images.shape[2] > policies.BATCHED:
            for row, image in enumerate(images.permute(0, 3, 1, 2)):
                image.copy_(self(row, image))
            return images
        draw, stand_in = policies.recorded(self.policy), torch.empty(images.shape[1:], dtype=torch.uint8)
        plans = []
        for seed in self.seeds:
            torch.default_generator.manual_seed(seed)
            plans.append(draw(stand_in.permute(2, 0, 1)))
        return policies.apply(images, plans)


@dataclass(frozen=True)
class Draws:
    """The random draws for a block of small images, on their device; None is off."""

    shift: Tensor | None  # (n, 2) int64
    box: Tensor | None  # (n, 4) int64 of top, left, height, width
    flip: Tensor | None  # (n,) bool

    @classmethod
    def of(
        cls, recipe: AugmentRecipe, seed: int, epoch: int, index: Array, size: ImageSize, device: torch.device
    ) -> Draws:
        shift = box = flip = None
        if recipe.crop == "pad":
            shift = sampling.shifts(seed, epoch, index, recipe.crop_padding)
        if recipe.crop == "resized":
            draws, (low, high) = sampling.box_draws(seed, epoch, index, sampling.CROP), recipe.crop_scale
            box = sampling.crop_boxes(draws, *sides(size), (low, high))
        if recipe.hflip:
            flip = sampling.flips(seed, epoch, index, recipe.hflip, recipe.alternate)
        return cls(
            *(None if part is None else on_device(torch.from_numpy(part), device) for part in (shift, box, flip))
        )

    def rows(self, start: int, stop: int) -> Draws:
        parts = (self.shift, self.box, self.flip)
        return Draws(*(part if part is None else part[start:stop] for part in parts))


class Gallery:
    """Small images on their device, indexed and augmented by whole batches.

    Their layout is (N, H, W, C): rows then are contiguous, and a batch is channels_last without a copy.
    """

    def __init__(self, images: Tensor, padding: int, device: torch.device) -> None:
        """`images` (N, C, H, W) uint8; `padding` pixels of black are kept around them for `shift`."""
        self.device = device
        self.height, self.width = images.shape[-2:]
        padded = F.pad(images, (padding,) * 4) if padding else images
        self.images = padded.permute(0, 2, 3, 1).contiguous().to(device)
        if device.type == "cpu":
            # numpy copies a window's rows as runs of bytes, torch element by element: 8 us against 72 us for 32 of
            # 3x32x32. (N, top, left, height, width x C)
            lines, channels = self.images.numpy().reshape(*self.images.shape[:2], -1), self.images.shape[3]
            window = (self.height, self.width * channels)
            self._windows = sliding_window_view(lines, window, (1, 2))[:, :, ::channels]

    def take(self, index: Tensor, draws: Draws) -> Tensor:
        """(n, H, W, C) uint8."""
        if draws.shift is None:
            batch = self.images.index_select(0, index)
        elif self.device.type == "cpu":
            top, left = draws.shift.numpy().T
            pixels = torch.from_numpy(self._windows[index.numpy(), top, left])
            batch = pixels.view(len(index), self.height, self.width, self.images.shape[3])
        else:
            windows = self.images.unfold(1, self.height, 1).unfold(2, self.width, 1).permute(0, 1, 2, 4, 5, 3)
            batch = windows[index, draws.shift[:, 0], draws.shift[:, 1]].contiguous()
        if draws.box is not None:
            batch = resized_crops(batch, draws.box)
        if draws.flip is not None:
            batch = self._mirrored(batch, draws.flip)
        return batch

    def _mirrored(self, batch: Tensor, flip: Tensor) -> Tensor:
        if self.device.type != "cpu":
            return torch.where(flip[:, None, None, None], batch.flip(2), batch)
        pixels = batch.numpy().view(f"V{batch.shape[3]}")[..., 0]  # whole pixels move, in half of torch's time
        chosen = flip.numpy()
        pixels[chosen] = pixels[chosen][:, :, ::-1]
        return batch


def resized_crops(batch: Tensor, boxes: Tensor) -> Tensor:
    """Cut a box out of each (n, H, W, C) uint8 image and enlarge it to the image's size, bilinearly."""
    height, width = batch.shape[1:3]
    top, left, h, w = boxes.to(torch.float32).unbind(1)
    # On a GPU in float64: affine_grid multiplies matrices, which in float32 may round to TF32.
    kind = torch.float64 if batch.device.type == "cuda" else torch.float32
    theta = torch.zeros(len(batch), 2, 3, device=batch.device, dtype=kind)
    theta[:, 0, 0], theta[:, 0, 2] = w / width, (2 * left + w) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = h / height, (2 * top + h) / height - 1
    images = batch.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(theta, list(images.shape), align_corners=False).float()
    cut = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return cut.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


CACHED = 2**16  # numbers: larger images are normalised one by one on a CPU, so that one fits its cache


class DeviceTransform:
    """From uint8 images on the device to a batch: normalise, erase, mix."""

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: ImageSize,
        channels_last: bool,
        device: torch.device,
    ) -> None:
        self.device = device
        self.channels_last = channels_last or len(mean) == 1
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)

        def whole(values: Tensor) -> Tensor:
            # A number a pixel: over a last dimension of three, broadcasting takes five times as long.
            values = values.float()
            last = self.channels_last
            full = values.expand(*sides(size), -1) if last else values[:, None, None].expand(-1, *sides(size))
            return full.contiguous().to(device)

        self.scale, self.shift = whole(scale), whole(shift)
        self.nothing = torch.empty(0, device=device)

    def inputs(self, images: Tensor) -> Tensor:
        """(n, H, W, C) uint8 as normalised (n, C, H, W) float32."""
        if not self.channels_last:
            images = images.permute(0, 3, 1, 2).contiguous()
        inputs = self._empty(images.shape)
        alone = self.device.type == "cpu" and self.scale.numel() > CACHED
        for out, image in zip(inputs, images, strict=True) if alone else [(inputs, images)]:
            out.copy_(image).mul_(self.scale).add_(self.shift)
        return inputs.permute(0, 3, 1, 2) if self.channels_last else inputs

    def _empty(self, shape: torch.Size) -> Tensor:
        """float32. NumPy allocates huge pages and torch does not: page faults would take half of the time."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.empty(shape, np.float32))
        return torch.empty(shape, device=self.device)

    def erased(self, inputs: Tensor, boxes: Array) -> Tensor:
        """Set each image's box to the mean, in place."""
        if self.device.type == "cuda":  # as many kernels for any number of images
            return inputs.masked_fill_(self._inside(boxes, inputs.shape[-2:]), 0)
        for row in np.flatnonzero(boxes[:, 2]):  # few are: a mask over the whole batch takes five times as long
            top, left, height, width = boxes[row].tolist()
            inputs[row, :, top : top + height, left : left + width] = 0
        return inputs

    def mixed(self, inputs: Tensor, mix: Mix) -> Tensor:
        """Mix the pixels of neighbours (2k, 2k + 1); an odd last one stays as it is."""
        pairs = self._pairs(inputs, mix)
        other = pairs.flip(1)
        away = self._column(1 - mix.blend)[:, :, None, None, None]
        mixed = torch.lerp(pairs, other, away)
        if mix.box.any():
            mixed = torch.where(self._inside(mix.box, inputs.shape[-2:])[:, None], other, mixed)
        whole = self._with_last(mixed.flatten(0, 1), inputs)
        # With one channel the strides may have changed and mean the same; compiled code would be compiled again.
        return whole.as_strided(whole.shape, inputs.stride()) if inputs.shape[1] == 1 else whole

    def soft(self, hard: Tensor, mix: Mix) -> Tensor:
        """Targets (n, ...) float32, mixed as their images are."""
        pairs = self._pairs(hard, mix)
        away = self._column(1 - mix.label).view(-1, *[1] * hard.dim())
        soft = torch.lerp(pairs, pairs.flip(1), away)
        return self._with_last(soft.flatten(0, 1), hard)

    @staticmethod
    def _pairs(rows: Tensor, mix: Mix) -> Tensor:
        pairs = len(mix.label)
        return rows[: 2 * pairs].reshape(pairs, 2, *rows.shape[1:])

    @staticmethod
    def _with_last(paired: Tensor, rows: Tensor) -> Tensor:
        return paired if len(paired) == len(rows) else torch.cat([paired, rows[len(paired) :]])

    def _column(self, values: Array) -> Tensor:
        return on_device(torch.from_numpy(values), self.device)[:, None]

    def _inside(self, boxes: Array, size: tuple[int, ...]) -> Tensor:
        """(n, 1, *size) bool: the pixels inside each (top, left, height, width)."""
        top, left, height, width = on_device(torch.from_numpy(boxes), self.device)[:, :, None].unbind(1)
        y, x = (torch.arange(side, device=self.device) for side in size)
        rows, columns = (y >= top) & (y < top + height), (x >= left) & (x < left + width)
        return (rows[:, None, :, None]) & (columns[:, None, None, :])
