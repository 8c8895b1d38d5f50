"""Small models, for small images and for trying things out."""

from __future__ import annotations

from collections.abc import Callable

import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

Builder = Callable[[int, int, int], nn.Module]  # of (num_classes, channels, image_size)


def mlp(num_classes: int, channels: int, image_size: int) -> nn.Module:
    inputs = channels * image_size * image_size
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, num_classes)
    )


def _convolutional(num_classes: int, channels: int, image_size: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """3x3 convolutions, each with a normalisation, the image halved between them; a fourth from 16 pixels on."""
    widths = (32, 64, 128) if image_size < 16 else (32, 64, 128, 256)
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if width < widths[-1] else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        channels = width
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))


def cnn(num_classes: int, channels: int, image_size: int) -> nn.Module:
    return _convolutional(num_classes, channels, image_size, nn.BatchNorm2d)


def cnn_gn(num_classes: int, channels: int, image_size: int) -> nn.Module:
    return _convolutional(num_classes, channels, image_size, lambda width: nn.GroupNorm(8, width))


def vit_tiny(num_classes: int, channels: int, image_size: int) -> nn.Module:
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

    def __init__(self, blocks: int, num_classes: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        width, stages = 16, []
        for planes in (16, 32, 64):
            stage: list[nn.Module] = []
            for _ in range(blocks):
                stride = 2 if planes != width else 1
                shortcut = (
                    nn.Sequential(nn.Conv2d(width, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
                    if planes != width
                    else None
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
        out: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


def resnet8(num_classes: int, channels: int, image_size: int) -> nn.Module:
    return SmallResNet(1, num_classes, channels)


def resnet20(num_classes: int, channels: int, image_size: int) -> nn.Module:
    return SmallResNet(3, num_classes, channels)


SMALL: dict[str, Builder] = {
    "mlp": mlp,
    "cnn": cnn,
    "cnn_gn": cnn_gn,
    "vit_tiny": vit_tiny,
    "resnet8": resnet8,
    "resnet20": resnet20,
}
