"""Losses held against those of single."""

from __future__ import annotations

import torch
from torch import nn

from tests.commands.compare.listing import listed
from trainer.commands.compare.exactness import batch_dependent, exactness_of
from trainer.recipe import load


def test_exactness():
    found = listed(modes=["single", "ddp", "local_sgd", "ddp precision=bf16", "ddp accumulate=2"])
    single, ddp, local, half, pieces = found.values()
    losses = [2.0, 1.5, 1.0]

    def verdict(entry, factor=1.0, parts=(), reference=single):
        return exactness_of(entry, [factor * loss for loss in losses], reference, losses, parts).verdict

    assert verdict(single) == "reference"
    assert [verdict(ddp), verdict(pieces, 1.00009), verdict(ddp, 0.99991)] == ["exact"] * 3
    assert verdict(ddp, 1.001) == "disagrees"
    assert exactness_of(ddp, [2.0, float("nan"), 1.0], single, losses, ["batch norm"]).verdict == "disagrees"
    assert verdict(ddp, 1.05, ["batch norm"]) == "differs" and verdict(ddp, 2.1, ["batch norm"]) == "disagrees"
    assert verdict(local, 1.2) == "other maths"
    assert verdict(half) == "not compared" and "precision" in exactness_of(half, losses, single, losses, []).text
    one, two = listed(modes=["single precision=tf32", "ddp precision=tf32"]).values()  # both checked in fp32
    assert [verdict(two, reference=one), verdict(two, 1.0002, reference=one)] == ["exact", "disagrees"]
    assert verdict(ddp, reference=None) == "not compared"
    assert exactness_of(ddp, [], single, losses, []).text == "-"


def trained(noise=0.0, seed=0, batch=32):
    """Losses of 20 steps whose learning rate makes much of every rounding; in double precision, so everywhere alike."""
    torch.manual_seed(0)
    parts = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    model, random = nn.Sequential(*parts).double(), torch.Generator().manual_seed(seed)
    images, labels, losses = 3 * torch.randn(20, 32, 16, dtype=torch.double), torch.randint(0, 4, (20, 32)), []
    for inputs, targets in zip(images, labels, strict=True):
        losses.append(nn.functional.cross_entropy(model(inputs), targets).item())
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs[:batch]), targets[:batch]).backward()
        with torch.no_grad():
            for weight in model.parameters():
                rounding = noise * torch.randn(weight.shape, generator=random, dtype=torch.double)
                weight -= 2.6 * weight.grad * (1 + rounding)
    return losses


def test_what_rounding_alone_does_is_no_disagreement():
    """Gradients that differ by a millionth; and those of a part of the batch, in which an image is left out."""
    single, ddp = listed(modes=["single", "ddp"]).values()
    expected, rounded = trained(), trained(1e-6, seed=1)
    others = {seed: trained(1e-6, seed) for seed in (2, 3, 4, 5)}
    for losses in others.values():
        assert exactness_of(ddp, losses, single, expected, []).verdict == "disagrees"
        assert exactness_of(ddp, losses, single, expected, [], rounded).verdict == "exact"
    wrong = trained(batch=31)
    assert exactness_of(ddp, wrong, single, expected, [], rounded).verdict == "disagrees"
    wild = [2 * loss for loss in expected]
    assert exactness_of(ddp, [1.02 * loss for loss in expected], single, expected, [], wild).verdict == "disagrees"


def test_what_depends_on_how_a_batch_is_divided():
    def parts(name):
        return batch_dependent(load("digits", f"model.name={name}", "data.channels=3"))

    assert parts("cnn") == parts("resnet18") == ["batch norm"]
    assert parts("cnn_gn") == parts("vit_tiny") == []
    assert parts("efficientnet_b0") == ["batch norm", "dropout"] and parts("alexnet") == ["dropout"]
