"""How a global batch is cut where memory is short."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load
from trainer.training import speed_test
from trainer.training.speed_test import pieces_that_fit


@pytest.mark.parametrize(
    ("rows", "accumulate", "per_image", "room", "multiple", "expected"),
    [
        (64, 1, 1, 64, 1, 1),
        (64, 1, 1, 63, 1, 2),
        (64, 1, 1, 20, 1, 4),
        (64, 8, 1, 64, 1, 8),  # never fewer than the recipe says
        (60, 1, 1, 16, 1, 4),  # 60 / 4 = 15; only divisors count
        (64, 1, 1, 1, 2, 32),  # pairs stay together
        (64, 1, 1, 0, 1, 64),  # nothing fits: the smallest there is
        (64, 1, 1, -5, 1, 64),
    ],
)
def test_pieces(rows, accumulate, per_image, room, multiple, expected):
    assert pieces_that_fit(rows, accumulate, per_image, room, multiple) == expected


@pytest.mark.parametrize(("devices", "pieces"), [(("cuda:0", "cuda:1"), 1), (("cuda:0#0", "cuda:0#1"), 2)])
def test_workers_that_share_a_card_share_its_memory(devices, pieces, monkeypatch):
    """A card with room for two workers' weights and 40 images, where each shall train 32."""
    shared = "#" in devices[0]
    world = World(Place(0, 2, 0, 2, 0, True), torch.device("cuda:0"), 1, devices, (), shared)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    per_image = speed_test.activation_bytes(model, (2, 3, 8, 8)) / 2
    weights = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    free = (40 * per_image + 2 * weights) / speed_test.SHARE
    monkeypatch.setattr(speed_test, "free_memory", lambda device: free)
    monkeypatch.setattr(World, "broadcast_object", lambda self, value: value)
    data = SimpleNamespace(channels=3, image_size=8)
    recipe = load(None, "mode=local_sgd", "model.name=mlp", "batch_size=64")
    said = []
    found = speed_test.speed_recipe(recipe, model, data, world, said.append)
    assert found.accumulate == pieces, said
