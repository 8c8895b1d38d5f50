"""Models of timm as a plugin, as a user would bring them: plugin=tests.models.timm_models model.name=timm_resnet10t."""

from __future__ import annotations

import timm

from trainer import register_model

NAMES = (
    "resnet10t",
    "efficientnet_lite0",
    "convnext_atto",
    "vit_tiny_patch16_224",
    "mixer_s32_224",
    "levit_128s",
    "mobilevit_xxs",
    "edgenext_xx_small",
    "ghostnet_100",
    "xcit_nano_12_p16_224",
)


def create(name, num_classes, channels, image_size):
    options = {"num_classes": num_classes, "in_chans": channels}
    try:
        return timm.create_model(name, **options, img_size=image_size)
    except TypeError:  # it takes any size
        return timm.create_model(name, **options)


def _register(name):
    register_model(f"timm_{name}")(lambda *shape: create(name, *shape))


for _name in NAMES:
    _register(_name)
