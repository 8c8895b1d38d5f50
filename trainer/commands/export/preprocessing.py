"""The model of an exported file: from decoded photos to probabilities, for any size of photo.

torch's antialiased resize is not used: other programs that read ONNX files implement it
differently, or not at all. Here it is two matrix multiplications.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.recipe.image_sizes import sides
from trainer.tasks import Task
from trainer.training.trained import Preparation


class DeployedModel(nn.Module):
    """A model with its preparation of images, and with probabilities as outputs."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        task: Task | None,
        preparation: Preparation | None,
        is_half: bool = False,
    ) -> None:
        """Wrap `model`.

        Args:
            model: Model in evaluation mode.
            task: Task that converts outputs to probabilities; None returns the outputs.
            preparation: Preparation of photos; None if inputs reach the model unchanged.
            is_half: Whether the weights of `model` are float16.
        """
        super().__init__()
        self.model = model
        self._task = task
        self._preparation = preparation
        self._is_half = is_half
        if preparation is not None:
            std = torch.tensor(preparation.std, dtype=torch.float64)[:, None, None]
            mean = torch.tensor(preparation.mean, dtype=torch.float64)[:, None, None]
            self.register_buffer("scale", (1 / (255 * std)).float())
            self.register_buffer("shift", (-mean / std).float())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return float32 outputs; images are (N, H, W, C) uint8."""
        if self._preparation is not None:
            inputs = self._prepare(inputs, self._preparation)
        if self._is_half and inputs.is_floating_point():
            inputs = inputs.half()
        outputs: Tensor = self.model(inputs).float()
        if self._task is None:
            return outputs
        return self._task.to_probabilities(outputs)

    def _prepare(self, images: Tensor, preparation: Preparation) -> Tensor:
        """Resize, crop and normalize as `resize_and_center_crop` and `DeviceTransform` do."""
        pixels = images.permute(0, 3, 1, 2).float()
        height, width = (torch.full((), side) for side in pixels.shape[-2:])
        box_height, box_width = sides(preparation.shorter_side)
        # As in `covering_size`, without a branch, because the size is not known in advance.
        new_height = (box_width * height // width).clamp(min=box_height)
        new_width = (box_height * width // height).clamp(min=box_width)
        crop_height, crop_width = sides(preparation.image_size)
        kernel = KERNELS[preparation.interpolation]
        rows = _filter_weights(kernel, pixels.shape[-2], height, new_height, crop_height)
        columns = _filter_weights(kernel, pixels.shape[-1], width, new_width, crop_width)
        # torch rounds to bytes after each direction, halves up, and starts with the width. The
        # bicubic kernel has negative weights, so values may leave the range of bytes.
        pixels = (pixels @ columns.T + 0.5).floor().clamp(0, 255)
        pixels = (rows @ pixels + 0.5).floor().clamp(0, 255)
        return pixels * self.scale + self.shift


def _weigh_linearly(distances: Tensor) -> Tensor:
    return (1 - distances.abs()).clamp(min=0)


def _weigh_cubically(distances: Tensor) -> Tensor:
    """Compute the kernel of Keys, "Cubic convolution interpolation" (1981), with a = -0.5."""
    x = distances.abs()
    inner = (1.5 * x - 2.5) * x**2 + 1
    outer = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, inner, torch.where(x < 2, outer, 0.0))


# Kernels by the value of data.interpolation, from distances in new pixels to weights.
KERNELS = {"bilinear": _weigh_linearly, "bicubic": _weigh_cubically, "nearest": None}


def _filter_weights(
    kernel: Callable[[Tensor], Tensor] | None, count: int, old: Tensor, new: Tensor, size: int
) -> Tensor:
    """Return the weights of an antialiased resize of one dimension, cropped.

    They are those of torch and Pillow: the kernel is as wide as a new pixel if the image shrinks.

    Args:
        kernel: Element of `KERNELS`; None chooses the old pixel below the center of the new one.
        count: Number of old pixels.
        old: The same number as a tensor.
        new: Number of new pixels.
        size: Number of new pixels that are kept, in the center.

    Returns:
        (size, count) float32; each row has the sum 1.
    """
    scale = old.float() / new
    # torchvision's center_crop rounds in the same way, halves to even.
    first = torch.round((new - size) / 2)
    centers = (first + torch.arange(size) + 0.5) * scale
    if kernel is None:
        return (torch.arange(count) == centers.floor()[:, None]).float()
    distances = torch.arange(count) + 0.5 - centers[:, None]
    weights = kernel(distances / scale.clamp(min=1))
    return weights / weights.sum(1, keepdim=True)
