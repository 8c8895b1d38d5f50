"""Models that a program hands over."""

from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from trainer.errors import RecipeError
from trainer.models import zoo
from trainer.models.given import Given


class Net(nn.Module):
    def __init__(self, num_classes=10, width=4):
        super().__init__()
        self.head = nn.Linear(width, num_classes)


def mlp(channels, image_size):
    return nn.Linear(channels * image_size, 2)


def test_a_module_is_copied_with_its_weights():
    net = Net()
    made = Given(net)(3, 1, 8)
    assert made is not net and torch.equal(made.head.weight, net.head.weight)
    assert Given(nn.DataParallel(net))(3, 1, 8).head.weight.shape == (10, 4)


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
    model = Given(source)(3, 1, 8)
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
    assert Given(source).name == name


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (3, "model= is a torch.nn.Module, a function that makes one, or a name"),
        (lambda depth: Net(), r"and wants depth: write model=lambda: ...\(depth=...\)"),
        (nn.LazyLinear(3), "call model\\(batch\\) once before"),
        (lambda: 3, "model=model must make a torch.nn.Module, and made int"),
    ],
)
def test_what_is_no_model(source, line):
    with pytest.raises(RecipeError, match=line):
        Given(source)(3, 1, 8)


def test_a_lent_name_is_given_back():
    assert zoo.registered_model("mlp") is None
    with zoo.lent("mlp", mlp):
        assert zoo.registered_model("mlp") is mlp
    assert zoo.registered_model("mlp") is None
