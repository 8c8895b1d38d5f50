"""Augmentation of small images in whole batches, of single photos, and of batches on the device.

Random draws depend only on the seed, the epoch and the sample index. The draws for mixup and cutmix
depend on the step instead of the sample index: see `sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from trainer.data import sampling
from trainer.data.photos import policies
from trainer.data.photos.copies import copy_to_device
from trainer.data.sampling import Array, Mix
from trainer.recipe import AugmentRecipe
from trainer.recipe.image_sizes import ImageSize, sides

AUTO: dict[str, Any] = {
    "trivial": v2.TrivialAugmentWide,
    "rand": v2.RandAugment,
    "autoaugment": v2.AutoAugment,
}


class Auto:
    """Automatic augmentation policy of torchvision, seeded for each sample.

    If `recipe.auto` names no policy, images are returned unchanged. Each call seeds torch's default
    CPU generator, so call the object only inside `torch.random.fork_rng(devices=[])`.
    """

    def __init__(
        self,
        recipe: AugmentRecipe,
        seed: int,
        epoch: int,
        index: Array,
    ) -> None:
        self.policy: Callable[[Tensor], Tensor] | None = None
        self.seeds: list[int] = []
        kind = AUTO.get(recipe.auto)
        if kind:
            options: dict[str, Any] = {"interpolation": vision.InterpolationMode.BILINEAR}
            if recipe.auto == "rand":
                options |= {"num_ops": recipe.operations, "magnitude": recipe.magnitude}
            self.policy = kind(**options)
            bits = sampling.draw_bits(seed, epoch, index, sampling.AUTO) >> np.uint64(1)
            self.seeds = bits.tolist()

    def __call__(self, row: int, image: Tensor) -> Tensor:
        if self.policy is None:
            return image
        # torch.manual_seed would also reset the generators of CUDA devices.
        torch.default_generator.manual_seed(self.seeds[row])
        return self.policy(image)

    def batch(self, images: Tensor) -> Tensor:
        """Augment images (n, H, W, C) uint8 in place, with the same draws as single calls.

        The docstring of `policies` says when the results equal those of single calls exactly.
        """
        if self.policy is None:
            return images
        pixels = images.shape[1] * images.shape[2]
        if images.device.type == "cpu" and pixels > policies.BATCHED:
            for row, image in enumerate(images.permute(0, 3, 1, 2)):
                image.copy_(self(row, image))
            return images
        draw = policies.record_steps(self.policy)
        # The draws depend only on the size of an image, not on its pixels.
        stand_in = torch.empty(images.shape[1:], dtype=torch.uint8)
        plans = []
        for seed in self.seeds:
            torch.default_generator.manual_seed(seed)
            plans.append(draw(stand_in.permute(2, 0, 1)))
        return policies.apply(images, plans)


class Draws(NamedTuple):
    """Random draws for n small images, on the device of the images.

    The field of an operation that is off has the value None.

    Attributes:
        shift: (n, 2) int64, top and left of a crop of the padded image.
        box: (n, 4) int64, top, left, height and width of a crop that is resized.
        flip: (n,) bool, whether to mirror the image.
        vflip: (n,) bool, whether to turn the image upside down.
    """

    shift: Tensor | None = None
    box: Tensor | None = None
    flip: Tensor | None = None
    vflip: Tensor | None = None

    @classmethod
    def of(
        cls,
        recipe: AugmentRecipe,
        seed: int,
        epoch: int,
        index: Array,
        size: ImageSize,
        device: torch.device,
    ) -> Draws:
        """Draw the values that the augmentation needs.

        Args:
            recipe: the recipe's `augment` section. Draws are made only for operations that are on.
            seed: the recipe's seed.
            epoch: number of the epoch.
            index: (n,) indices of the samples.
            size: size of the images in pixels.
            device: device on which the results are stored.
        """
        shift = box = flip = vflip = None
        if recipe.crop == "pad":
            shift = sampling.draw_shifts(seed, epoch, index, recipe.crop_padding)
        if recipe.crop == "resized":
            draws = sampling.draw_boxes(seed, epoch, index, sampling.CROP)
            box = sampling.crop_boxes(draws, *sides(size), recipe.crop_scale)
        if recipe.hflip:
            flip = sampling.draw_flips(
                seed,
                epoch,
                index,
                recipe.hflip,
                recipe.alternate,
            )
        if recipe.vflip:
            vflip = sampling.draw_uniform(seed, epoch, index, sampling.VFLIP) < recipe.vflip

        def move(part: Array | None) -> Tensor | None:
            return None if part is None else copy_to_device(torch.from_numpy(part), device)

        return cls(*map(move, (shift, box, flip, vflip)))

    def rows(self, start: int, stop: int) -> Draws:
        """Return the draws for images `start` to `stop - 1`."""
        return Draws(*(part if part is None else part[start:stop] for part in self))


class Gallery:
    """Small images on a device, which are indexed and augmented in whole batches.

    The layout of the images is (N, H, W, C), so that each row of a crop is contiguous in memory,
    and a batch is channels_last without a copy.
    """

    def __init__(
        self,
        images: Tensor,
        padding: int,
        device: torch.device,
        interpolation: str = "bilinear",
    ) -> None:
        """Move `images` to `device`.

        Args:
            images: (N, C, H, W) uint8.
            padding: number of black pixels to add on each side, for `Draws.shift`.
            device: device that keeps the images.
            interpolation: the recipe's data.interpolation, for `Draws.box`.
        """
        self.device = device
        self.interpolation = interpolation
        self.height, self.width = images.shape[-2:]
        padded = F.pad(images, (padding,) * 4) if padding else images
        self.images = padded.permute(0, 2, 3, 1).contiguous().to(device)
        if device.type == "cpu":
            # Create a NumPy view of all possible crops, (N, top, left, height, width * C). NumPy
            # copies each row of a crop as a run of bytes, but torch copies element by element: 8 us
            # against 72 us for 32 images of 3 x 32 x 32.
            lines = self.images.numpy().reshape(*self.images.shape[:2], -1)
            channels = self.images.shape[3]
            window = (self.height, self.width * channels)
            all_windows = sliding_window_view(lines, window, (1, 2))
            # Keep only the crops that start at the first channel of a pixel.
            self._windows = all_windows[:, :, ::channels]

    def take(self, index: Tensor, draws: Draws) -> Tensor:
        """Return the images at `index`, augmented with `draws`, as (n, H, W, C) uint8."""
        if draws.shift is None:
            batch = self.images.index_select(0, index)
        elif self.device.type == "cpu":
            top, left = draws.shift.numpy().T
            pixels = torch.from_numpy(self._windows[index.numpy(), top, left])
            batch = pixels.view(len(index), self.height, self.width, self.images.shape[3])
        else:
            windows = self.images.unfold(1, self.height, 1)
            windows = windows.unfold(2, self.width, 1)
            windows = windows.permute(0, 1, 2, 4, 5, 3)
            top, left = draws.shift.unbind(1)
            batch = windows[index, top, left].contiguous()
        if draws.box is not None:
            batch = resize_crops(batch, draws.box, self.interpolation)
        if draws.flip is not None and self.device.type == "cpu":
            # View each pixel as a single element. NumPy then needs half as much time as torch.
            elements = batch.numpy().view(f"V{batch.shape[3]}")[..., 0]
            chosen = draws.flip.numpy()
            elements[chosen] = elements[chosen][:, :, ::-1]
        elif draws.flip is not None:
            batch = torch.where(draws.flip[:, None, None, None], batch.flip(2), batch)
        if draws.vflip is not None:
            batch = torch.where(draws.vflip[:, None, None, None], batch.flip(1), batch)
        return batch


def resize_crops(
    batch: Tensor,
    boxes: Tensor,
    interpolation: str = "bilinear",
) -> Tensor:
    """Crop a box from each image and resize it to the size of the image.

    Args:
        batch: (n, H, W, C) uint8.
        boxes: (n, 4), top, left, height and width of each box.
        interpolation: the recipe's data.interpolation.
    """
    height, width = batch.shape[1:3]
    top, left, h, w = boxes.to(torch.float32).unbind(1)
    # affine_grid multiplies matrices, which a GPU may round to TF32 if they are float32, so use
    # float64 on a GPU.
    kind = torch.float64 if batch.device.type == "cuda" else torch.float32
    theta = torch.zeros(len(batch), 2, 3, device=batch.device, dtype=kind)
    theta[:, 0, 0] = w / width
    theta[:, 0, 2] = (2 * left + w) / width - 1
    theta[:, 1, 1] = h / height
    theta[:, 1, 2] = (2 * top + h) / height - 1
    images = batch.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(theta, list(images.shape), align_corners=False).float()
    cut = F.grid_sample(
        images, grid, mode=interpolation, padding_mode="border", align_corners=False
    )
    pixels = cut.round_().clamp_(0, 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous()


# Maximum number of values of an image for which a CPU normalizes a whole batch at once. Larger
# images are normalized one at a time, so that each image stays in the CPU's cache.
CACHED = 2**16


class DeviceTransform:
    """Converts uint8 images on the device to model inputs.

    The methods normalize images, erase boxes in them, and mix pairs of images and their targets.
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: ImageSize,
        channels_last: bool,
        device: torch.device,
    ) -> None:
        """Prepare the normalization.

        Args:
            mean: mean of each channel, for pixels in [0, 1].
            std: standard deviation of each channel.
            size: size of the images in pixels.
            channels_last: whether batches of more than one channel are channels_last in memory.
                Batches of one channel always are.
            device: device of the batches.
        """
        self.device = device
        self.channels_last = channels_last or len(mean) == 1
        means = torch.tensor(mean, dtype=torch.float64)
        deviations = torch.tensor(std, dtype=torch.float64)

        def expand(values: Tensor) -> Tensor:
            # Expand to the full size of an image: broadcasting over a last dimension of three takes
            # five times as long.
            values = values.float()
            if self.channels_last:
                full = values.expand(*sides(size), -1)
            else:
                full = values[:, None, None].expand(-1, *sides(size))
            return full.contiguous().to(device)

        self.scale = expand(1 / (255 * deviations))
        self.shift = expand(-means / deviations)
        self.nothing = torch.empty(0, device=device)

    def inputs(self, images: Tensor) -> Tensor:
        """Normalize images (n, H, W, C) uint8 to (n, C, H, W) float32."""
        if not self.channels_last:
            images = images.permute(0, 3, 1, 2).contiguous()
        on_cpu = self.device.type == "cpu"
        # Allocate with NumPy, which requests huge pages for large arrays. torch does not, and page
        # faults would then take half of the time.
        if on_cpu:
            inputs = torch.from_numpy(np.empty(images.shape, np.float32))
        else:
            inputs = torch.empty(images.shape, device=self.device)
        singly = on_cpu and self.scale.numel() > CACHED
        pairs = zip(inputs, images, strict=True) if singly else [(inputs, images)]
        for out, image in pairs:
            out.copy_(image).mul_(self.scale).add_(self.shift)
        if self.channels_last:
            return inputs.permute(0, 3, 1, 2)
        return inputs

    def erase(self, inputs: Tensor, boxes: Array) -> Tensor:
        """Set a box of each image to 0, the mean of normalized pixels, in place.

        Args:
            inputs: (n, C, H, W) float32, normalized.
            boxes: (n, 4), top, left, height and width of each box; all 0 for no box.
        """
        # On a GPU, a mask needs only a few kernels, whatever the number of images.
        if self.device.type == "cuda":
            mask = self._inside(boxes, inputs.shape[-2:])
            return inputs.masked_fill_(mask, 0)
        # On a CPU, a mask over the whole batch takes five times as long, because only few images
        # are erased.
        for row in np.flatnonzero(boxes[:, 2]):
            top, left, height, width = boxes[row].tolist()
            inputs[row, :, top : top + height, left : left + width] = 0
        return inputs

    def mix(self, inputs: Tensor, mix: Mix) -> Tensor:
        """Mix the pixels of images 2k and 2k + 1.

        If the number of images is odd, the last image is unchanged.
        """
        whole = self.mix_pairs(inputs, mix.blend, mix.box)
        # With one channel, tensors of the same layout can have different strides. Restore the
        # strides of the input, because other strides would cause a recompilation.
        if inputs.shape[1] == 1:
            return whole.as_strided(whole.shape, inputs.stride())
        return whole

    def mix_pairs(self, rows: Tensor, weights: Array, boxes: Array | None = None) -> Tensor:
        """Mix rows 2k and 2k + 1, each with `weights[k]` of its own, and exchange `boxes`, if any.

        If the number of rows is odd, the last row is unchanged.
        """
        count = len(weights)
        pairs = rows[: 2 * count].reshape(count, 2, *rows.shape[1:])
        other = pairs.flip(1)
        away = copy_to_device(torch.from_numpy(1 - weights), self.device)
        mixed = torch.lerp(pairs, other, away.view(-1, *[1] * rows.dim()))
        if boxes is not None and boxes.any():
            inside = self._inside(boxes, rows.shape[-2:])[:, None]
            mixed = torch.where(inside, other, mixed)
        mixed = mixed.flatten(0, 1)
        if len(mixed) == len(rows):
            return mixed
        return torch.cat([mixed, rows[len(mixed) :]])

    def _inside(self, boxes: Array, size: tuple[int, ...]) -> Tensor:
        """Return a mask (n, 1, *size) bool of the pixels in `boxes` (top, left, height, width)."""
        columns = copy_to_device(torch.from_numpy(boxes), self.device)[:, :, None]
        top, left, height, width = columns.unbind(1)
        y, x = (torch.arange(side, device=self.device) for side in size)
        in_rows = (y >= top) & (y < top + height)
        in_columns = (x >= left) & (x < left + width)
        return in_rows[:, None, :, None] & in_columns[:, None, None, :]
