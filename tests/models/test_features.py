"""The last linear layer of a model is found by what it computes."""

import pytest
import torch
import torchvision
from torch import nn

from trainer.models.features import Head, find_classifier, record_features


def run(module, inputs):
    return module(inputs)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("resnet18", "fc"),
        ("mobilenet_v3_small", "classifier.3"),
        ("squeezenet1_1", ""),
        ("timm:resnet18", "fc"),
        ("timm:vit_tiny_patch16_224", "head"),
        ("timm:convnext_atto", "head.fc"),
    ],
)
def test_the_classifier_of_published_models(name, layer):
    torch.manual_seed(0)
    library, _, plain_name = name.rpartition(":")
    size = 224 if "vit" in name else 64
    if library:
        timm = pytest.importorskip("timm")
        model = timm.create_model(plain_name, num_classes=7)
    else:
        model = torchvision.models.get_model(plain_name, num_classes=7)
    model.eval()
    images = torch.randn(2, 3, size, size)
    assert find_classifier(model, images, 7, run) == layer
    if layer:
        with torch.no_grad(), record_features(model, 7) as features:
            expected = model(images)
        head = Head(model, layer)
        torch.testing.assert_close(head(features[0]), expected)
        assert [*head.state_dict()] == [*model.state_dict()]


class Scaled(nn.Sequential):
    """A model that changes the outputs of its last layer."""

    def forward(self, images):
        return 2 * super().forward(images)


@pytest.mark.parametrize("kind", [Scaled, nn.Linear])
def test_outputs_that_are_not_those_of_a_layer_have_no_classifier(kind):
    model = Scaled(
        nn.Linear(4, 3),
        nn.ReLU(),
        nn.Linear(3, 3),
    )
    if kind is nn.Linear:
        model = nn.Linear(4, 3)
    assert find_classifier(model, torch.randn(2, 4), 3, run) == ""
