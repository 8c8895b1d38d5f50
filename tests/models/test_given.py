"""Models that a program hands over."""

import threading
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from trainer.errors import CheckpointError, RecipeError
from trainer.models import zoo
from trainer.models.given import ModelBuilder
from trainer.recipe import ModelRecipe


class Net(nn.Module):
    def __init__(self, num_classes=10, width=4):
        super().__init__()
        self.head = nn.Linear(width, num_classes)


class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Tied(nn.Module):
    """Two layers of the same weights, one of them under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.second.weight = self.first.weight
        self.again = self.head

    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1)).relu()).relu())


def mlp(channels, image_size):
    return nn.Linear(channels * image_size, 2)


def hooked(net):
    """torch copies parameters without their hooks."""
    net.head.weight.register_hook(lambda gradient: gradient * 0.1)
    return net


def closed(net):
    """A copy's hook would read the original."""
    net.head.register_forward_hook(lambda module, inputs, outputs: outputs + net.head.bias)
    return net


def test_hooks_that_a_copy_has_too_are_taken():
    net = Net()
    net.head.register_forward_hook(lambda module, inputs, outputs: outputs * 0)
    assert not ModelBuilder(net)(3, 1, 8).head(torch.ones(1, 4)).any()


def test_a_module_is_copied_with_its_weights():
    net = Net()
    created = ModelBuilder(net)(3, 1, 8)
    assert created is not net and torch.equal(created.head.weight, net.head.weight)
    assert ModelBuilder(nn.DataParallel(net))(3, 1, 8).head.weight.shape == (10, 4)


@pytest.mark.parametrize(
    ("source", "outputs"),
    [
        (Net, 3),
        (partial(Net, num_classes=5), 5),
        (lambda: Net(7), 7),
        (mlp, 2),
        (lambda num_classes, **_: Net(num_classes), 3),
    ],
)
def test_a_function_is_asked_with_what_it_names(source, outputs):
    model = ModelBuilder(source)(3, 1, 8)
    assert next(reversed(list(model.parameters()))).shape == (outputs,)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (Net(), "Net"),
        (Net, "Net"),
        (lambda: Net(), "model"),
        (partial(Net, width=2), "Net"),
        (mlp, "my_mlp"),
        (torchvision.models.resnet18, "resnet18"),
        (partial(torchvision.models.resnet18, num_classes=3), "my_resnet18"),
    ],
)
def test_the_name_that_recipes_know(source, name):
    assert ModelBuilder(source).name == name


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (3, "model= .*torch.nn.Module.*int"),
        (lambda depth: Net(), r"depth: write model=lambda: ...\(depth=...\)"),
        (nn.LazyLinear(3), r"\blazy layers\b.*\bmodel\(batch\)"),
        (hooked(Net()), r"\bhook\b.*\bhead\.weight\b"),
        (closed(Net()), r"\bfunction\b.*\bhead .*\bcopy\b"),
        (nn.Flatten(), r"^model= .*\btrain: .*requires_grad=True"),
        (Locked(), r"^model=Locked .*\(TypeError: .*\)"),
        (lambda: 3, "model=model must .*torch.nn.Module.* int"),
    ],
)
def test_objects_that_are_no_models_are_refused(source, line):
    with pytest.raises(RecipeError, match=line):
        ModelBuilder(source)(3, 1, 8)


def test_tied_weights_are_found_under_one_name():
    source = Tied()
    other = Tied()
    zoo.load_weights(other, dict(source.named_parameters()), "it", whole=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(source.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert other.second.weight is other.first.weight
    with pytest.raises(CheckpointError, match=r"^it.*second\.bias"):
        zoo.load_weights(
            other,
            {k: v for k, v in source.named_parameters() if k != "second.bias"},
            "it",
            whole=True,
        )


class Giving(nn.Linear):
    """A model that returns the result of a function of its outputs."""

    def __init__(self, wrong):
        super().__init__(16, 3)
        self.wrong = wrong

    def forward(self, x):
        return self.wrong(super().forward(x.flatten(1)))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            Giving(lambda out: None),
            r"NoneType for 2 images; .*\(2, 2\)",
        ),
        (Giving(lambda out: (out, out)), r"tuple for 2 images"),
        (
            Giving(lambda out: out),
            r"\(2, 3\) .*\(2, 2\), .*model\.num_classes=3",
        ),
        (
            Giving(lambda out: out).half(),
            r"float16, .*float32: .*model\.float\(\)",
        ),
        (Giving(lambda out: out).double(), r"weights are float64"),
    ],
)
def test_outputs_that_are_no_classifiers(model, line):
    with zoo.builders.lent("given", ModelBuilder(model)), pytest.raises(RecipeError, match=line):
        zoo.build(ModelRecipe(name="given"), 2, 1, 4)
