"""The initial model of a run with several ranks: rank 0 builds it, and the others only its
shapes.
"""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

from tests import warm
from tests.command_line import QUIET, environment, latest, ok
from tests.strategies import gathered, on_ranks
from trainer import Classification
from trainer.data import open_datasets
from trainer.errors import RecipeError
from trainer.models.shapes import build_on_meta, copy_to_meta
from trainer.recipe import load
from trainer.training.initial_model import broadcast_weights, check_task


class Small(nn.Module):
    def __init__(self, wide=8):
        super().__init__()
        self.layer = nn.Linear(4, wide)
        self.width = wide


def holding(make):
    def built():
        model = Small()
        model.more = make()
        return model

    return built


WITHOUT_VALUES = {
    "tensor": (holding(lambda: torch.ones(3)), "neither a parameter nor a buffer"),
    "hidden tensor": (
        holding(lambda: {"deep": [(lambda x: lambda: x)(torch.ones(3))]}),
        "neither a parameter nor a buffer",
    ),
    "loose parameter": (
        holding(lambda: [nn.Parameter(torch.ones(3))]),
        "neither a parameter nor a buffer",
    ),
    "number": (holding(lambda: torch.ones(1).item()), "needs values"),
    "drawn": (holding(lambda: nn.Parameter(torch.randn(3, device="cpu"))), "draws random numbers"),
    "lazy": (holding(lambda: nn.LazyLinear(3)), "needs values"),
    "circle": (holding(lambda: [(circle := []), circle.append(circle)]), ""),
    "plain": (Small, ""),
}


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_a_model_is_built_without_values_or_refused_with_a_reason(name):
    make, expected = WITHOUT_VALUES[name]
    model, reason = build_on_meta(make)
    assert (expected in reason) if expected else (reason == "" and model.layer.weight.is_meta)


def test_a_copy_without_values_keeps_shared_tensors():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    copied = copy_to_meta(model)
    assert copied[1].weight is copied[0].weight
    assert all(p.is_meta for p in copied.parameters())
    assert not copied[0].bias.requires_grad and not model[0].weight.is_meta


class Looking(nn.Module):
    """A model with values that cannot be computed from shapes: computed buffers, and one in another
    memory order.
    """

    def __init__(self, num_classes, channels, image_size, plain=False, looks=False):
        super().__init__()
        self.first, self.last = (
            nn.Linear(image_size * image_size * channels, 32),
            nn.Linear(32, num_classes),
        )
        self.middle = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.middle[1].weight = self.middle[0].weight
        self.register_buffer("places", torch.randn(32), persistent=False)
        self.register_buffer("spread", torch.arange(32.0).expand(2, -1))
        self.register_buffer("turned", torch.randn(32, 16).t())
        self.plain = torch.randn(32) if plain else 1.0
        self.looks = torch.randn(1).item() if looks else 1.0

    def forward(self, x):
        x = self.first(x.flatten(1)) * self.plain + self.places + self.spread[0] + self.turned[3]
        return self.last(self.middle[1](torch.relu(self.middle[0](x)))) * self.looks


class Orthogonal(Looking):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.middle = nn.ModuleList(
            parametrizations.orthogonal(nn.Linear(32, 32)) for _ in range(2)
        )


MODELS = {
    "looking": (Looking, ""),
    "plain": (lambda *sizes: Looking(*sizes, plain=True), "neither a parameter nor a buffer"),
    "looks": (lambda *sizes: Looking(*sizes, looks=True), "needs values"),
    "orthogonal": (Orthogonal, "needs values"),
    "vit_tiny": (None, ""),
    "resnet18": (None, ""),
}


def ranks(path):
    """Compare every model at the start of a run on two ranks with that of one process."""
    from trainer import load_recipe, register_model, tasks
    from trainer.distributed.world_setup import create_world
    from trainer.modes import Context, create
    from trainer.training.initial_model import build_for_dataset, build_initial_model
    from trainer.training.randomness import seed_everything

    words = [
        "mode=fsdp",
        "devices=[cpu]",
        "data.name=synthetic",
        "data.samples=16",
        "data.val_samples=8",
    ]
    words += ["batch_size=8", "sync_bn=true", "model.freeze=1"]
    world = create_world(load_recipe("digits", *words))
    world.connect(60.0)
    reported = {}
    for name, (make, _) in MODELS.items():
        if make:
            register_model(name)(make)
        recipe = load_recipe("digits", *words, f"model.name={name}")
        messages = []
        data = open_datasets(recipe)
        task = tasks.create_task(recipe, data.classes)
        seed_everything(3, False)
        model = build_initial_model(recipe, task, data, None, world, messages.append)
        seed_everything(3, False)
        single = build_for_dataset(recipe, task, data)
        shapes = any(p.is_meta for p in model.parameters())
        strategy = create(Context(recipe, world, task, data.example(4)))
        strategy.setup(model)
        inputs = torch.linspace(
            -1,
            1,
            data.example(4).inputs.bytes,
        ).view(4, *data.example(4).shape[1:])
        strategy.train(False)
        out = strategy.forward(inputs)
        whole = gathered(strategy, strategy.named_parameters()) or dict(single.named_parameters())
        every = {**whole, **dict(strategy.module.named_buffers())}
        expected = {**dict(single.named_parameters()), **dict(single.named_buffers())}
        apart = [key for key in expected if not torch.equal(every[key], expected[key])]
        trains, alike = (
            [p.requires_grad for p in ps]
            for ps in (strategy.named_parameters().values(), single.parameters())
        )
        assert apart == [] and trains == alike, name
        torch.testing.assert_close(
            out,
            single.eval()(inputs),
            rtol=0,
            atol=1e-5,
        )
        reported[name] = shapes, messages
    (path / f"{world.rank}.json").write_text(json.dumps(reported))
    world.close()
    os._exit(0)  # gloo may abort in the interpreter's own end


