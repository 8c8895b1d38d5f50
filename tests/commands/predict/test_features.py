"""The classifier of a model is found as it runs, or its lack is reported."""

import pytest
import torch
import torchvision
from torch import nn

from trainer.commands.predict.features import count_features
from trainer.errors import RecipeError
from trainer.models.features import record_features


@pytest.mark.parametrize(
    ("name", "layer"),
    [("squeezenet1_1", "classifier.1"), ("mobilenet_v3_small", "classifier.3"), ("resnet18", "fc")],
)
def test_features_are_the_classifiers_input(name, layer):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=7).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = []
    module = model.get_submodule(layer)
    module.register_forward_hook(lambda _, arguments, __: expected.append(arguments[0].detach()))
    with torch.no_grad(), record_features(model, 7) as features:
        model(images)
    if expected[0].dim() == 4:
        expected[0] = torch.nn.functional.adaptive_avg_pool2d(expected[0], 1).flatten(1)
    torch.testing.assert_close(features[0], expected[0])
    assert count_features(model, 7, images[0]) == expected[0].shape[1]


class Positions(nn.Module):
    """A classifier of each of four positions."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, images):
        return self.head(images.flatten(2).transpose(1, 2)).mean(1)


@pytest.mark.parametrize("model", [nn.Flatten(), Positions()])
def test_a_model_without_one_vector_per_image_is_refused(model):
    with pytest.raises(RecipeError, match=r"predict\.features\b.*\bleave it out$"):
        count_features(model, 5, torch.zeros(3, 2, 2))
