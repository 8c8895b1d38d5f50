"""Stages in sequence equal the whole model, for torchvision's families and ours: outputs,
gradients, statistics, names.
"""

import copy

import pytest
import torch
from torch import nn

from tests.models.families import FAMILIES
from trainer.errors import RecipeError
from trainer.models import zoo
from trainer.models.partition import resolve_cuts, trace
from trainer.recipe import ModelRecipe

SMALL = ("mlp", "cnn", "cnn_gn", "vit_tiny", "resnet8", "resnet20", "fast_cnn_small")
QUICK = ("resnet", "squeezenet", "mobilenet_v3", "shufflenet_v2", "swin_v2")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(ModelRecipe(name=name), 10, 3, size)


def run(stages: list[nn.Module], inputs: torch.Tensor) -> torch.Tensor:
    """Forward and backward stage by stage as a pipeline does it: on detached tensors that require
    grad.
    """
    received = [inputs]
    outputs = []
    for stage in stages:
        outputs.append(stage(received[-1]))
        assert isinstance(outputs[-1], torch.Tensor)
        received.append(outputs[-1].detach().requires_grad_())
    gradient = torch.linspace(
        -1,
        1,
        outputs[-1].numel(),
        device=inputs.device,
    ).view_as(outputs[-1])
    for leaf, output in zip(reversed(received[:-1]), reversed(outputs), strict=True):
        output.backward(gradient)
        gradient = leaf.grad
    return outputs[-1].detach()


def compare(
    model: nn.Module,
    cuts: list[str],
    inputs: torch.Tensor,
    training: bool,
) -> None:
    """Run a model, and its copy's stages: outputs, gradients and buffers must be equal."""
    whole = model.train(training)
    model = copy.deepcopy(model).train(training)
    stages = trace(model).stages(cuts)
    assert len(stages) == len(cuts) + 1
    whole.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    torch.manual_seed(1)  # Dropout uses this seed.
    expected = run([whole], inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(run(stages, inputs), expected)
    for (name, target), candidate in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            candidate.grad, target.grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()))
    for name, buffer in whole.named_buffers():
        buffer.copy_(buffers[name])


def check_names(model: nn.Module, stages: list[nn.Module]) -> None:
    """The stages' state dicts make up the model's, tensor by tensor, and each stage has something
    to train.
    """
    whole = model.state_dict(keep_vars=True)
    union = {}
    for stage in stages:
        part = stage.state_dict(keep_vars=True)
        assert not union.keys() & part.keys()
        union |= part
        assert any(p.requires_grad for p in stage.parameters())
    assert union.keys() == whole.keys()
    assert all(union[name] is whole[name] for name in whole)


@pytest.mark.slow(
    cases=[
        "vit_tiny-train",
        "resnet20-eval",
        "mobilenet_v3-eval",
        "mobilenet_v3-train",
        "resnet-eval",
        "vit_tiny-eval",
        "resnet-train",
    ]
)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("swin_v2", "shufflenet_v2")))
        for name in (*SMALL, *FAMILIES)
    ],
)
def test_stages_equal_the_whole_model(name, training, full):
    if name in FAMILIES and name not in QUICK and not full:
        pytest.skip("--all runs it; its shapes and in-place operations are tested below")
    if name == "swin_v2" and not training and not full:
        pytest.skip("--all runs it; it is the slowest, and trains")
    name, size = FAMILIES.get(name, (name, 32))
    model = build(name, size)
    cuts = trace(model).cuts
    check_names(model, trace(model).stages(cuts))
    compare(model, cuts, torch.randn(2, 3, size, size), training)
    with torch.no_grad():  # nothing of the batch's size is fixed
        inputs = torch.randn(3, 3, size, size)
        out = inputs
        for stage in trace(model).stages(cuts):
            out = stage.eval()(out)
        torch.testing.assert_close(out, model.eval()(inputs))


