"""What tests of plans plan, and the real thing beside it."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.contexts import mode_of
from trainer import load_recipe
from trainer.commands.plan import forecast, speed_probe
from trainer.commands.plan.dataset_facts import dataset_facts
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.speed_probe import Timings
from trainer.data import Batch
from trainer.models.balance import BlockCost
from trainer.models.zoo import build
from trainer.processes.rank import Place
from trainer.processes.world import World

# With an image's pixels.
MODELS = {"resnet18": 64, "vit_tiny": 32, "cnn": 32, "mobilenet_v3_small": 64, "densenet121": 64}


def recipe_of(*words):
    """On synthetic images, on one CPU where the words do not say otherwise."""
    given = {word.partition("=")[0] for word in words}
    defaults = ["mode=single", "devices=[cpu]", "data.name=synthetic"]
    return load_recipe(None, *(word for word in defaults if word.partition("=")[0] not in given), *words)


def sized(name, *words):
    return recipe_of(f"model.name={name}", f"data.image_size={MODELS[name]}", "batch_size=16", *words)


def fake_of(recipe):
    return FakeModel(recipe, dataset_facts(recipe), "cpu")


def alone(devices=1):
    cpu = torch.device("cpu")
    return World(Place(), cpu, 1, ("cpu",) * devices, (cpu,) * devices)


def real(recipe, world=None):
    """The recipe's strategy with a real model and this rank's batch."""
    images, world = dataset_facts(recipe), world or alone()
    rows = recipe.batch_size // world.size // recipe.accumulate
    shape = (rows, images.channels, images.size, images.size)
    strategy = mode_of(recipe, world, shape, classes=images.classes)
    strategy.setup(build(recipe.model, images.classes, images.channels, images.size))
    strategy.train()
    inputs = torch.randn(shape, device=world.device)
    if recipe.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return strategy, Batch(inputs, torch.zeros(rows, dtype=torch.int64, device=world.device), rows)


def measured_peak(work):
    """Most bytes that `work` has allocated at once, by the profiler's memory events; the test is skipped where these
    have more than activations."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("without AVX-512, oneDNN copies a convolution's weights, 19 MB in ResNet-18, while that runs")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fixed_speed(monkeypatch):
    """measured=here finds that 128 images take 80 ms, by FLOPs in stages, and optimizer and the rest 10 ms each."""

    def here(layout, images, plugin):
        fake, blocks = FakeModel(layout.recipe, images, layout.kind), {}
        for rows in {-(-layout.rows // m) for m in forecast.candidates(layout)} if layout.staged else ():
            costs = fake.blocks(rows)
            scale = 0.08 * rows / 128 / sum(cost.forward + cost.backward for cost in costs)
            blocks[rows] = [BlockCost(scale * cost.forward, scale * cost.backward, cost.bytes) for cost in costs]
        return Timings(0.08 / 128, 128, 0.01, 0.01, blocks)

    monkeypatch.setattr(speed_probe, "here", here)


def of_cnn(mode, *words):
    return load_recipe(None, f"mode={mode}", "model.name=cnn", "data.name=synthetic", "batch_size=128", *words)
