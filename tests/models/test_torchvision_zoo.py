"""Published weights: downloaded once per machine, or a one-line error."""

import json
import re

import pytest
import torch
import torchvision
from torch import nn

from tests.command_line import trainer
from tests.models.families import FAMILIES
from trainer.errors import SetupError
from trainer.models import torchvision_zoo, zoo
from trainer.recipe import ModelRecipe
from trainer.saving.weights import save_weights

NAME = "squeezenet1_1"
FILE = "squeezenet1_1-b8a52dc0.pth"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return the folder in which torch keeps its downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 and then nothing", b"<html>no such file</html>"]
)
def test_a_damaged_file_is_named(hub, content):
    (hub / FILE).write_bytes(content)
    with pytest.raises(SetupError, match=rf"{FILE} .*\bremove\b"):
        zoo.build(ModelRecipe(name=NAME, weights="DEFAULT"), 10, 3, 64)


def test_no_memory_is_no_damage(hub, monkeypatch):
    (hub / FILE).write_bytes(b"")

    def full(*_, **__):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        )

    monkeypatch.setattr(torchvision.models._api.WeightsEnum, "get_state_dict", full)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        zoo.build(ModelRecipe(name=NAME, weights="DEFAULT"), 10, 3, 64)


def test_a_downloaded_file_needs_no_lock(hub):
    model = torchvision.models.get_model(NAME)
    torch.save(model.state_dict(), hub / FILE)
    built = zoo.build(ModelRecipe(name=NAME, weights="DEFAULT"), 10, 3, 64)
    assert torch.equal(built.features[0].weight, model.features[0].weight)
    assert [path.name for path in hub.iterdir()] == [FILE]


# The second program is torchvision: what it makes of the same file.

FAST = ("googlenet", "mobilenet_v3", "squeezenet")
LARGE = (
    "vgg",
    "vgg_bn",
    "swin",
    "swin_v2",
    "maxvit",
    "vit",
    "convnext",
    "densenet",
    "resnext",
    "wide_resnet",
    "regnet_x",
)
LARGE += ("efficientnet_v2",)
OLD_NAMES = (
    ("denselayer", r"\.(norm|relu|conv)([12])\.", r".\1.\2."),
    ("mlp", r"mlp\.0\.", "mlp.linear_1."),
)
OLD_NAMES += (("mlp", r"mlp\.3\.", "mlp.linear_2."),)
# The files have older names and no counters of BatchNorm.
AS_PUBLISHED = (
    "densenet",
    "vit",
    "resnet",
)


def published_file(hub, name, size, as_published):
    """Write weights from a seed, with auxiliary heads and older names, to torchvision's download
    folder.
    """
    heads = {"init_weights": False, "aux_logits": True} if name in torchvision_zoo.AUXILIARY else {}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, num_classes=1000, **heads).eval()
        for layer in model.modules():
            # Statistics of what it is given, so that a signal gets through.
            if isinstance(layer, nn.BatchNorm2d):
                layer.train().momentum = 1.0
            # The head of a vision transformer.
            elif isinstance(layer, nn.Linear) and not layer.weight.any():
                layer.weight.normal_(0, 0.1)
        model(torch.randn(4, 3, size, size))
    state = model.state_dict()
    if as_published:
        state = {
            key: tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")
        }
        for part, now, then in OLD_NAMES:
            state = {
                re.sub(now, then, key) if part in key else key: tensor
                for key, tensor in state.items()
            }
    url = torchvision.models.get_model_weights(name)["DEFAULT"].url
    torch.save(state, hub / url.rpartition("/")[2])
    return hub / url.rpartition("/")[2]


@pytest.mark.full(but=["googlenet", "mnasnet", "resnet", "squeezenet"])
@pytest.mark.slow(cases=["googlenet", "mobilenet_v3"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=[pytest.mark.full if family in LARGE else pytest.mark.slow]
            * (family not in FAST),
        )
        for family in FAMILIES
    ],
)
def test_a_classifier_from_its_weights_computes_what_torchvision_computes(family, hub):
    name, size = FAMILIES[family]
    # The published weights have one position for each patch of 224 pixels.
    size = 224 if family == "vit" else size
    file = published_file(hub, name, size, family in AS_PUBLISHED)
    x = torch.randn(
        2,
        3,
        size,
        size,
        generator=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        reference = torchvision.models.get_model(name, weights="DEFAULT").eval()(x)
        spread = (reference[0] - reference[1]).norm() / reference.norm()
        assert spread > 1e-3, "inputs that are not told apart prove nothing"
        for start in ({"weights": "DEFAULT"}, {"init_from": str(file)}):
            ours = zoo.build(
                ModelRecipe(name=name, **start),
                1000,
                3,
                size,
            ).eval()
            torch.testing.assert_close(
                ours(x),
                reference,
                rtol=1e-4,
                atol=float(reference.norm()) * 1e-6,
            )
        few = zoo.build(
            ModelRecipe(name=name, weights="DEFAULT"),
            7,
            3,
            size,
        ).eval()
        assert few(x).shape == (2, 7)
        same = [few.state_dict()[key].equal(tensor) for key, tensor in ours.state_dict().items()]
        assert same.count(False) in (1, 2), "all but the last layer"


@pytest.mark.parametrize("name", torchvision_zoo.AUXILIARY)
def test_input_metadata_of_weights_is_passed_from_run_to_run(name, tmp_path):
    """A run has its own recipe, a published file has the heads, and for other files the recipe is
    used.
    """
    empty = {"x": torch.zeros(1)}
    file = str(tmp_path / "w.safetensors")
    for weights in ("DEFAULT", None):
        save_weights(
            tmp_path / "w.safetensors",
            empty,
            {"recipe": json.dumps({"model": {"weights": weights}})},
        )
        assert zoo.resolve_weights(ModelRecipe(name=name, init_from=file)) == (
            weights and "IMAGENET1K_V1"
        )
    save_weights(tmp_path / "w.safetensors", {"AuxLogits.fc.bias": torch.zeros(1000)}, {})
    assert zoo.resolve_weights(ModelRecipe(name=name, init_from=file)) == "IMAGENET1K_V1"
    save_weights(tmp_path / "w.safetensors", empty, {})
    assert zoo.resolve_weights(ModelRecipe(name=name, init_from=file)) is None


def test_weights_without_a_classifier_are_refused(tmp_path):
    """VGG-16's of IMAGENET1K_FEATURES: all of its last layers are NaN."""
    (tmp_path / "photos").mkdir()
    words = [
        "recipe=finetune",
        "data.root=photos",
        "model.name=vgg16",
        "model.weights=IMAGENET1K_FEATURES",
    ]
    completed = trainer(*words, cwd=tmp_path)
    assert (
        completed.returncode == 2
        and "IMAGENET1K_V1" in completed.stderr
        and "Traceback" not in completed.stderr
    ), completed.stderr
