"""Blocks of a model, the frozen ones, and the messages for patterns that fit nothing."""

from copy import deepcopy

import pytest
import torch
import torchvision
from torch import nn

from trainer.errors import RecipeError
from trainer.models.blocks import freeze, list_blocks, list_frozen, list_frozen_norms, refreeze
from trainer.models.small import SMALL
from trainer.models.zoo import build
from trainer.recipe import ModelRecipe


def made(name):
    with torch.device("meta"):
        return SMALL[name](10, 3, 32) if name in SMALL else getattr(torchvision.models, name)()


@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("mlp", 3, "1", "5"),
        ("cnn", 5, "0", "17"),  # Each convolution is frozen with the normalization after it.
        ("vit_tiny", 6, "conv_proj", "heads.head"),
        ("resnet8", 5, "stem.0", "head"),
        ("resnet18", 10, "conv1", "fc"),
        ("vit_b_16", 14, "conv_proj", "heads.head"),
        ("convnext_tiny", 23, "features.0", "classifier.2"),
        ("densenet121", 9, "features.conv0", "classifier"),
        ("swin_t", 17, "features.0.0", "head"),
    ],
)
def test_blocks(name, count, first, last):
    model = made(name)
    row = list_blocks(model)
    assert (len(row), row[0].name, row[-1].name) == (count, first, last)
    assert sorted(p for block in row for p in block.parameters) == sorted(
        p for p, _ in model.named_parameters()
    )


def test_parameters_outside_of_blocks_belong_to_the_block_before_them():
    first, *_, before, _ = list_blocks(made("vit_tiny"))
    assert {"class_token", "encoder.pos_embedding", "conv_proj.weight"} <= set(first.parameters)
    assert {"encoder.ln.weight", "encoder.ln.bias"} <= set(before.parameters)


def test_a_layer_that_is_used_twice_counts_once():
    layer = nn.Linear(3, 3)
    row = list_blocks(
        nn.Sequential(
            layer,
            nn.ReLU(),
            layer,
            nn.Linear(3, 2),
        )
    )
    assert [(block.name, len(block.parameters)) for block in row] == [("0", 2), ("3", 2)]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (1, ["conv1", "bn1"]),
        (3, ["conv1", "bn1", "layer1"]),
        (4, ["conv1", "bn1", "layer1", "layer2.0"]),
        (-1, ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]),
        (["layer1"], ["layer1"]),
        (["layer[12]", "conv1"], ["conv1", "layer1", "layer2"]),
        (["*.bn1"], [f"layer{n}.{m}.bn1" for n in (1, 2, 3, 4) for m in (0, 1)]),
        (["fc.bias"], ["fc.bias"]),
    ],
)
def test_frozen_blocks_are_selected(wanted, names):
    model = made("resnet18")
    freeze(model, wanted, "resnet18")
    assert list_frozen(model) == names


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (10, ["model.freeze=10: resnet18", "10 blocks", "model.freeze=9"]),
        (-10, ["model.freeze=-10: resnet18", "10 blocks"]),
        (["layer5"], ["model.freeze: ", "resnet18", "'layer5'", "layer1?"]),
        (["backbone"], ["'backbone'", "conv1, bn1, layer1, layer2, layer3, layer4, fc"]),
        (["Layer1"], ["'Layer1'"]),
        (["relu"], ["model.freeze: ", "resnet18", "'relu'", "conv1, bn1"]),
        (["*"], ["model.freeze leaves", "resnet18", "last layer"]),
        (["[ab"], ["'[ab'"]),
    ],
)
def test_invalid_freezing_is_refused(wanted, words):
    with pytest.raises(RecipeError) as caught:
        freeze(made("resnet18"), wanted, "resnet18")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_normalisation_that_is_frozen():
    model = made("resnet18")
    freeze(model, ["conv1", "bn1", "layer1.0.bn1.weight"], "resnet18")
    assert list_frozen_norms(model) == [model.bn1], "of the other the bias still trains"


def test_normalisation_without_parameters_is_frozen_with_its_part():
    """The layer has nothing to freeze, but would go on counting its inputs."""

    def part():
        return nn.Sequential(
            nn.BatchNorm2d(4, affine=False),
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4, affine=False),
        )

    model = nn.Sequential(
        part(),
        part(),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4, affine=False),
        nn.Conv2d(4, 4, 1),
    )
    assert list_frozen_norms(model) == []
    freeze(model, ["0"], "two parts")
    assert list_frozen_norms(model) == [model[0][0], model[0][2]]
    freeze(model, ["2"], "two parts")
    assert list_frozen_norms(model) == [model[0][0], model[0][2], model[3]], (
        "a layer among others: as the one before it"
    )


class NormDrop(nn.BatchNorm2d):
    """A layer with dropout inside, like timm's BatchNormAct2d."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs):
        return self.drop(super().forward(inputs))


@pytest.mark.parametrize(
    "layer", [nn.InstanceNorm2d(4, affine=True, track_running_stats=True), NormDrop(4)]
)
def test_frozen_statistics_stay_and_dropout_inside_continues(layer):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        layer,
        nn.Conv2d(4, 4, 1),
        nn.InstanceNorm2d(4),
    )
    freeze(model, ["0", "1"], "two parts")
    model.train()
    refreeze(model)
    before = [buffer.clone() for buffer in layer.buffers()]
    first, second = (model[:2](torch.ones(2, 3, 3, 3)) for _ in range(2))
    assert all(map(torch.equal, before, layer.buffers()))
    assert torch.equal(first, second) == (not isinstance(layer, NormDrop)), "dropout goes on"
    assert model[3].training and list_frozen_norms(model) == [layer]


def test_a_copy_of_a_model_keeps_frozen_what_the_model_does():
    model = nn.Sequential(
        nn.Linear(2, 2),
        nn.Linear(2, 2),
        nn.Linear(2, 2),
    )
    model[1].weight = model[0].weight
    freeze(model, ["0.weight"], "three layers")
    copy = deepcopy(model)
    for layers in (copy, copy[1:]):
        layers.requires_grad_(True)
        refreeze(layers)
        assert list_frozen(copy) == ["0.weight", "1.weight"]


@pytest.mark.parametrize("wanted", [1, -1, ["2"]])
def test_a_norm_before_all_weights_is_like_the_first_layer(wanted):
    """fast_cnn begins with fixed filters and a norm without weight and bias."""
    model = build(ModelRecipe(name="fast_cnn_small", freeze=wanted), 10, 3, 32)
    assert model[0].norm in list_frozen_norms(model)
    whole = build(ModelRecipe(name="fast_cnn_small", freeze=["14.bias"]), 10, 3, 32)
    assert list_frozen_norms(whole) == []
