"""A model of shapes alone, against a real one and the profiler's memory events."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.commands.plan.plans import MODELS, alone, fake_of, measured_peak, real, recipe_of, size, sized
from trainer.__main__ import answer
from trainer.commands.plan import schedules
from trainer.commands.plan.dataset_facts import dataset_facts
from trainer.commands.plan.planned_layout import lay_out
from trainer.commands.plan.planned_memory import footprint
from trainer.data import Batch
from trainer.models.memory import held
from trainer.models.zoo import build
from trainer.modes.pipeline.orders import issue_order
from trainer.optim.optimizers import build_optimizer, optimizer_state
from trainer.optim.trainable import roles_of

FULL = pytest.mark.full("each model, optimizer and precision is in the sample")
OPTIMIZERS = {
    "momentum": ["optimizer.momentum=0.9", "optimizer.norm_weight_decay=0.0"],
    "sgd": ["optimizer.momentum=0"],
    "adamw": ["optimizer.name=adamw", "optimizer.lr=0.001", "ema=0.9"],
}


def sample(rows, columns, *chosen):
    """All pairs, those that are not chosen for the full counts."""
    pairs = [(row, column) for row in rows for column in columns]
    return [pytest.param(*pair, marks=() if pair in chosen else FULL) for pair in pairs]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    sample(
        MODELS,
        OPTIMIZERS,
        *[("resnet18", "momentum"), ("vit_tiny", "adamw"), ("cnn", "momentum"), ("cnn", "adamw")],
        *[("mobilenet_v3_small", "momentum"), ("densenet121", "sgd")],
    ),
)
def test_weights_and_optimizer_are_those_of_a_real_model(name, optimizer):
    recipe = sized(name, *OPTIMIZERS[optimizer])
    images, fake = dataset_facts(recipe), fake_of(recipe)
    model = build(recipe.model, images.classes, images.channels, images.size)
    parameters = dict(model.named_parameters())
    state = optimizer_state(build_optimizer(parameters, recipe.optimizer), parameters)
    own = fake.resident(fake.model)
    assert own.parameters == own.gradients == size(parameters.values())
    assert own.optimizer == size(state.values())
    assert own.buffers == size(model.buffers())
    assert own.ema == (size(model.state_dict().values()) if recipe.ema else 0)
    assert fake.size == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["vit_tiny", "resnet18"])
def test_muon_has_one_tensor_a_matrix_and_what_is_frozen_none(name):
    recipe = sized(name, "optimizer.name=muon", "model.freeze=2")
    images, own = dataset_facts(recipe), (fake := fake_of(recipe)).resident(fake.model)
    model = build(recipe.model, images.classes, images.channels, images.size)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, recipe.optimizer, roles_of(model, recipe))
    assert own.optimizer == size(optimizer_state(optimizer, parameters).values())
    assert own.gradients == size(p for p in parameters.values() if p.requires_grad) < own.parameters
    matrices = size(group["params"][0] for group in optimizer.param_groups if len(group["params"]) == 1)
    assert own.optimizer == pytest.approx(2 * own.gradients - matrices, rel=0.01)


def test_nothing_is_allocated():
    fake = fake_of(recipe_of("model.name=resnet50", "data.image_size=224", "batch_size=256"))
    assert all(isinstance(tensor, FakeTensor) for tensor in fake.model.state_dict().values())
    assert fake.whole(256, gradients=True).peak > 20 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    sample(
        MODELS,
        ["fp32", "bf16"],
        *[("resnet18", "bf16"), ("vit_tiny", "fp32"), ("cnn", "fp32"), ("cnn", "bf16"), ("mobilenet_v3_small", "fp32")],
    ),
)
def test_activations_are_those_that_the_profiler_sees(name, precision):
    recipe = sized(name, f"precision={precision}")
    strategy, batch = real(recipe)
    strategy.forward_backward(batch, 1 / 16)
    fake = fake_of(recipe)
    again = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))  # gradients are there to be added to
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
    (device,) = footprint(fake_of(recipe), lay_out(recipe))
    assert device.activations == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny"])
def test_saved_bytes_are_those_that_autograd_keeps(name):
    recipe = sized(name)
    strategy, batch = real(recipe)
    own = {p.untyped_storage().data_ptr() for p in strategy.module.parameters()} | {
        batch.inputs.untyped_storage().data_ptr()
    }
    kept = {}

    def pack(tensor):
        key = tensor.untyped_storage().data_ptr()
        if key not in own:
            kept[key] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = strategy.loss(strategy.outputs(batch.inputs), batch.targets)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert loss.requires_grad
    assert fake_of(recipe).whole(16, gradients=True).saved == pytest.approx(saved, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute"), sample(["resnet18", "vit_tiny"], [False, True], ("resnet18", False), ("vit_tiny", True))
)
def test_a_pipeline_holds_what_the_profiler_sees(name, recompute):
    """All stages of a pipeline in one process, so what is measured is what the stages hold together."""
    words = ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.microbatches=4", f"pipeline.recompute={recompute}"]
    cut = {"resnet18": "layer2.1", "vit_tiny": "encoder.layers.encoder_layer_1"}[name]
    recipe = sized(name, *words, f"pipeline.cuts=[{cut}]")
    strategy, batch = real(recipe, alone(2))
    strategy.forward_backward(batch, 1 / 16)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 16))
    fake, layout = fake_of(recipe), lay_out(recipe)
    stages = [stage.memory for stage in schedules.cut(fake, layout).stages]
    assert held(issue_order(2, 4), stages) == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    "name",
    [
        *("alexnet", "convnext_tiny", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5"),
        *("regnet_y_400mf", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11"),
        "vit_b_32",
    ],
)
@pytest.mark.full("long, a model of each family")
def test_torchvisions_families(name):
    pixels = 299 if name == "inception_v3" else 224
    recipe = recipe_of(f"model.name={name}", f"data.image_size={pixels}", "batch_size=4")
    images, fake = dataset_facts(recipe), fake_of(recipe)
    model = build(recipe.model, images.classes, images.channels, images.size)
    assert fake.resident(fake.model).parameters == size(model.parameters())
    strategy, batch = real(recipe)
    strategy.forward_backward(batch, 1 / 4)
    peak = measured_peak(lambda: strategy.forward_backward(batch, 1 / 4))
    assert fake.whole(4, gradients=True).peak == pytest.approx(peak, rel=0.15)


def test_a_model_that_looks_at_values(capsys, tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(
        "from torch import nn\n"
        "from trainer import register_model\n\n\n"
        "class Looks(nn.Module):\n"
        "    def __init__(self, classes, channels):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(channels * 64, classes)\n\n"
        "    def forward(self, x):\n"
        "        return self.head(x.flatten(1)) * (2 if x.sum().item() > 0 else 1)\n\n\n"
        "@register_model('looks_at_values')\n"
        "def looks(classes, channels, size):\n"
        "    return Looks(classes, channels)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert answer(["plan", "recipe=digits", "plugin=looks", "model.name=looks_at_values"]) == 2
    assert "needs more than shapes" in capsys.readouterr().err
