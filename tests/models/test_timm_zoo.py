"""Models of timm by name: with timm's mean, deviation and size; an unknown name is a one-line
error.
"""

import importlib.util
import json
import logging

import pytest
import torch
from safetensors import safe_open

from tests.command_line import QUIET, losses, ok, result
from tests.data.photo_folders import photo_set
from trainer.errors import RecipeError, SetupError
from trainer.models import zoo
from trainer.models.inputs import add_pretrained_input
from trainer.recipe import ModelRecipe, known_names, load

without = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="timm: pip install '.[timm]'"
)


def test_a_missing_timm_is_answered_with_the_install_command(monkeypatch):
    monkeypatch.setattr(known_names, "timm_models", tuple)
    with pytest.raises(RecipeError, match=r"timm:resnet10t .*\bpip install\b.*\btimm\b"):
        known_names.check_model_name("timm:resnet10t")
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(RecipeError, match=r"timm:resnet10t .*\bpip install\b.*\btimm\b"):
        zoo.build(ModelRecipe(name="timm:resnet10t"), 3, 3, 64)


@without
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("timm:resnt10t", "model.name=timm:resnet10t?"),
        ("timm:", "timm.list_models()"),
        ("convnext_atto", "model.name=timm:convnext_atto?"),
    ],
)
def test_a_name_that_is_none(typed, said):
    with pytest.raises(RecipeError) as error:
        known_names.check_model_name(typed)
    assert said in str(error.value)


@without
def test_timms_source_lists_every_name():
    import timm

    assert set(known_names.timm_models()) == set(timm.list_models())


@without
@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        (
            "timm:resnet10t",
            "a9",
            r"^model\.weights=a9 .*timm:resnet10t; .*\bc3\w*, DEFAULT$",
        ),
        (
            "timm:resnet10t.a9",
            None,
            r"^model\.weights=a9 .*timm:resnet10t; .*\bc3\w*, DEFAULT$",
        ),
        ("timm:nothing", None, r"^model\.name=timm:nothing .*\btimm\.list_models\(\)"),
        (
            "timm:cspresnet50d",
            "DEFAULT",
            r"^model\.weights=DEFAULT: .*timm:cspresnet50d; .*model\.weights=null\b",
        ),
        (
            "timm:xcit_nano_12_p16_224",
            None,
            r"^model\.name=timm:xcit_nano_12_p16_224 .*\b3 x 33 x 33\b",
        ),
    ],
)
def test_models_that_cannot_be_built_are_answered_with_valid_ones(name, weights, said):
    with pytest.raises(RecipeError, match=said) as error:
        zoo.build(ModelRecipe(name=name, weights=weights), 3, 3, 33)
    assert "\n" not in str(error.value)


@without
def test_weights_out_of_reach_name_their_place(monkeypatch):
    import timm

    plain = timm.create_model

    def unreachable(name, pretrained=False, **options):
        if pretrained:
            logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
            raise OSError("no network\nand more of it")
        return plain(name, **options)

    monkeypatch.setattr(timm, "create_model", unreachable)
    recipe = ModelRecipe(name="timm:resnet10t", weights="DEFAULT")
    with pytest.raises(
        SetupError, match=r"\btimm/resnet10t\.c3_in1k\b.*model\.weights=null model\.init_from="
    ):
        zoo.build(recipe, 3, 3, 64)
    assert zoo.build(
        recipe,
        3,
        3,
        64,
        starting=False,
    )(torch.zeros(2, 3, 64, 64)).shape == (2, 3)


@without
def test_a_models_own_input_stands_where_the_recipe_says_nothing():
    def filled(*words):
        data = add_pretrained_input(load(None, "data.name=imagefolder", "data.root=x", *words)).data
        return data.mean, data.std, data.image_size

    own = [0.5, 0.5, 0.5]
    assert filled("model.name=timm:vit_tiny_patch16_224") == (own, own, None)
    assert filled("model.name=timm:resnet10t", "model.weights=DEFAULT")[2] == 176
    assert (
        filled("model.name=timm:resnet10t", "model.weights=DEFAULT", "data.image_size=64")[2] == 64
    )
    assert filled("model.name=timm:resnet10t", "data.mean=[0.1]") == ([0.1], None, None)
    assert filled("model.name=resnet18") == (None, None, None)
    assert add_pretrained_input(load(None, "model.name=timm:resnet10t")).data.mean is None


@without
def test_a_timm_model_trains_in_two_stages_and_is_loaded_again(tmp_path):
    root = photo_set(tmp_path / "photos", {"a": 6, "b": 6})
    words = [
        "model.name=timm:resnet10t",
        "data.name=imagefolder",
        f"data.root={root}",
        "data.image_size=32",
        "data.workers=0",
        "batch_size=4",
        "epochs=1",
        "optimizer.lr=0.001",
        "threads=1",
        *QUIET,
    ]
    words += ["logging.verdict=false", "logging.tensorboard=false"]
    ok(*words, "mode=single", f"output={tmp_path / 'single'}")
    ok(*words, "mode=split", "devices=[cpu,cpu]", f"output={tmp_path / 'split'}")
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "single"), rel=1e-3)
    with safe_open(tmp_path / "split" / "last.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["model"] == "timm.create_model('resnet10t', num_classes=2, in_chans=3)"
    assert json.loads(facts["mean"]) == [0.485, 0.456, 0.406]
    output = ok("evaluate", f"checkpoint={tmp_path / 'split'}").stdout
    assert f"{result(tmp_path / 'split')['val_top1']:.2%}" in output
