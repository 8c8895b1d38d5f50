"""Models that tests of plans plan, and the same models for real."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.strategies import create_strategy
from trainer import load_recipe
from trainer.commands.plan import forecast, speed_probe
from trainer.commands.plan.dataset_facts import read_dataset_facts
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.speed_probe import Timings
from trainer.data import Batch
from trainer.distributed.world import World
from trainer.models.balance import BlockCost
from trainer.models.zoo import build
from trainer.processes.rank import Place
from trainer.recipe.layout import Layout

# Models with the side of their images in pixels.
MODELS = {"resnet18": 64, "vit_tiny": 32, "cnn": 32, "mobilenet_v3_small": 64, "densenet121": 64}


def recipe_of(*words):
    """Return a recipe for synthetic images, on one CPU unless the arguments say otherwise."""
    arguments = {word.partition("=")[0] for word in words}
    defaults = ["mode=single", "devices=[cpu]", "data.name=synthetic"]
    return load_recipe(
        None, *(word for word in defaults if word.partition("=")[0] not in arguments), *words
    )


def sized(name, *words):
    return recipe_of(
        f"model.name={name}", f"data.image_size={MODELS[name]}", "batch_size=16", *words
    )


def create_fake_model(recipe):
    return FakeModel(Layout(recipe, 1, ("cpu",)), read_dataset_facts(recipe))


def alone(devices=1):
    cpu = torch.device("cpu")
    return World(
        Place(),
        cpu,
        1,
        ("cpu",) * devices,
        (cpu,) * devices,
    )


def real(recipe, world=None):
    """The recipe's strategy with a real model and this rank's batch."""
    images = read_dataset_facts(recipe)
    world = world or alone()
    rows = recipe.batch_size // world.size // recipe.accumulate
    shape = (rows, images.channels, images.size, images.size)
    strategy = create_strategy(recipe, world, shape, classes=images.classes)
    strategy.setup(build(recipe.model, images.classes, images.channels, images.size))
    strategy.train()
    inputs = torch.randn(shape, device=world.device)
    if recipe.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return strategy, Batch(
        inputs,
        torch.zeros(rows, dtype=torch.int64, device=world.device),
        rows,
    )


def measured_peak(work):
    """Return the maximum number of bytes allocated during `work`, by the profiler's memory events.

    Skip the test if these include more than activations.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip(
            "without AVX-512, oneDNN copies a convolution's weights, 19 MB in ResNet-18, while "
            "that runs"
        )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fixed_speed(monkeypatch):
    """Simulate measured=here: 128 images take 80 ms, divided among stages by FLOPs, and optimizer
    and rest 10 ms each.
    """

    def here(layout, images, plugin):
        fake = FakeModel(layout, images)
        blocks = {}
        for rows in (
            {-(-layout.rows // m) for m in forecast.list_candidates(layout)}
            if layout.staged
            else ()
        ):
            costs = fake.blocks(rows)
            scale = 0.08 * rows / 128 / sum(cost.forward + cost.backward for cost in costs)
            blocks[rows] = [
                BlockCost(scale * cost.forward, scale * cost.backward, cost.bytes) for cost in costs
            ]
        return Timings(0.08 / 128, 128, 0.01, blocks)

    monkeypatch.setattr(speed_probe, "measure_here", here)


def cnn_recipe(mode, *words):
    return load_recipe(
        None, f"mode={mode}", "model.name=cnn", "data.name=synthetic", "batch_size=128", *words
    )
