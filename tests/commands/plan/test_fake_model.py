"""A model of shapes alone, against a real one and the profiler's memory events."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.commands.plan.plans import (
    MODELS,
    alone,
    create_fake_model,
    measured_peak,
    real,
    recipe_of,
    size,
    sized,
)
from trainer import load_recipe, plan
from trainer.commands.plan.dataset_facts import DatasetFacts, read_dataset_facts
from trainer.commands.plan.fake_model import FakeModel
from trainer.commands.plan.planned_layout import lay_out
from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.memory.needs import measure_peak
from trainer.memory.prediction import footprint
from trainer.models import zoo
from trainer.models.zoo import build
from trainer.modes.pipeline.orders import compute_issue_order
from trainer.optim.optimizers import build_optimizer, name_optimizer_state
from trainer.optim.trainable import find_roles
from trainer.recipe import ModelRecipe

FULL = pytest.mark.full("each model, optimizer and precision is in the sample")
OPTIMIZERS = {
    "momentum": ["optimizer.momentum=0.9", "optimizer.norm_weight_decay=0.0"],
    "sgd": ["optimizer.momentum=0"],
    "muon": ["optimizer.name=muon", "model.freeze=2"],
    "adamw": ["optimizer.name=adamw", "optimizer.lr=0.001", "ema=0.9"],
}


def sample(rows, columns, *chosen):
    """Return all pairs; only some of them are chosen without the full counts."""
    pairs = [(row, column) for row in rows for column in columns]
    return [pytest.param(*pair, marks=() if pair in chosen else FULL) for pair in pairs]


TRAINED = [
    ("resnet18", "momentum"),
    ("vit_tiny", "adamw"),
    ("cnn", "momentum"),
    ("cnn", "adamw"),
    ("mobilenet_v3_small", "momentum"),
    ("densenet121", "sgd"),
    ("resnet18", "muon"),
    ("vit_tiny", "muon"),
]
RUN = [
    ("resnet18", "bf16"),
    ("vit_tiny", "fp32"),
    ("cnn", "fp32"),
    ("cnn", "bf16"),
    ("mobilenet_v3_small", "fp32"),
]


@pytest.mark.slow(cases=["resnet18-muon", "densenet121-sgd", "mobilenet_v3_small-momentum"])
@pytest.mark.parametrize(("name", "optimizer"), sample(MODELS, OPTIMIZERS, *TRAINED))
def test_weights_and_optimizer_are_those_of_a_real_model(name, optimizer):
    recipe = sized(name, *OPTIMIZERS[optimizer])
    images = read_dataset_facts(recipe)
    fake = create_fake_model(recipe)
    model = build(recipe.model, images.classes, images.channels, images.size)
    parameters = dict(model.named_parameters())
    state = name_optimizer_state(
        build_optimizer(parameters, recipe.optimizer, find_roles(model, recipe)), parameters
    )
    own = fake.resident(fake.model)
    assert own.parameters == size(parameters.values())
    assert own.gradients == size(p for p in parameters.values() if p.requires_grad)
    assert own.optimizer == size(state.values())
    assert own.buffers == size(model.buffers())
    assert own.ema == (size(model.state_dict().values()) if recipe.ema else 0)
    assert sum(p.numel() for p in fake.model.parameters()) == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.slow
def test_a_fake_model_allocates_no_memory():
    fake = create_fake_model(
        recipe_of("model.name=resnet50", "data.image_size=224", "batch_size=256")
    )
    assert all(isinstance(tensor, FakeTensor) for tensor in fake.model.state_dict().values())
    assert fake.whole(256, gradients=True).peak > 20 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), sample(MODELS, ["fp32", "bf16"], *RUN))
def test_activations_are_those_that_the_profiler_sees(name, precision):
    recipe = sized(name, f"precision={precision}")
    strategy, batch = real(recipe)
    strategy.forward_backward(batch, 1 / 16)
    fake = create_fake_model(recipe)
    # Gradients are there to be added to.
    again = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    assert fake.whole(16, gradients=True).peak == pytest.approx(again, rel=0.15)
    strategy.module.zero_grad()
    first = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    assert fake.whole(16, gradients=False).peak == pytest.approx(first, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["channels_last=false"], marks=FULL),
        ["augment.mixup=0.2", "loss.label_smoothing=0.1", "accumulate=4"],
        ["model.freeze=6", "accumulate=2"],
        pytest.param(["model.freeze=[fc]", "accumulate=2"], marks=FULL),
    ],
    ids=["contiguous", "mixup", "frozen", "frozen head"],
)
def test_activations_under_options(words):
    recipe = sized("resnet18", *words)
    strategy, batch = real(recipe)
    rows = len(batch.inputs)
    if recipe.augment.mixup:
        batch = Batch(batch.inputs, torch.full((rows, 10), 0.1), rows)
    strategy.forward_backward(batch, 1 / 16)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    (device,) = footprint(create_fake_model(recipe), lay_out(recipe))
    assert device.activations == pytest.approx(peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute"),
    sample(["resnet18", "vit_tiny"], [False, True], ("resnet18", False), ("vit_tiny", True)),
)
def test_a_pipeline_holds_what_the_profiler_sees(name, recompute):
    """The stages of a pipeline share one process, so their memory is measured together."""
    words = [
        "mode=pipeline",
        "devices=[cpu,cpu]",
        "pipeline.microbatches=4",
        f"recompute={recompute}",
    ]
    cut = {"resnet18": "layer2.1", "vit_tiny": "encoder.layers.encoder_layer_1"}[name]
    recipe = sized(name, *words, f"pipeline.cuts=[{cut}]")
    strategy, batch = real(recipe, alone(2))
    strategy.forward_backward(batch, 1 / 16)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    fake = create_fake_model(recipe)
    layout = lay_out(recipe)
    stages = [stage.memory for stage in fake.cut(layout).stages]
    assert measure_peak(compute_issue_order(2, 4), stages) == pytest.approx(peak, rel=0.15)


def test_a_model_that_looks_at_values(monkeypatch):
    class Looks(nn.Flatten):
        def forward(self, x):
            return super().forward(x)[:, :10] * (2 if x.sum().item() > 0 else 1)

    def looks(classes, channels, size):
        return nn.Sequential(Looks(), nn.Linear(10, classes))

    monkeypatch.setitem(zoo.builders, "looks_at_values", looks)
    with pytest.raises(
        RecipeError, match=r"model\.name=looks_at_values .*\baten\._local_scalar_dense\b"
    ):
        plan(load_recipe("digits", "model.name=looks_at_values"))


@pytest.mark.parametrize(
    ("name", "weights", "starting"),
    [
        ("timm:resnet10t", "DEFAULT", False),
        ("timm:resnet10t", "null", True),
        ("resnet18", "DEFAULT", False),
        ("resnet18", "null", True),
    ],
)
def test_a_plan_downloads_no_published_weights(name, weights, starting, monkeypatch):
    asked = []

    def model(self, recipe, starting):
        asked.append(starting)
        return build(ModelRecipe(name="mlp"), 10, 1, 8)

    monkeypatch.setattr(DatasetFacts, "model", model)
    layout = lay_out(load_recipe("digits", f"model.name={name}", f"model.weights={weights}"))
    FakeModel(layout, read_dataset_facts(layout.recipe))
    assert asked == [starting]
