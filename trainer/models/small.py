"""Small models for small images and for experiments."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from trainer.recipe.image_sizes import ImageSize, sides, square

# A builder is called with num_classes, channels and image_size, which is an int or (height, width),
# and with the arguments in `model.args`.
Builder = Callable[..., nn.Module]


def mlp(
    num_classes: int,
    channels: int,
    image_size: ImageSize,
) -> nn.Module:
    """Build a perceptron with two hidden layers of 256 units."""
    inputs = channels * math.prod(sides(image_size))
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


def _build_cnn(
    norm: Callable[[int], nn.Module],
    num_classes: int,
    channels: int,
    image_size: ImageSize,
) -> nn.Module:
    """Build a network of 3x3 convolutions with normalization, and a linear layer.

    There are four convolutions for images of at least 16 pixels per side, else three, with pooling
    between them.
    """
    widths = [32, 64, 128]
    if min(sides(image_size)) >= 16:
        widths.append(256)
    layers: list[nn.Module] = []
    for width in widths:
        if layers:
            layers.append(nn.MaxPool2d(2))
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers)


def vit_tiny(
    num_classes: int,
    channels: int,
    image_size: ImageSize,
) -> nn.Module:
    """Build a Vision Transformer with 4 layers of width 96."""
    image_size = square(image_size)
    patches_per_side = next(count for count in range(8, 0, -1) if image_size % count == 0)
    patch_size = image_size // patches_per_side
    model: nn.Module = torchvision.models.VisionTransformer(
        image_size,
        patch_size,
        num_layers=4,
        num_heads=4,
        hidden_dim=96,
        mlp_dim=192,
        num_classes=num_classes,
    )
    if channels != 3:
        model.conv_proj = nn.Conv2d(channels, 96, patch_size, patch_size)
    return model


class SmallResNet(nn.Module):
    """ResNet for 32-pixel images.

    He et al., "Deep Residual Learning" (arXiv:1512.03385), section 4.2. Depth is 6 x blocks + 2.
    Shortcuts that change shape are 1x1 convolutions (option B of the paper, which uses option A for
    these networks).
    """

    def __init__(
        self,
        blocks: int,
        num_classes: int,
        channels: int,
        image_size: ImageSize,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )
        width = 16
        stages = []
        for planes in (16, 32, 64):
            stage = []
            for _ in range(blocks):
                stride = 1
                shortcut = None
                if planes != width:
                    stride = 2
                    shortcut = nn.Sequential(
                        nn.Conv2d(width, planes, 1, 2, bias=False), nn.BatchNorm2d(planes)
                    )
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
        features = self.stages(self.stem(x))
        out: Tensor = self.head(features.mean((2, 3)))
        return out


class Whitening(nn.Module):
    """Fixed filters that turn 2x2 patches into decorrelated numbers and their negatives.

    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv:2404.00498), section 3.2, uses
    the eigenvectors of the training patches' covariance. The filters here approximate those of
    photos without looking at data: the 2x2 Hadamard patterns of brightness and of two opponent
    colors. If the images do not have three channels, each channel has the patterns of its own
    brightness. BatchNorm scales the output of each filter to variance 1, or less if its variance is
    not much larger than `eps`. Only the bias, if there is one, is trained.

    Shapes: (N, C, H, W) -> (N, 8 C, H - 1, W - 1).
    """

    filters: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, has_bias: bool = False) -> None:
        super().__init__()
        patterns = torch.tensor(
            [[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
        ).div(2)
        colors = torch.eye(channels)
        if channels == 3:
            colors = F.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [-1, 2, -1]]))
        filters = torch.kron(colors, patterns).view(4 * channels, channels, 2, 2)
        self.register_buffer("filters", filters)
        self.norm = nn.BatchNorm2d(4 * channels, eps, affine=False)
        self.bias = nn.Parameter(torch.zeros(8 * channels)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        white = self.norm(F.conv2d(x, self.filters))
        white = torch.cat((white, -white), 1)
        if self.bias is None:
            return white
        # Without this conversion, autocast would compute the following layers in fp32.
        return white + self.bias.to(white.dtype)[:, None, None]


class BiasedNorm(nn.Module):
    """BatchNorm with a trained bias and no trained scale. (N, C, H, W) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False, momentum=0.4)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out + self.bias.to(out.dtype)[:, None, None]


