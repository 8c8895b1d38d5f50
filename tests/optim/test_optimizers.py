"""Muon against torch's own, shares of the learning rate, and who has state."""

import copy
import mmap

import numpy as np
import pytest
import torch
from torch import nn

from tests.optim.rows import NAMES
from trainer.errors import RecipeError
from trainer.models.blocks import freeze
from trainer.models.zoo import build
from trainer.modes.hogwild import move
from trainer.optim import muon
from trainer.optim.classes import fill_state
from trainer.optim.optimizers import (
    LearningRates,
    build_optimizer,
    name_optimizer_state,
    round_to_float32,
)
from trainer.optim.trainable import find_roles, list_hidden_matrices
from trainer.recipe import load
from trainer.recipe.optimizer_table import OPTIMIZERS


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.LayerNorm(8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def made(model, *words):
    recipe = load(None, *words)
    named = dict(model.named_parameters())
    return build_optimizer(named, recipe.optimizer, find_roles(model, recipe)), named


def descend(model, optimizers, found=None):
    torch.manual_seed(1)
    for _ in range(6):
        loss = model(torch.randn(5, 6)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.found_inf = found
            optimizer.step()


@pytest.fixture
def native(monkeypatch):
    """A CPU that has instructions for bf16, in which torch's Muon always computes."""
    monkeypatch.setattr(muon, "is_emulated", lambda precision, device: False)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (8, 8)])