@pytest.mark.slow
def test_every_rank_begins_with_the_weights_of_single_and_only_rank_0_builds_them(tmp_path):
    script = (
        "import sys; from pathlib import Path; from "
        "tests.training.test_initial_model import ranks\n"
    )
    (tmp_path / "ranks.py").write_text(f"{script}ranks(Path(sys.argv[1]))\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(tmp_path / "ranks.py"), str(tmp_path)]
    completed = warm.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.returncode == 0, completed.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name, (_, reason) in MODELS.items():
        (whole, message), (shapes, _) = first[name], second[name]
        assert (whole, shapes) == (False, not reason), name
        assert len(message) == bool(reason) and all(reason in line for line in message), name


@pytest.mark.parametrize("alike", [True, False])
def test_rank_0s_weights_are_everywhere_though_a_model_draws_without_a_seed(alike):
    def begins(world):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        message = []
        for tensor in (*model.parameters(), model[1].running_mean):
            nn.init.constant_(tensor, 1.0 if alike else 1.0 + world.rank)
        broadcast_weights(model, "own", world, message.append)
        return torch.cat(
            [tensor.detach().reshape(-1) for tensor in (*model.parameters(), model[1].running_mean)]
        ), message

    for values, message in on_ranks(3, begins):
        assert (values == 1).all() and len(message) == (not alike)


def test_a_model_of_other_shapes_on_each_rank_is_refused_everywhere():
    def begins(world):
        with pytest.raises(RecipeError, match=r"model\.name=own .*seed"):
            broadcast_weights(nn.Linear(3, 2 + world.rank), "own", world, print)
        return True

    assert all(on_ranks(2, begins))


def ignoring(outputs, targets, reduction="mean"):
    return cross_entropy(outputs, targets.where(targets > 4, -100), reduction=reduction)


LOSSES = {
    "each its own": (
        lambda outputs, targets: cross_entropy(outputs, targets, reduction="none").square().mean(),
        False,
    ),
    "some ignored": (ignoring, True),
    "ignored ones are 0": (
        lambda outputs, targets: ignoring(outputs, targets, "none").mean(),
        False,
    ),
    "divided by weights": (
        lambda outputs, targets: cross_entropy(outputs, targets, torch.arange(1.0, 11)),
        True,
    ),
    "not of such outputs": (lambda outputs, targets: outputs.log().mean(), False),
    "of whole batches": (lambda outputs, targets: outputs.view(7, -1).mean(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_depends_on_the_division_of_a_batch_is_reported(name):
    loss, message = LOSSES[name]
    kind = type(
        "Own", (Classification,), {"loss": lambda self, outputs, targets: loss(outputs, targets)}
    )
    recipe = load("digits", "data.name=synthetic", "data.image_size=8", "data.channels=1")
    data = open_datasets(recipe)
    messages = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = torch.get_rng_state()
    check_task(kind(recipe, data.classes), model, data, messages.append)
    assert bool(messages) == message and torch.equal(torch.get_rng_state(), before)
    pattern = r"task\.name=classification\b.*reduction='none'"
    assert all(re.search(pattern, line) for line in messages)
    check_task(kind(recipe, data.classes), model, data, None)


LISTED = """
from torch import nn
from tests.modes.odd_models import Plain
from trainer import register_model

class Listed(Plain):
    def __init__(self):
        super().__init__()
        self.norms = [nn.BatchNorm1d(16)]

    def between(self, x):
        return self.norms[0](x)

register_model("listed")(lambda num_classes, channels, image_size: Listed())
"""


def test_a_layer_that_torch_does_not_register_is_named_at_start_up(tmp_path):
    (tmp_path / "listed.py").write_text(LISTED)
    words = [
        "recipe=digits",
        "plugin=listed",
        "model.name=listed",
        "mode=single",
        "max_steps=1",
        "threads=1",
        *QUIET,
    ]
    completed = ok(*latest(*words), f"output={tmp_path / 'run'}", cwd=tmp_path)
    messages = [
        line for line in (completed.stdout + completed.stderr).splitlines() if "norms[0]" in line
    ]
    assert len(messages) == 1
    assert "ModuleList" in messages[0]