class Scale(nn.Module):
    """Multiplication by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Mirrored(nn.Sequential):
    """A model that averages its outputs for an image and its mirror image in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, num_classes)."""
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        if not self.training:
            out = (out + super().forward(x.flip(3))) / 2  # type: ignore[no-untyped-call]
        return out


class MultiCrop(Mirrored):
    """A model that averages its outputs over six views of an image in evaluation.

    The views are the image, two copies that are shifted by a pixel along both sides, down and up,
    and the mirror images of the three. The image counts as much as both copies together (Jordan,
    arXiv:2404.00498).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, num_classes)."""
        out = super().forward(x)
        if not self.training:
            height, width = x.shape[2:]
            padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
            down = super().forward(padded[:, :, :height, :width])
            up = super().forward(padded[:, :, 2:, 2:])
            out = out / 2 + (down + up) / 4
        return out


def _build_fast_cnn(
    widths: Sequence[int],
    kind: type[nn.Sequential],
    num_classes: int,
    channels: int,
    image_size: ImageSize,
    as_published: bool = False,
) -> nn.Module:
    """Build the network of Jordan (arXiv:2404.00498), sections 3.1 to 3.3.

    The network has GELU and no residuals. For images below 16 pixels, the last block is left out.

    Args:
        widths: channels of the three blocks.
        kind: class of the network, which may average over several views of an image in evaluation.
        num_classes: number of outputs.
        channels: number of channels of an image.
        image_size: size of an image in pixels.
        as_published: whether whitening damps small variances and has a bias, BatchNorm has no
            scale, and outputs are scaled down and have no bias, as published.
    """
    if min(sides(image_size)) < 16:
        widths = widths[:-1]
    build_norm = BiasedNorm if as_published else nn.BatchNorm2d
    whitening = Whitening(channels)
    if as_published:
        whitening = Whitening(channels, 5e-4, has_bias=True)
    layers = [whitening, nn.GELU()]
    inputs = 8 * channels
    for width in widths:
        first = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
        second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        # Convolutions start as the identity of their first inputs, so that the signal passes from
        # the first step on.
        for convolution in (first, second):
            nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
        layers += [first, nn.MaxPool2d(2), build_norm(width), nn.GELU()]
        layers += [second, build_norm(width), nn.GELU()]
        inputs = width
    layers += [nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    if as_published:
        layers.append(Scale(1 / 9))
    layers.append(nn.Linear(inputs, num_classes, bias=not as_published))
    return kind(*layers)


# These are the published widths, which are meant for a GPU. The model has 1.97 million weights.
WIDTHS = (64, 256, 256)
# A model of these widths needs three eighths of the arithmetic, so that a CPU can train it.
SMALL_WIDTHS = (32, 128, 256)
fast_cnn = partial(_build_fast_cnn, WIDTHS, nn.Sequential)


SMALL: dict[str, Builder] = {
    "mlp": mlp,
    "cnn": partial(_build_cnn, nn.BatchNorm2d),
    "cnn_gn": partial(_build_cnn, partial(nn.GroupNorm, 8)),
    "vit_tiny": vit_tiny,
    "resnet8": partial(SmallResNet, 1),
    "resnet20": partial(SmallResNet, 3),
    "fast_cnn": fast_cnn,
    "fast_cnn_mirrored": partial(_build_fast_cnn, WIDTHS, Mirrored),
    "fast_cnn_small": partial(_build_fast_cnn, SMALL_WIDTHS, nn.Sequential),
    "airbench": partial(_build_fast_cnn, WIDTHS, MultiCrop, as_published=True),
    "airbench_small": partial(_build_fast_cnn, SMALL_WIDTHS, MultiCrop, as_published=True),
}