def test_where_bf16_is_emulated_directions_are_computed_in_fp32(shape, native, monkeypatch):
    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    expected = muon.orthogonalize(matrices)
    kinds = []

    def multiply(*args, **options):
        kinds.append(args[0].dtype)
        return baddbmm(*args, **options)

    baddbmm = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", multiply)
    monkeypatch.setattr(muon, "is_emulated", lambda precision, device: precision == "bf16")
    actual = muon.orthogonalize(matrices)
    assert {*kinds} == {torch.float32} and actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0.03)
    left, values, right = torch.linalg.svd(matrices.bfloat16().float(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for _ in range(muon.ITERATIONS):
        # The iteration keeps singular vectors, and maps each singular value by this polynomial.
        a, b, c = muon.COEFFICIENTS
        values = a * values + b * values**3 + c * values**5
    exact = left @ torch.diag_embed(values) @ right
    assert (actual - exact).abs().max() < 0.005 < (expected - exact).abs().max()


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["number", "tensor"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_with_its_adamw(nesterov, device, native):
    ours = small()
    reference = small()
    words = [
        "optimizer.name=muon",
        "optimizer.lr=0.01",
        "optimizer.momentum=0.95",
        "optimizer.weight_decay=0.1",
    ]
    optimizer, named = made(ours, *words, f"optimizer.nesterov={nesterov}")
    LearningRates(optimizer, device).set(0.01)
    descend(ours, [optimizer], found=torch.zeros(()))
    hidden = [reference[0].weight, reference[3].weight]
    rest = [p for p in reference.parameters() if all(p is not one for one in hidden)]
    options = {
        "momentum": 0.95,
        "nesterov": nesterov,
        "weight_decay": 0.1,
        "adjust_lr_fn": "match_rms_adamw",
    }
    lr = round_to_float32(0.01)
    theirs = torch.optim.Muon(hidden, lr=lr, **options)
    descend(
        reference,
        [
            theirs,
            torch.optim.AdamW(
                rest,
                lr=lr,
                weight_decay=0.1,
                fused=True,
            ),
        ],
    )
    torch.testing.assert_close(
        ours.state_dict(),
        reference.state_dict(),
        rtol=0,
        atol=0,
    )
    kinds = {
        key.partition("//")[0]: key.partition("//")[2]
        for key in name_optimizer_state(optimizer, named)
    }
    assert [name for name, kind in kinds.items() if kind == "momentum_buffer"] == [
        "0.weight",
        "3.weight",
    ]


IN_A_LAYER = (
    "self_attention.in_proj_weight",
    "self_attention.out_proj.weight",
    "mlp.0.weight",
    "mlp.3.weight",
)
HIDDEN = {
    "mlp": {"1.weight", "3.weight"},
    "vit_tiny": {
        f"encoder.layers.encoder_layer_{layer}.{name}" for layer in range(4) for name in IN_A_LAYER
    },
}


@pytest.mark.parametrize("model", HIDDEN)
def test_hidden_matrices(model):
    recipe = load(None, f"model.name={model}", "optimizer.name=muon")
    assert list_hidden_matrices(build(recipe.model, 10, 1, 8), recipe) == HIDDEN[model]


class Convolutions(nn.Sequential):
    """Convolutions of all kinds: the first, a plain one, one of one pixel, one in groups, a line of
    them, the last layer.
    """

    def __init__(self):
        torch.manual_seed(0)
        plain = nn.Conv2d(4, 8, 3, stride=2)
        point = nn.Conv2d(8, 8, 1)
        groups = nn.Conv2d(8, 8, 1, groups=8)
        line = [
            nn.Flatten(2),
            nn.Conv1d(8, 6, 2),
            nn.Flatten(),
            nn.Linear(18, 3),
        ]
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1),
            plain,
            nn.BatchNorm2d(8),
            point,
            groups,
            *line,
        )


def test_hidden_matrices_of_convolutions():
    recipe = load(None, "optimizer.name=muon")
    assert list_hidden_matrices(Convolutions(), recipe) == {"1.weight", "3.weight", "6.weight"}
    recipe = load(None, "model.name=resnet20", "optimizer.name=muon")
    model = build(recipe.model, 10, 3, 32)
    everything = [
        f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)
    ]
    assert list_hidden_matrices(model, recipe) == {*everything[1:]}
    recipe = load(None, "model.name=squeezenet1_1", "optimizer.name=muon")
    actual = list_hidden_matrices(build(recipe.model, 10, 3, 64), recipe)
    assert "features.3.squeeze.weight" in actual and "classifier.1.weight" not in actual, (
        "the last layer"
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_muon_takes_a_convolution_as_torchs_takes_its_matrix(layout, nesterov, native):
    """A stranger's Muon on a copy of the weight as a matrix, with the gradients that ours had."""
    model = Convolutions().to(memory_format=layout)
    words = [
        "optimizer.name=muon",
        "optimizer.lr=0.01",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0.1",
    ]
    optimizer, _ = made(model, *words, f"optimizer.nesterov={nesterov}")
    ours = [model[1].weight, model[3].weight, model[6].weight]
    start = ours[0].detach().clone()
    reference = [nn.Parameter(p.detach().flatten(1).clone()) for p in ours]
    options = {
        "momentum": 0.9,
        "nesterov": nesterov,
        "weight_decay": 0.1,
        "adjust_lr_fn": "match_rms_adamw",
    }
    theirs = torch.optim.Muon(reference, lr=0.01, **options)
    torch.manual_seed(1)
    for step in range(5):
        # Schedules change the rate like this.
        for rate in (optimizer.param_groups, theirs.param_groups):
            for group in rate:
                group["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        model(torch.randn(5, 3, 5, 5).contiguous(memory_format=layout)).square().mean().backward()
        for p, twin in zip(ours, reference, strict=True):
            twin.grad = p.grad.flatten(1).clone()
        optimizer.step()
        theirs.step()
    assert (ours[0] - start).abs().max() > 0.01, "and it moves"
    for p, twin in zip(ours, reference, strict=True):
        exact = (
            {"rtol": 0, "atol": 0}
            if layout is torch.contiguous_format
            else {"rtol": 0, "atol": 2e-3}
        )
        torch.testing.assert_close(p.flatten(1), twin, **exact)


def test_muon_updates_a_convolution_where_it_lies():
    """The weights stay in shared memory and keep their layout."""
    model = Convolutions().to(memory_format=torch.channels_last)
    parameters = list(model.parameters())
    memory = mmap.mmap(-1, 2**16)
    move(parameters, memory, fill=True)
    optimizer, _ = made(model, "optimizer.name=muon", "optimizer.lr=0.01")
    before = bytes(memory)
    places = [p.data_ptr() for p in parameters]
    weight = model[1].weight
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert [p.data_ptr() for p in parameters] == places and not weight.is_contiguous()
    changed = np.flatnonzero(
        np.frombuffer(before, np.float32) != np.frombuffer(bytes(memory), np.float32)
    )
    assert len(changed) > 0.9 * weight.numel()
    assert np.ptp(changed) < weight.numel()


def state_of(model, optimizer):
    return {**model.state_dict(), **name_optimizer_state(optimizer, dict(model.named_parameters()))}


def as_bytes(state):
    return {name: tensor.numpy(force=True).tobytes() for name, tensor in state.items()}


WITH_TENSORS = {name: [f"optimizer.name={name}"] for name in OPTIMIZERS}
WITH_TENSORS["sgd"] += ["optimizer.momentum=0.9", "optimizer.nesterov=true"]
SHARES = [
    "optimizer.layer_decay=0.5",
    "optimizer.weight_decay=0.1",
    "optimizer.norm_weight_decay=0",
]


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("build_model", [small, Convolutions])
@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.fused])
def test_a_learning_rate_as_a_tensor_is_the_number_to_the_bit(name, build_model):
    """Fractions of the rate, changes from step to step, and skipped steps give the same bits."""
    states = []
    for device in (None, torch.device("cpu")):
        model = build_model()
        optimizer, _ = made(model, *WITH_TENSORS[name], *SHARES)
        rates = LearningRates(optimizer, device)
        for step in range(6):
            rates.set(0.03 / (1 + step))
            gradients(model, step)
            optimizer.found_inf = torch.tensor(float(step == 3))
            optimizer.step()
        states.append(as_bytes(state_of(model, optimizer)))
    assert states[0] == states[1]
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    before = dict(build_model().named_parameters())
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters()), (
        "and it moves"
    )


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["number", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_leaves_everything_as_it_was(name, device):
    """Even the sign of a zero stays the same."""
    model = Convolutions().to(memory_format=torch.channels_last)
    optimizer, _ = made(model, *WITH_TENSORS[name], *SHARES)
    if not OPTIMIZERS[name].fused:
        device = None
    rates = LearningRates(optimizer, device)
    rates.set(0.1)
    gradients(model, 0)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p[0] = -0.0
    before = as_bytes(state_of(model, optimizer))
    optimizer.found_inf = torch.ones(())
    for value in (torch.nan, torch.inf):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()
    assert as_bytes(state_of(model, optimizer)) == before


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_creates_no_state(name):
    """Else a resumed run could not restore it: the row lacks a name."""
    model = small()
    optimizer, named = made(model, f"optimizer.name={name}")
    shapes = {key: tensor.shape for key, tensor in name_optimizer_state(optimizer, named).items()}
    descend(model, [optimizer])
    after = name_optimizer_state(optimizer, named)
    assert shapes and shapes == {key: tensor.shape for key, tensor in after.items()}


def test_muon_has_nothing_to_do_without_hidden_layers():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Flatten(),
        nn.Linear(144, 10),
    )
    with pytest.raises(RecipeError, match=r"\bcnn\b.*optimizer\.name=sgd\b"):
        find_roles(model, load(None, "model.name=cnn", "optimizer.name=muon"))
    recipe = load(None, "model.name=cnn", "model.freeze=-1", "optimizer.name=muon")
    with pytest.raises(RecipeError, match=r"\bcnn\b.*\bmodel\.freeze\b"):
        find_roles(build(recipe.model, 10, 1, 8), recipe)


