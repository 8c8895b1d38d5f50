"""What tests of plans plan, and the real thing beside it."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.contexts import mode_of
from trainer import load_recipe
from trainer.commands.plan.dataset_facts import dataset_facts
from trainer.commands.plan.fake_model import FakeModel
from trainer.data import Batch
from trainer.models.zoo import build
from trainer.processes.rank import Place
from trainer.processes.world import World

MODELS = {
    "resnet18": 64,
    "vit_tiny": 32,
    "cnn": 32,
    "mobilenet_v3_small": 64,
    "densenet121": 64,
}  # with an image's pixels


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
    """The recipe's strategy with a real model and a batch."""
    images = dataset_facts(recipe)
    shape = (recipe.batch_size // recipe.accumulate, images.channels, images.size, images.size)
    strategy = mode_of(recipe, world or alone(), shape)
    strategy.setup(build(recipe.model, images.classes, images.channels, images.size))
    strategy.train()
    inputs = torch.randn(shape)
    if recipe.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return strategy, Batch(inputs, torch.zeros(shape[0], dtype=torch.int64), shape[0])


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


def run_folder(path, *words, **result):
    """A run folder as training leaves it, made up."""
    recipe = recipe_of("model.name=cnn", "devices=auto", *words)
    path.mkdir()
    (path / "recipe.yaml").write_text(recipe.to_yaml())
    step = {"data": 0.1, "compute": 0.8, "communication": 0.0, "bubble": 0.0, "optimizer": 0.1, "logging": 0.0}
    made = {
        "mode": recipe.mode,
        "world_size": 1,
        "devices": ["cpu"],
        "batch_size": recipe.batch_size,
        "accumulate": recipe.accumulate,
        "step_time_s": {"mean": 0.1},
        "data_wait_fraction": 0.1,
        "verdict": {"step": step},
        "pipeline": None,
        **result,
    }
    (path / "result.json").write_text(json.dumps(made))
    return str(path)


def of_cnn(mode, *words):
    return load_recipe(None, f"mode={mode}", "model.name=cnn", "data.name=synthetic", "batch_size=128", *words)
