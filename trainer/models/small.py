"""Small models, for small images and for trying things out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from trainer.recipe.image_sizes import ImageSize, sides, square

Builder = Callable[[int, int, Any], nn.Module]  # of (num_classes, channels, image_size: an int, or height and width)


def mlp(num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
    inputs = channels * math.prod(sides(image_size))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, num_classes)
    )


def _convolutional(
    norm: Callable[[int], nn.Module], num_classes: int, channels: int, image_size: ImageSize
) -> nn.Module:
    """3x3 convolutions, each with a normalisation, the image halved between them; a fourth from 16 pixels on."""
    widths = (32, 64, 128) if min(sides(image_size)) < 16 else (32, 64, 128, 256)
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if width < widths[-1] else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        channels = width
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))


def vit_tiny(num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
    image_size = square(image_size)
    patches = next(count for count in range(8, 0, -1) if image_size % count == 0)  # along each side
    model: nn.Module = torchvision.models.VisionTransformer(
        image_size,
        image_size // patches,
        num_layers=4,
        num_heads=4,
        hidden_dim=96,
        mlp_dim=192,
        num_classes=num_classes,
    )
    if channels != 3:
        model.conv_proj = nn.Conv2d(channels, 96, image_size // patches, image_size // patches)
    return model


class SmallResNet(nn.Module):
    """The ResNet for 32-pixel images of He et al., "Deep Residual Learning" (arXiv:1512.03385), section 4.2.

    Depth is 6 x blocks + 2. Shortcuts that change shape are 1x1 convolutions (their option B).
    """

    def __init__(self, blocks: int, num_classes: int, channels: int, image_size: ImageSize) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        width, stages = 16, []
        for planes in (16, 32, 64):
            stage: list[nn.Module] = []
            for _ in range(blocks):
                stride, shortcut = 1, None
                if planes != width:
                    stride = 2
                    shortcut = nn.Sequential(nn.Conv2d(width, planes, 1, 2, bias=False), nn.BatchNorm2d(planes))
                stage.append(BasicBlock(width, planes, stride, shortcut))
                width = planes
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, num_classes)."""
        out: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


class Whitening(nn.Module):
    """Patches of 2x2 pixels as decorrelated numbers, each with its negative: fixed filters, so nothing is trained.

    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv:2404.00498), section 3.2, takes the eigenvectors of
    the training patches' covariance. These are the ones that photos have by and large, with no data to look at: the
    2x2 Hadamard patterns of brightness and of two opponent colours. BatchNorm brings each to variance 1.

    Shapes: (N, C, H, W) -> (N, 8 C, H - 1, W - 1).
    """

    filters: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        patterns = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
        colours = torch.eye(channels)
        if channels == 3:
            colours = F.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [-1, 2, -1]]))
        filters = torch.kron(colours, patterns).view(4 * channels, channels, 2, 2)
        self.register_buffer("filters", filters)
        self.norm = nn.BatchNorm2d(4 * channels, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        white = self.norm(F.conv2d(x, self.filters))
        return torch.cat((white, -white), 1)


class Mirrored(nn.Sequential):
    """In evaluation, and wherever the model answers: the mean of the answers to an image and to its mirror image."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, num_classes)."""
        answer: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return answer if self.training else (answer + super().forward(x.flip(3))) / 2  # type: ignore[no-untyped-call]


def _fast(widths: Sequence[int], num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
    """The network of Jordan (arXiv:2404.00498), sections 3.1 to 3.3, with widths of one's own; GELU, no residuals.

    Convolutions begin as the identity of their first inputs (dirac), so that the signal passes from the first step on.
    """
    layers: list[nn.Module] = [Whitening(channels), nn.GELU()]
    inputs = 8 * channels
    for width in widths if min(sides(image_size)) >= 16 else widths[:-1]:
        first, second = (nn.Conv2d(of, width, 3, padding=1, bias=False) for of in (inputs, width))
        for convolution in (first, second):
            nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
        layers += [first, nn.MaxPool2d(2), nn.BatchNorm2d(width), nn.GELU()]
        layers += [second, nn.BatchNorm2d(width), nn.GELU()]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


# As wide as published, for a GPU: 1.97 million weights. Images below 16 pixels have two blocks, not three.
fast_cnn = partial(_fast, (64, 256, 256))


def fast_cnn_mirrored(num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
    """The same layers under the same names, which look at an image from both sides."""
    return Mirrored(*fast_cnn(num_classes, channels, image_size).children())


SMALL: dict[str, Builder] = {
    "mlp": mlp,
    "cnn": partial(_convolutional, nn.BatchNorm2d),
    "cnn_gn": partial(_convolutional, partial(nn.GroupNorm, 8)),
    "vit_tiny": vit_tiny,
    "resnet8": partial(SmallResNet, 1),
    "resnet20": partial(SmallResNet, 3),
    "fast_cnn": fast_cnn,
    "fast_cnn_mirrored": fast_cnn_mirrored,
    "fast_cnn_small": partial(_fast, (32, 128, 256)),  # narrow enough for a CPU: three eighths of the arithmetic
}
