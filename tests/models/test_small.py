"""All small models, on small images."""

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from trainer.models.small import SMALL, BiasedNorm, Whitening, fast_cnn
from trainer.models.zoo import build
from trainer.recipe import ModelRecipe, known_names

SHAPES = [(1, 8), (1, 28), (3, 32)]


@pytest.mark.parametrize("name", known_names.SMALL_MODELS)
@pytest.mark.parametrize(("channels", "size"), SHAPES)
def test_small_models(name, channels, size):
    model = build(ModelRecipe(name=name), 7, channels, size)
    out = model.train()(torch.randn(4, channels, size, size))
    assert out.shape == (4, 7)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_small_models_are_those_that_recipes_know():
    assert tuple(SMALL) == known_names.SMALL_MODELS


def test_batch_norm_free_models_are():
    for name in ("mlp", "cnn_gn", "vit_tiny"):
        assert not any(
            isinstance(m, nn.modules.batchnorm._BatchNorm)
            for m in build(ModelRecipe(name=name), 3, 1, 8).modules()
        )
    assert any(
        isinstance(m, nn.BatchNorm2d)
        for m in build(
            ModelRecipe(name="cnn"),
            3,
            1,
            8,
        ).modules()
    )


@pytest.mark.parametrize(
    ("make", "size", "near"), [(SMALL["resnet20"], 0.27e6, 0.03), (fast_cnn, 1.97e6, 0.002)]
)
def test_models_have_their_papers_size(make, size, near):
    """Table 6 of arXiv:1512.03385, where projection shortcuts (option B) add 2,752; appendix A of
    arXiv:2404.00498.
    """
    assert sum(p.numel() for p in make(10, 3, 32).parameters()) == pytest.approx(size, rel=near)


@pytest.mark.parametrize("channels", [1, 3])
def test_whitening_turns_patches_that_resemble_each_other_into_numbers_that_do_not(channels):
    smooth = torch.randn(
        16,
        1,
        9,
        9,
        generator=torch.Generator().manual_seed(0),
    )
    # Neighbours and colours of a pixel are alike, as in photos.
    images = nn.functional.interpolate(
        smooth,
        size=33,
        mode="bilinear",
    ) + 0.1 * torch.randn(16, channels, 33, 33, generator=torch.Generator().manual_seed(1))

    def correlations(features):
        return torch.corrcoef(features.transpose(0, 1).flatten(1)).fill_diagonal_(0).abs()

    white = Whitening(channels)
    actual = white(images)
    assert actual.shape == (16, 8 * channels, 32, 32)
    half = actual[:, : 4 * channels]
    assert torch.equal(actual[:, 4 * channels :], -half)
    patches = nn.functional.unfold(images, 2).view(16, 4 * channels, 32, 32)
    assert correlations(patches).max() > 0.85
    assert correlations(half).max() < 0.1
    torch.testing.assert_close(
        half.var((0, 2, 3)),
        torch.ones(4 * channels),
        rtol=0.01,
        atol=0,
    )
    gram = white.filters.flatten(1) @ white.filters.flatten(1).T
    torch.testing.assert_close(gram, torch.eye(4 * channels))
    assert not list(white.parameters())


def test_fast_cnn_mirrored_is_fast_cnn_that_also_looks_into_a_mirror():
    plain = build(ModelRecipe(name="fast_cnn"), 10, 3, 32)
    mirrored = build(ModelRecipe(name="fast_cnn_mirrored"), 10, 3, 32)
    images = torch.rand(6, 3, 32, 32)
    plain.train()(images)  # running statistics
    mirrored.load_state_dict(plain.state_dict())
    assert torch.equal(mirrored.train()(images), plain.train()(images))
    mirrored.load_state_dict(plain.state_dict())
    actual = mirrored.eval()(images)
    both = [plain.eval()(each) for each in (images, images.flip(3))]
    torch.testing.assert_close(
        actual,
        (both[0] + both[1]) / 2,
        rtol=1e-4,
        atol=1e-5,
    )
    torch.testing.assert_close(
        mirrored(images.flip(3)),
        actual,
        rtol=1e-4,
        atol=1e-5,
    )
    assert (actual - both[0]).abs().max() > 1e-3
    assert actual.shape == (6, 10)


def test_airbench_equals_a_network_of_torchs_own_layers():
    """The reference has torch's own layers: a convolution with bias, norms with a scale of 1."""
    torch.manual_seed(0)
    network = nn.Sequential(*SMALL["airbench_small"](7, 3, 32).children())
    for parameter in network.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    images = torch.rand(16, 3, 32, 32)
    for _ in range(8):
        network.train()(images)
    white = network[0]
    first = nn.Conv2d(3, 24, 2)
    scaled = white.filters / (white.norm.running_var + 5e-4).sqrt()[:, None, None, None]
    first.weight.data = torch.cat((scaled, -scaled))
    shift = white.norm.running_mean / (white.norm.running_var + 5e-4).sqrt()
    first.bias.data = white.bias.data - torch.cat((shift, -shift))
    layers = [first]
    for layer in list(network)[1:-2]:
        if isinstance(layer, BiasedNorm):
            assert layer.norm.momentum == 0.4
            norm = nn.BatchNorm2d(len(layer.bias))
            norm.load_state_dict(
                layer.norm.state_dict()
                | {"weight": torch.ones(len(layer.bias)), "bias": layer.bias.data}
            )
            layer = norm
        layers.append(layer)
    head = nn.Linear(256, 7, bias=False)
    head.load_state_dict(network[-1].state_dict())
    reference = nn.Sequential(*layers, head)
    torch.testing.assert_close(
        network.eval()(images), reference.eval()(images) / 9, rtol=1e-4, atol=1e-5
    )


def test_all_layers_of_airbench_compute_in_bf16():
    network = SMALL["airbench_small"](7, 3, 32)
    kinds = []
    for layer in network:
        layer.register_forward_hook(lambda layer, inputs, out: kinds.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.rand(2, 3, 32, 32))
    assert len(kinds) == len(network) and {*kinds} == {torch.bfloat16}


def test_airbench_averages_over_six_views():
    torch.manual_seed(0)
    network = build(ModelRecipe(name="airbench"), 10, 3, 32)
    plain = nn.Sequential(*build(ModelRecipe(name="airbench"), 10, 3, 32).children())
    plain[-1].weight.data *= 1000
    images = torch.rand(6, 3, 32, 32)
    plain.train()(images)  # running statistics
    network.load_state_dict(plain.state_dict())
    assert torch.equal(network.train()(images), plain.train()(images))
    network.load_state_dict(plain.state_dict())
    padded = v2.functional.pad(images, [1], padding_mode="reflect")
    plain.eval()
    expected = torch.zeros(6, 10)
    for view, share in (
        (images, 1 / 4),
        (padded[..., :-2, :-2], 1 / 8),
        (padded[..., 2:, 2:], 1 / 8),
    ):
        expected += share * (plain(view) + plain(view.flip(3)))
    actual = network.eval()(images)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert (actual - (plain(images) + plain(images.flip(3))) / 2).abs().max() > 1e-3


def test_fast_cnn_starts_by_passing_its_inputs_on():
    first = next(module for module in fast_cnn(10, 3, 32) if isinstance(module, nn.Conv2d))
    image = torch.randn(1, 24, 8, 8)
    torch.testing.assert_close(first(image)[:, :24], image)
