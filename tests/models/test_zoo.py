"""Models by name, heads, starting weights, and the messages about wrong ones."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

from trainer.errors import CheckpointError, RecipeError
from trainer.models import torchvision_zoo, zoo
from trainer.models.blocks import find_head
from trainer.models.inputs import add_pretrained_input
from trainer.recipe import ModelRecipe, known_names, load
from trainer.saving.weights import read_metadata


def test_every_torchvision_classifier_is_known_without_importing_it():
    assert set(known_names.torchvision_classifiers()) == set(
        torchvision.models.list_models(module=torchvision.models)
    )


@pytest.mark.slow(cases=["densenet121"])
@pytest.mark.parametrize(
    "name",
    ["resnet18", "vgg11", "densenet121", "squeezenet1_0", "vit_b_16", "convnext_tiny", "swin_t"],
)
def test_a_new_head(name):
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
        torchvision_zoo.replace_head(model, 3)
        out = model.eval()(torch.empty(2, 3, 224, 224))
    assert out.shape == (2, 3)


@pytest.mark.parametrize(
    ("keys", "channels", "size", "says"),
    [
        ({"name": "resnet5"}, 3, 32, r"\bresnet50\?"),
        ({"name": "inception_v3"}, 1, 299, "data.channels=3"),
        ({"name": "alexnet"}, 3, 8, "data.image_size=64"),
        ({"name": "cnn", "weights": "DEFAULT"}, 3, 8, r"=DEFAULT: cnn .*model\.weights=null\b"),
        ({"name": "resnet18", "weights": "BEST"}, 3, 32, r"BEST.*\bIMAGENET1K_V1, DEFAULT"),
        ({"name": "cnn", "num_classes": 3}, 3, 8, "10 classes"),
    ],
)
def test_errors_say_what_to_type(keys, channels, size, says):
    with pytest.raises(RecipeError, match=says):
        zoo.build(ModelRecipe(**keys), 10, channels, size)


@pytest.mark.parametrize(
    ("name", "size", "works"),
    [
        pytest.param("maxvit_t", 64, 224, marks=pytest.mark.slow),
        pytest.param("inception_v3", 32, 96, marks=pytest.mark.slow),
        ("vit_b_16", 28, 32),
    ],
)
def test_the_size_to_try_works(name, size, works):
    with torch.device("meta"), pytest.raises(RecipeError, match=rf"data\.image_size={works}$"):
        zoo.build(ModelRecipe(name=name), 10, 3, size)
    with torch.device("meta"):
        zoo.build(ModelRecipe(name=name), 10, 3, works)


@pytest.mark.slow
def test_metadata_of_published_weights_stays_when_others_are_loaded():
    with torch.device("meta"):
        for name in torchvision_zoo.AUXILIARY:
            recipe = ModelRecipe(name=name, weights="DEFAULT")
            assert zoo.build(recipe, 3, 3, 128, starting=False).transform_input
            assert not zoo.build(ModelRecipe(name=name), 3, 3, 128).transform_input
            assert eval(
                zoo.format_bare_call(recipe, 3, 128, 3), {"torchvision": torchvision}
            ).transform_input
        recipe = ModelRecipe(name="vit_b_16", weights="IMAGENET1K_SWAG_E2E_V1")
        assert zoo.build(recipe, 3, 3, 384, starting=False).image_size == 384
        with pytest.raises(RecipeError, match=r"data\.image_size=384"):
            zoo.build(recipe, 3, 3, 224, starting=False)


def test_init_from_takes_a_runs_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "tuned"
    run.mkdir(parents=True)
    model = zoo.build(ModelRecipe(name="mlp"), 10, 1, 8)
    facts = {"image_size": "8", "channels": "1", "mean": "[0.25]", "std": "[0.5]"}
    save_file(model.state_dict(), run / "last.safetensors", facts)
    built = zoo.build(ModelRecipe(name="mlp", init_from="tuned"), 10, 1, 8)
    assert all(
        torch.equal(one, other)
        for one, other in zip(built.parameters(), model.parameters(), strict=True)
    )
    assert add_pretrained_input(
        load(None, "data.name=imagefolder", "data.root=x", "model.init_from=tuned")
    ).data.std == [0.5]
    with pytest.raises(CheckpointError, match=r"\bruns/tuned\b"):
        zoo.build(ModelRecipe(name="mlp", init_from="tunde"), 10, 1, 8)


def test_a_users_model_may_have_names_that_torchvision_gave_up(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_layer_0 = nn.ModuleDict(
                {"mlp": nn.ModuleDict({"linear_1": nn.Linear(12, 2)})}
            )

        def forward(self, inputs):
            return self.encoder_layer_0["mlp"]["linear_1"](inputs.flatten(1))

    reference = Own().state_dict()
    save_file(reference, tmp_path / "own.safetensors")
    with zoo.builders.lent("own_names", lambda *_: Own()):
        model = zoo.build(
            ModelRecipe(name="own_names", init_from=str(tmp_path / "own.safetensors")), 2, 3, 2
        )
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict().items())


def starting_from(folder, name, source, facts=None):
    """A recipe of a model that begins with the weights of another one."""
    save_file(source.state_dict(), folder / "w.safetensors", facts)
    return ModelRecipe(name=name, init_from=str(folder / "w.safetensors"))


def test_init_from_keeps_the_body_and_not_a_head_of_other_size(tmp_path):
    source = zoo.build(ModelRecipe(name="cnn"), 10, 1, 8)
    recipe = starting_from(tmp_path, "cnn", source)
    torch.testing.assert_close(
        zoo.build(recipe, 10, 1, 8).state_dict(),
        source.state_dict(),
        rtol=0,
        atol=0,
    )
    other = zoo.build(recipe, 4, 1, 8)
    assert torch.equal(other[0].weight, source[0].weight)
    assert other[-1].weight.shape == (4, 128)


@pytest.mark.parametrize(
    ("classes", "rows"),
    [
        (["cat", "cow", "dog"], [0, 1, 2]),
        (["dog", "cat", "cow"], [2, 0, 1]),
        (["dog", "owl"], [2, None]),
        (["ant", "cat", "cow", "dog"], [None, 0, 1, 2]),
        (["ant", "bee", "fly"], [None, None, None]),
    ],
)
# The last layer of these models is a convolution.
@pytest.mark.parametrize("name", ["cnn", "squeezenet1_1"])
def test_init_from_finds_classes_by_their_names(tmp_path, classes, rows, name):
    size = 8 if name == "cnn" else 64
    source = zoo.build(ModelRecipe(name=name), 3, 3, size)
    recipe = starting_from(tmp_path, name, source, {"classes": '["cat", "cow", "dog"]'})
    torch.manual_seed(5)
    model = zoo.build(recipe, len(classes), 3, size, classes=classes)
    torch.manual_seed(5)
    fresh = zoo.build(ModelRecipe(name=name), len(classes), 3, size)
    known = sum(row is not None for row in rows)
    note = zoo.describe_class_match(read_metadata(Path(recipe.init_from)), recipe, classes, model)
    assert note == f", which knows {known} of these {len(classes)} by name"
    for part in ("weight", "bias"):
        there, here, new = (
            one.state_dict()[f"{find_head(one)}.{part}"] for one in (source, model, fresh)
        )
        for place, row in enumerate(rows):
            assert torch.equal(here[place], new[place] if row is None else there[row])


@pytest.mark.parametrize("told", ["[", "5", "[1, 2]", "[" * 100_000, "{}"])
def test_unnamed_classes_keep_their_outputs(tmp_path, told):
    source = zoo.build(ModelRecipe(name="cnn"), 3, 1, 8)
    recipe = starting_from(tmp_path, "cnn", source, {"classes": told})
    model = zoo.build(recipe, 3, 1, 8, classes=["a", "b", "c"])
    assert torch.equal(model[-1].weight, source[-1].weight)
    note = zoo.describe_class_match({"classes": told}, recipe, ["a", "b", "c"], model)
    assert "by name" not in note


def test_numbers_instead_of_names_identify_no_class(tmp_path):
    """Data sets without class names have "0", "1", ...; in two such sets these are different
    classes.
    """
    source = zoo.build(ModelRecipe(name="cnn"), 10, 1, 8)
    numbers = json.dumps([str(n) for n in range(10)])
    recipe = starting_from(tmp_path, "cnn", source, {"classes": numbers, "num_classes": "10"})
    torch.manual_seed(5)
    few = zoo.build(recipe, 3, 1, 8, classes=["0", "1", "2"])
    torch.manual_seed(5)
    fresh = zoo.build(ModelRecipe(name="cnn"), 3, 1, 8)
    assert torch.equal(few[-1].weight, fresh[-1].weight)
    metadata = read_metadata(Path(recipe.init_from))
    assert not zoo.describe_class_match(metadata, recipe, ["0", "1", "2"], few)
    names = [f"class {n}" for n in range(10)]
    named = zoo.build(recipe, 10, 1, 8, classes=names)
    assert torch.equal(named[-1].weight, source[-1].weight)
    assert "by their order" in zoo.describe_class_match(metadata, recipe, names, named)
    assert not zoo.describe_class_match(metadata, recipe, json.loads(numbers), named)


@pytest.mark.parametrize(
    ("known", "classes", "places"),
    [
        ("0 1 2 3 4 5 6 7 8 9 10", "0 1 10 2 3 4 5 6 7 8 9", [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("0 1 10 2 3 4 5 6 7 8 9", "0 1 2 3 4 5 6 7 8 9 10", [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 2]),
        (
            "00 01 02 03 04 05 06 07 08 09 10",
            "0 1 10 2 3 4 5 6 7 8 9",
            [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9],
        ),
        ("1 10 2", "0 1 2", [None, 0, 2]),  # The position counts: as text 10 would come before 2.
        ("5 6 7", "6 7 8", [1, 2, None]),
        ("1 2 3", "0 1 2", [None, 0, 1]),
        ("0 1 2", "x y z", None),
        ("0 1 2", "0 1 2", None),
        ("0 1 2", "0 1", None),
        ("cat dog", "dog cat", [1, 0]),
        ("", "cat dog", None),
    ],
)
def test_names_are_matched_whatever_they_look_like(known, classes, places):
    assert zoo.match_by_name(known.split(), classes.split()) == places


def test_numbered_classes_are_found_by_name_and_weights_without_classes_by_order(tmp_path):
    source = zoo.build(ModelRecipe(name="cnn"), 11, 1, 8)
    numbers = [str(n) for n in range(11)]
    recipe = starting_from(tmp_path, "cnn", source, {"classes": json.dumps(numbers)})
    folders = sorted(numbers)
    model = zoo.build(recipe, 11, 1, 8, classes=folders)
    assert torch.equal(model[-1].weight, source[-1].weight[[int(name) for name in folders]])
    metadata = read_metadata(Path(recipe.init_from))
    note = zoo.describe_class_match(metadata, recipe, folders, model)
    assert note == ", which knows 11 of these 11 by name"
    recipe = starting_from(tmp_path, "cnn", source)
    assert "by their order" in zoo.describe_class_match({}, recipe, folders, model)
    assert not zoo.describe_class_match({}, recipe, numbers, model)


class HeadFirst(nn.Module):
    """The layer that makes the outputs is not the last that is registered."""

    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(128, num_classes)
        self.stem = nn.Conv2d(1, 128, 3)

    def forward(self, x):
        return self.fc(self.stem(x).mean((2, 3)))


def test_a_last_layer_without_the_outputs_is_kept_as_it_was_learned(tmp_path):
    reported = {"classes": '["a", "b", "c"]', "num_classes": "3"}
    with zoo.builders.lent("headfirst", lambda classes, channels, size: HeadFirst(classes)):
        source = zoo.build(ModelRecipe(name="headfirst"), 3, 1, 8)
        recipe = starting_from(tmp_path, "headfirst", source, reported)
        model = zoo.build(recipe, 3, 1, 8, classes=["b", "a", "d"])
    assert torch.equal(model.stem.weight, source.stem.weight)
    assert torch.equal(model.fc.weight, source.fc.weight)
    note = zoo.describe_class_match(reported, recipe, ["b", "a", "d"], model)
    assert note == ", its classes matched by their order"


@pytest.mark.parametrize(
    ("told", "ends"),
    [
        ('{"model": {"name": "cnn"}}', "another model, cnn: type model.name=cnn"),
        ('{"model": {"name": "mlp"}}', "another model"),
        (
            '{"model": {"name": "timm:resnet10t"}}',
            "another model, timm:resnet10t: type model.name=timm:resnet10t",
        ),
        ('{"model": {"name": "MyNet"}}', "another model, MyNet"),
        ('{"model": {"name": 5}}', "another model"),
        ("[" * 100_000, "another model"),
        ("[]", "another model"),
        ("{", "another model"),
        (None, "another model"),
    ],
)
def test_init_from_names_the_model_that_the_weights_are_of(tmp_path, told, ends):
    source = zoo.build(ModelRecipe(name="cnn"), 10, 1, 8)
    recipe = starting_from(tmp_path, "mlp", source, {"recipe": told} if told is not None else None)
    with pytest.raises(CheckpointError) as error:
        zoo.build(recipe, 10, 1, 8)
    assert str(error.value).endswith(ends)


def test_a_users_own_model(monkeypatch):
    monkeypatch.setattr(zoo, "builders", copy.copy(zoo.builders))

    @zoo.register_model("mine")
    def build(num_classes, channels, image_size):
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))

    assert zoo.build(
        ModelRecipe(name="mine"),
        3,
        1,
        8,
    )(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    with pytest.raises(RecipeError, match="taken"):
        zoo.register_model("mine")(build)
    with pytest.raises(RecipeError, match="taken"):
        zoo.register_model("resnet18")(build)


class Beside(nn.Linear):
    def get_extra_state(self):
        return {"n": 1}


class Own(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.body = kind, nn.LazyLinear(4) if kind == "lazy" else nn.Linear(64, 4)
        self.head = nn.Linear(4, 10)
        if kind == "complex":
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        if kind == "beside":
            self.body = Beside(64, 4)
        if kind == "pruned":
            prune.l1_unstructured(self.head, "weight", 0.5)
        if kind == "keeping":
            self.kept = []
            self.body.register_forward_hook(
                lambda module, inputs, outputs: self.kept.append(outputs)
            )

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            x = self.body(x.flatten(1))
        if self.kind == "keeping":
            x = x + self.kept.pop()
        return self.head((x * self.turn).real if self.kind == "complex" else x)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("lazy", r" lazy layers\b.*\bzeros\b"),
        ("complex", "turn: make torch.view_as_real"),
        ("beside", "Beside .*register_buffer"),
        ("pruned", None),
    ],
)
def test_parameters_that_no_mode_trains_are_refused_and_what_torch_does_not_copy_is_taken(
    kind, says
):
    with zoo.builders.lent("own", lambda num_classes, channels, image_size: Own(kind)):
        if says is None:
            assert (
                zoo.build(
                    ModelRecipe(name="own"),
                    10,
                    1,
                    8,
                ).head.weight_mask.sum()
                == 20
            )
        else:
            with pytest.raises(RecipeError, match=f"model.name=own.*{says}"):
                zoo.build(ModelRecipe(name="own"), 10, 1, 8)
    if kind == "beside":
        with pytest.raises(CheckpointError, match=f"^it.*{says}"):
            zoo.load_weights(Own(kind), Own(kind).state_dict(), "it", whole=True)


@pytest.mark.parametrize("kind", ["without autocast", "keeping"])
def test_a_model_that_shapes_alone_do_not_run_is_not_blamed(kind):
    with zoo.builders.lent("own", lambda num_classes, channels, image_size: Own(kind)):
        assert zoo.build(ModelRecipe(name="own"), 10, 1, 8).kind == kind
