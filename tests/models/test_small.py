"""Every small model, on small images."""

import pytest
import torch
from torch import nn

from trainer.models.small import SMALL, resnet20
from trainer.models.zoo import build
from trainer.recipe import ModelRecipe, checks

SHAPES = [(1, 8), (1, 28), (3, 32)]


@pytest.mark.parametrize("name", checks.SMALL_MODELS)
@pytest.mark.parametrize(("channels", "size"), SHAPES)
def test_small_models(name, channels, size):
    model = build(ModelRecipe(name=name), 7, channels, size)
    out = model.train()(torch.randn(4, channels, size, size))
    assert out.shape == (4, 7)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_small_models_are_those_that_recipes_know():
    assert tuple(SMALL) == checks.SMALL_MODELS


def test_batch_norm_free_models_are():
    for name in ("mlp", "cnn_gn", "vit_tiny"):
        assert not any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in build(ModelRecipe(name=name), 3, 1, 8).modules()
        )
    assert any(isinstance(m, nn.BatchNorm2d) for m in build(ModelRecipe(name="cnn"), 3, 1, 8).modules())


def test_resnet20_has_the_papers_size():
    # Table 6 of arXiv:1512.03385 gives 0.27 M for depth 20; projection shortcuts (option B) add 2,752.
    assert sum(p.numel() for p in resnet20(10, 3, 32).parameters()) == pytest.approx(0.27e6, rel=0.03)
