"""Images are prepared like those that the starting weights were trained on, unless the recipe says
otherwise.
"""

import json

import pytest
import torch
import torchvision

from trainer.models.inputs import add_pretrained_input
from trainer.recipe import load
from trainer.saving.weights import save_weights

FACTS = {
    "image_size": 48,
    "channels": 3,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
}


def written(path, **facts):
    reported = {
        key: json.dumps(value) for key, value in {**FACTS, **facts}.items() if value is not None
    }
    save_weights(path, {"x": torch.zeros(1)}, reported)
    return path


def filled(path, *words):
    plain = ("data.name=imagefolder", "data.root=x", f"model.init_from={path}")
    data = add_pretrained_input(load(None, *plain, *words)).data
    return {key: getattr(data, key) for key in FACTS}


def test_a_run_provides_size_channels_mean_and_deviation(tmp_path):
    path = written(tmp_path / "w.safetensors")
    assert filled(path) == FACTS
    own = filled(path, "data.image_size=64", "data.mean=[0.5]")
    assert own == {**FACTS, "image_size": 64, "mean": [0.5]}


@pytest.mark.parametrize(
    "facts", [{"mean": []}, {"std": None}, {"image_size": "?"}, {"image_size": -3}]
)
def test_weights_without_image_metadata_change_nothing(tmp_path, facts):
    assert filled(written(tmp_path / "w.safetensors", **facts)) == dict.fromkeys(FACTS)
    assert filled(tmp_path / "nowhere") == dict.fromkeys(FACTS)
    assert (
        add_pretrained_input(
            load(None, f"model.init_from={written(tmp_path / 'v.safetensors')}")
        ).data.mean
        is None
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("resnet18", {}),
        ("efficientnet_v2_l", {"image_size": 480, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}),
        ("inception_v3", {"image_size": 299}),
    ],
)
def test_torchvisions_weights_are_fed_as_torchvision_prescribes(name, keys):
    """Values that are the same for all photos of ImageNet are left out."""
    plain = ("data.name=imagefolder", "data.root=x", f"model.name={name}")
    for words in ((), ("data.image_size=64", "data.mean=[0.1]", "data.std=[0.2]")):
        data = add_pretrained_input(load(None, *plain, "model.weights=DEFAULT", *words)).data
        typed = load(None, *plain, *words).data
        expected = typed.model_copy(update=keys) if not words else typed
        assert data == expected
    assert add_pretrained_input(load(None, *plain)).data.image_size is None, "without weights"
    preset = torchvision.models.get_model_weights(name)["DEFAULT"].transforms()
    assert [keys.get("mean", preset.mean), keys.get("image_size", 224)] == [
        preset.mean,
        preset.crop_size[0],
    ]


def test_the_users_weights_replace_published_ones():
    """The shipped recipe names published weights, and the user need not remove them."""
    assert load("finetune").model.weights == "DEFAULT"
    assert load("finetune", "model.init_from=x").model.weights is None
