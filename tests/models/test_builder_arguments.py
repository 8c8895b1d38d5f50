"""model.args against the builders of torchvision and timm, and in runs."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torchvision

from tests.command_line import QUIET, ok, trainer
from trainer import load as load_run
from trainer.errors import RecipeError
from trainer.models.given import ModelBuilder
from trainer.models.zoo import build, builders, format_bare_call
from trainer.recipe import load

WITHOUT_TIMM = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


def create(*words, size=32):
    torch.manual_seed(0)
    return build(load(None, *words).model, 10, 3, size)


@pytest.mark.slow
def test_arguments_of_torchvision_reach_its_builder():
    words = ["model.name=resnet18", "model.args.zero_init_residual=true"]
    torch.manual_seed(0)
    plain = torchvision.models.resnet18(num_classes=10, zero_init_residual=True)
    torch.testing.assert_close(
        create(*words).state_dict(),
        plain.state_dict(),
        rtol=0,
        atol=0,
    )
    call = format_bare_call(load(None, *words).model, 10, 32, 3)
    assert call and "zero_init_residual=True" in call


@pytest.mark.slow
def test_arguments_of_a_model_that_computes_while_it_is_built():
    model = create("model.name=regnet_y_400mf", "model.args.stem_width=16")
    assert model.stem[0].out_channels == 16


@WITHOUT_TIMM
def test_arguments_of_timm_reach_its_builder():
    timm = pytest.importorskip("timm")
    words = ["model.name=timm:resnet10t", "model.args.drop_path_rate=0.2"]
    torch.manual_seed(0)
    plain = timm.create_model("resnet10t", num_classes=10, drop_path_rate=0.2)
    ours = create(*words)
    assert str(ours) == str(plain) and "DropPath" in str(ours)
    torch.testing.assert_close(
        ours.state_dict(),
        plain.state_dict(),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("model.name=resnet18 model.args.zero_init_residul=true", "zero_init_residual"),
        ("model.name=resnet18 model.args.zero_init_residual=1", "bool"),
        ("model.name=resnet18 model.args.num_classes=3", r"model\.num_classes="),
        ("model.name=resnet18 model.args.layers=[1,1,1,1]", "layers"),
        ("model.name=resnext50_32x4d model.args.groups=8", "groups"),
        ("model.name=mobilenet_v2 model.args.width_mult=0.5 model.weights=DEFAULT", "weights=null"),
        ("model.name=mlp model.args.width=3", "width"),
        pytest.param(
            "model.name=timm:resnet10t model.args.drop_path=0.1",
            "drop_path_rate",
            marks=WITHOUT_TIMM,
        ),
        pytest.param(
            "model.name=timm:resnet10t model.args.in_chans=1",
            r"data\.channels=",
            marks=WITHOUT_TIMM,
        ),
        pytest.param(
            "model.name=timm:resnet10t model.args.drop_path_rate=null", "null", marks=WITHOUT_TIMM
        ),
        pytest.param(
            "model.name=timm:vit_tiny_patch16_224 model.args.qk_norm=true model.weights=DEFAULT",
            r"model\.weights=null",
            marks=WITHOUT_TIMM,
        ),
    ],
)
def test_arguments_that_a_model_cannot_use(words, hint):
    with pytest.raises(RecipeError, match=rf"model\.args.*{hint}"):
        create(*words.split(), size=224)


@pytest.mark.parametrize("value", ["{a: {b: 1}}", "3", "{a: .nan}", "{1: 2}"])
def test_values_that_are_no_arguments(value):
    with pytest.raises(RecipeError, match=r"model\.args"):
        load(None, f"model.args={value}")


def test_null_removes_the_arguments_of_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {name: resnet18, args: {groups: 1}}\n")
    path = str(tmp_path / "a.yaml")
    assert load(path, "model.args.width_per_group=64").model.args == {
        "groups": 1,
        "width_per_group": 64,
    }
    assert load(path, "model.args=null").model.args == {}


def perceptron(num_classes, channels, image_size, width: int = 8):
    pixels = channels * image_size**2
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(pixels, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, num_classes),
    )


def test_a_function_of_the_python_api_gets_the_arguments():
    words = ["model.name=perceptron", "model.args.width=5"]
    with builders.lent("perceptron", ModelBuilder(perceptron)):
        assert create(*words)[1].out_features == 5
        with pytest.raises(RecipeError, match=r"model\.args\.width"):
            create("model.name=perceptron", "model.args.width=wide")


PLUGIN = """
from torch import nn
from trainer import register_model


@register_model("perceptron")
def perceptron(num_classes, channels, image_size, width: int = 8, dropout: float = 0.0):
    pixels = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, num_classes),
        nn.Dropout(dropout),
    )
"""
RUN = ["recipe=digits", "mode=single", "epochs=1", "max_steps=2", *QUIET]


@pytest.mark.slow
def test_runs_keep_the_arguments(tmp_path, monkeypatch):
    """Evaluation, loading and init_from build the same model; a resumed run cannot change it."""
    (tmp_path / "my_perceptron.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    own = ["plugin=my_perceptron", "model.name=perceptron"]
    ok(*RUN, *own, "model.args.width=12", "output=first")
    ok("evaluate", "checkpoint=first", "plugin=my_perceptron")
    ok(*RUN, *own, "model.init_from=first", "output=second")
    ok(*RUN, *own, "model.init_from=first", "output=second", "resume=auto")
    # The first run may be gone, and its arguments add to those of the third.
    third = [*RUN, *own, "model.args.dropout=0.5", "model.init_from=first", "output=third"]
    ok(*third)
    Path("first").rename("gone")
    ok(*third, "resume=auto")
    refused = trainer(*third, "model.args.width=13", "resume=auto")
    assert refused.returncode == 2 and "model.args" in refused.stderr
    Path("gone").rename("first")
    assert load("third").model.args == {"width": 12, "dropout": 0.5}
    for name in ("first", "second"):
        recipe = load(name)
        assert recipe.model.args == {"width": 12}
        assert json.loads(json.dumps(recipe.to_dict())) == recipe.to_dict()
    changed = trainer(*RUN, *own, "model.args.width=13", "output=first", "resume=auto")
    assert changed.returncode == 2 and "model.args" in changed.stderr
    with builders.lent("perceptron", perceptron):
        assert load_run("first").model[1].out_features == 12