def test_layer_decay():
    model = small()
    optimizer, _ = made(model, *SHARES)
    actual = {
        (group["rate"], group["weight_decay"]): len(group["params"])
        for group in optimizer.param_groups
    }
    # Blocks: the first layer with its LayerNorm, the second, the last.
    assert actual == {
        (0.25, 0.1): 1,
        (0.25, 0): 3,
        (0.5, 0.1): 1,
        (0.5, 0): 1,
        (1, 0.1): 1,
        (1, 0): 1,
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_has_no_state_and_stays(name):
    model = small()
    freeze(model, ["0"], "small")
    optimizer, named = made(model, f"optimizer.name={name}", "optimizer.weight_decay=0.1")
    kept = {key.partition("//")[0] for key in name_optimizer_state(optimizer, named)}
    assert kept == named.keys() - {"0.weight", "0.bias"}
    descend(model, [optimizer])
    assert torch.equal(model[0].weight, small()[0].weight)
    assert not torch.equal(model[3].weight, small()[3].weight)


@pytest.mark.slow(cases=["muon"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_model_take_the_steps_of_the_whole(name):
    """Stages hold parts of a model: matrices alone, no matrices, or vectors alone."""
    words = [
        "model.name=vit_tiny",
        f"optimizer.name={name}",
        "optimizer.lr=0.01",
        "optimizer.layer_decay=0.8",
    ]
    recipe = load(None, *words, "optimizer.weight_decay=0.1", "optimizer.norm_weight_decay=0")
    torch.manual_seed(0)
    whole = build(recipe.model, 10, 1, 8)
    cut = copy.deepcopy(whole)
    roles = find_roles(whole, recipe)
    named = dict(whole.named_parameters())
    apart = dict(cut.named_parameters())
    matrices = list_hidden_matrices(whole, recipe)
    kinds = {
        key: "matrices" if key in matrices else "vectors" if p.ndim < 2 else "others"
        for key, p in named.items()
    }
    stages = [
        {key: apart[key] for key in apart if kinds[key] == kind}
        for kind in ("matrices", "vectors", "others")
    ]
    optimizers = [build_optimizer(part, recipe.optimizer, roles) for part in (named, *stages)]
    for _ in range(3):
        for key, p in named.items():
            p.grad = torch.randn_like(p)
            apart[key].grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(
        cut.state_dict(),
        whole.state_dict(),
        rtol=0,
        atol=0,
    )
    states = [
        name_optimizer_state(optimizer, part)
        for optimizer, part in zip(optimizers, (named, *stages), strict=True)
    ]
    together = {key: value for state in states[1:] for key, value in state.items()}
    torch.testing.assert_close(together, states[0], rtol=0, atol=0)


def test_adamw_has_a_rate_of_its_own_next_to_muon():
    words = ["optimizer.name=muon", "optimizer.lr=0.02", "optimizer.layer_decay=0.5"]
    optimizer, named = made(small(), *words, "optimizer.adamw_lr=0.005")
    LearningRates(optimizer).set(0.02)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[named["3.weight"]] == pytest.approx(0.01)
    assert rates[named["3.bias"]] == pytest.approx(0.0025)
    assert rates[named["5.weight"]] == pytest.approx(0.005)


def test_a_state_of_the_whole_group_is_that_of_the_trained_parameters():
    """A layer that starts to train later has the steps of its group, in any order."""
    row = OPTIMIZERS["timm:lamb"]
    for order in ((0, 1), (1, 0)):
        trained, thawed = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        parameters = [(trained, thawed)[index] for index in order]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        state = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(2))
        state["step"] = torch.tensor(50.0)
        optimizer.state[trained] = state
        fill_state(optimizer, row, momentum=0.0)
        assert [optimizer.state[p]["step"].item() for p in parameters] == [50, 50]
