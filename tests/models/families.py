"""Small models that tests of several packages use: one of each family of torchvision and timm, with
its image size.
"""

import torch
from torch import nn

# Smallest model of each family, with the smallest usual image size that it accepts. BatchNorm over
# two values, such as two images of one pixel, makes gradients of 1e9 in bare torch, so those
# families have larger images.
FAMILIES = {
    "alexnet": ("alexnet", 64),
    "convnext": ("convnext_tiny", 32),
    "densenet": ("densenet121", 32),
    "efficientnet_b": ("efficientnet_b0", 32),
    "efficientnet_v2": ("efficientnet_v2_s", 32),
    "googlenet": ("googlenet", 32),
    "inception_v3": ("inception_v3", 96),
    "maxvit": ("maxvit_t", 224),
    "mnasnet": ("mnasnet0_5", 32),
    "mobilenet_v2": ("mobilenet_v2", 64),
    "mobilenet_v3": ("mobilenet_v3_small", 32),
    "regnet_x": ("regnet_x_400mf", 64),
    "regnet_y": ("regnet_y_400mf", 32),
    "resnet": ("resnet18", 32),
    "resnext": ("resnext50_32x4d", 32),
    "shufflenet_v2": ("shufflenet_v2_x0_5", 32),
    "squeezenet": ("squeezenet1_1", 32),
    "swin": ("swin_t", 32),
    "swin_v2": ("swin_v2_t", 32),
    "vgg": ("vgg11", 32),
    "vgg_bn": ("vgg11_bn", 32),
    "vit": ("vit_b_32", 32),
    "wide_resnet": ("wide_resnet50_2", 32),
}


TIMM = {
    "resnet10t": 32,
    "efficientnet_lite0": 64,
    "convnext_atto": 32,
    "vit_tiny_patch16_224": 32,
    "mixer_s32_224": 64,
    "levit_128s": 128,
    "mobilevit_xxs": 128,
    "edgenext_xx_small": 64,
    "ghostnet_100": 32,
    "xcit_nano_12_p16_224": 32,
}


SEEN = []


class Recording(nn.Module):
    """A linear model that writes down what it is given."""

    def __init__(self, outputs, inputs=3 * 8**2):
        super().__init__()
        self.fc = nn.Linear(inputs, outputs, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(
                torch.randn(self.fc.weight.shape, generator=torch.Generator().manual_seed(0)) / 4
            )

    def forward(self, x):
        if self.training:
            SEEN.append(x.detach().clone())
        return self.fc(x.flatten(1))