def test_cuts_are_named_after_modules_and_chosen_by_name():
    traced = trace(build("resnet18"))
    assert traced.cuts == (
        *("conv1", "maxpool", "layer1.0", "layer1.1", "layer2.0", "layer2.1"),
        *("layer3.0", "layer3.1", "layer4.0", "flatten"),
    )
    assert traced.named["layer3"] == "layer3.1"
    assert traced.named["layer4.1"] == traced.named["avgpool"] == "flatten"
    assert "layer1.0.conv1" not in traced.named  # the shortcut goes past it
    first, second = traced.stages(["layer3"])
    assert {name.split(".")[0] for name in first.state_dict()} == {
        "conv1",
        "bn1",
        "layer1",
        "layer2",
        "layer3",
    }
    assert {name.split(".")[0] for name in second.state_dict()} == {"layer4", "fc"}
    assert resolve_cuts(traced, ["layer1", "layer3.1"], 3) == ("layer1.1", "layer3.1")
    assert resolve_cuts(traced, [], 1) == ()


@pytest.mark.parametrize(
    ("wanted", "stages", "says"),
    [
        (
            ["layer3.2"],
            2,
            r"=\[layer3\.2\]: layer3\.2 .*\blayer3\.\d\? .*\blayer4\.0, flatten$",
        ),
        (["layer1.0.conv1"], 2, r"=\[layer1\.0\.conv1\]: layer1\.0\.conv1 .*\blayer4\.0, flatten$"),
        (["layer3.0"], 3, r"=\[layer3\.0\] .*\b1 names\b.*\b3 stages\b.* 2$"),
        (["layer3.0", "layer2.0"], 3, r"use pipeline.cuts=\[layer2.0,layer3.0\]"),
        (["layer3", "layer3.1"], 3, r"\]: layer3 and layer3\.1 .* layer3\.1$"),
    ],
)
def test_invalid_cuts_are_refused(wanted, stages, says):
    with pytest.raises(RecipeError, match=says):
        resolve_cuts(trace(build("resnet18")), wanted, stages)


def test_stages_compute_what_the_model_does_and_move():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)
            self.register_buffer("kept", torch.ones(8))
            self.register_buffer("left_out", torch.ones(8), persistent=False)
            self.plain = torch.ones(8)

        def forward(self, x):
            x = self.first(x).mean((2, 3)) * self.kept * self.left_out.view(-1) * self.plain
            x += self.kept
            return nn.functional.dropout(self.second(x), 0.5, self.training)

    model = Model()
    inputs = torch.randn(2, 3, 5, 5)
    traced = trace(model)
    stages = traced.stages(traced.cuts)
    check_names(model, stages)
    expected = model.eval()(inputs)
    out = inputs
    for stage in stages:
        out = stage.train().eval()(out)
    assert torch.equal(out, expected)
    for stage in stages:
        stage.to(torch.float64, memory_format=torch.channels_last)
        assert {t.dtype for t in (*stage.parameters(), *stage.buffers())} == {torch.float64}
    assert stages[0].first.weight is model.first.weight
    assert model.first.weight.is_contiguous(memory_format=torch.channels_last)


def test_unused_modules_belong_to_the_last_stage():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(2, 2),
                nn.Linear(2, 2),
            )
            self.idle = nn.Sequential(nn.BatchNorm1d(2))
            self.spare = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.body(x)

    model = Model()
    stages = trace(model).stages(["body.0"])
    check_names(model, stages)
    assert {"spare", "idle.0.running_mean", "idle.0.weight"} <= stages[1].state_dict().keys()


def test_a_tied_parameter_stays_in_one_stage_under_all_its_names():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tied, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.tied.weight = self.first.weight
            self.also = self.last

        def forward(self, x):
            return self.last(self.tied(self.first(x)))

    model = Model()
    traced = trace(model)
    assert traced.cuts == ("tied",)  # the weight is used before "first" ends and after
    check_names(model, traced.stages(["tied"]))


def test_frozen_parts_are_stages_too():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    model[:2].requires_grad_(False)
    assert trace(model).cuts == ("0", "1", "2", "3")
