"""Sizes of height and width: they do what a square does, everywhere, and squares do what
they did.
"""

import math
import os
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from tests.command_line import ok, result, trainer
from tests.data.photo_folders import saved, scene
from tests.modes.ways import EXACT, SMALL, assert_same_training
from trainer import evaluate, load
from trainer import recipe as recipes
from trainer.commands.sweep.space import parse_dimension
from trainer.data import sampling
from trainer.data.augment import Auto, DeviceTransform, Draws, Gallery
from trainer.data.cache.stored import Format, picture_of, prepared
from trainer.data.photos.decoding import open_image
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import (
    PhotoDraws,
    compute_shorter_side,
    prepare_for_evaluation,
)
from trainer.errors import CheckpointError, RecipeError
from trainer.models import zoo
from trainer.recipe import ModelRecipe
from trainer.recipe.schema import AugmentRecipe
from trainer.training.trained import WeightFacts

SIZES = [
    (64, 96),
    (96, 64),
    (70, 71),
    (160, 48),
]
PHOTOS = [
    (120, 160),
    (160, 120),
    (150, 150),
    (33, 301),
    (90, 64),
]
WRONG = (
    "[0,224]",
    "[224]",
    "[224,320,3]",
    "224x320",
    "nan",
    "[224,nan]",
    "99999",
    "[8,99999]",
    "[]",
    "[8.0,9]",
    "-3",
)


def photo(height, width):
    return torch.from_numpy(scene(height, width)).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", PHOTOS)
def test_crops_are_torchvisions(size, shape):
    image = photo(*shape)
    index = np.arange(6)
    box = sampling.CropBoxes(
        sampling.draw_boxes(0, 1, index, sampling.CROP),
        (0.08, 1.0),
    )
    draws = PhotoDraws(AugmentRecipe(crop="resized"), 0, 1, index)
    for row in index.tolist():
        expected = vision.resized_crop(
            image,
            *box.box(row, *shape),
            [*size],
            antialias=True,
        )
        assert torch.equal(draws.apply(row, Picture.of(image), size), expected)
    # The same share as 224 of 256.
    covered = [side if max(size) <= 64 else round(side / 0.875) for side in size]
    scale = max(Fraction(side, whole) for side, whole in zip(covered, shape, strict=True))
    resized = v2.Resize(
        [math.floor(scale * whole) for whole in shape],
        antialias=True,
    )
    assert torch.equal(
        prepare_for_evaluation(Picture.of(image), size),
        v2.Compose([resized, v2.CenterCrop(size)])(image),
    )
    high, wide = size
    padded = PhotoDraws(AugmentRecipe(crop="pad"), 0, 1, index)
    (top, left), kept = (
        padded.shift[2].tolist(),
        vision.pad(prepare_for_evaluation(Picture.of(image), size), [4]),
    )
    assert torch.equal(
        padded.apply(2, Picture.of(image), size), kept[:, top : top + high, left : left + wide]
    )


def test_a_square_is_a_number_and_draws_what_it_drew():
    """The numbers are of the commit before there were other sizes."""
    words = ["data.image_size=[224,224]", "data.cache_size=[256,256]"]
    assert (recipes.load(None, *words).data.image_size, compute_shorter_side(224)) == (224, 256)
    mix = sampling.draw_mix(1, 2, 3, 4, 0.2, 1.0, 32)
    assert mix.box.tolist() == [
        [15, 0, 17, 20],
        [0, 4, 24, 25],
        [0] * 4,
        [0] * 4,
    ]
    assert mix.label.tolist() == pytest.approx([0.668, 0.4141, 0.9525, 0.3082], abs=1e-4)
    for number, pair in ((32, (32, 32)), (9, (9, 9))):
        one, other = (sampling.draw_mix(1, 2, 3, 64, 0.2, 1.0, size) for size in (number, pair))
        assert all(
            np.array_equal(getattr(one, part), getattr(other, part))
            for part in ("box", "label", "blend")
        )


def test_boxes_reach_over_height_and_width():
    mix = sampling.draw_mix(0, 0, 0, 4000, 0, 1.0, (40, 90))
    start = mix.box[:, :2]
    end = mix.box[:, :2] + mix.box[:, 2:]
    assert (start.min(0) == 0).all()
    assert end.max(0).tolist() == [40, 90]
    assert np.allclose(mix.label, 1 - mix.box[:, 2] * mix.box[:, 3] / 3600)
    boxes = sampling.draw_erase_boxes(
        0,
        0,
        np.arange(4000),
        1.0,
        (40, 90),
    )
    assert (boxes[:, 0] + boxes[:, 2]).max() == 40
    assert (boxes[:, 1] + boxes[:, 3]).max() >= 85
    images = torch.ones(2, 3, 40, 90)
    transform = DeviceTransform(
        (0.5,) * 3,
        (1.0,) * 3,
        (40, 90),
        False,
        torch.device("cpu"),
    )
    erased = transform.erase(
        images.clone(),
        np.array([[30, 60, 10, 30], [0, 0, 0, 0]]),
    )
    assert (erased == 0).nonzero()[:, 2:].min(0).values.tolist() == [30, 60]
    assert (erased == 0).sum() == 3 * 300
    assert torch.equal(
        transform._inside(np.array([[30, 60, 10, 30]]), (40, 90))[0, 0], erased[0, 0] == 0
    )


@pytest.mark.parametrize("auto", ["trivial", "rand"])
def test_images_in_memory_are_augmented_as_one_by_one(auto):
    images = torch.stack([photo(20, 34), photo(20, 34).flip(2)])
    index = np.arange(2)
    recipe = AugmentRecipe(crop="resized", hflip=0.5, auto=auto)
    device = torch.device("cpu")
    gallery = Gallery(images, 0, device)
    draws = Draws.of(recipe, 0, 0, index, (20, 34), device)
    batch = gallery.take(torch.arange(2), draws)
    boxes = sampling.crop_boxes(
        sampling.draw_boxes(0, 0, index, sampling.CROP),
        20,
        34,
        (0.08, 1.0),
    )
    assert draws.box.tolist() == boxes.tolist()
    assert batch.shape == (2, 20, 34, 3)
    with torch.random.fork_rng(devices=[]):
        one = [
            Auto(recipe, 0, 0, index)(row, image.permute(2, 0, 1))
            for row, image in enumerate(batch)
        ]
        assert torch.equal(
            Auto(recipe, 0, 0, index).batch(batch.clone()).permute(0, 3, 1, 2), torch.stack(one)
        )


def test_a_photo_is_decoded_as_small_as_both_sides_allow():
    asked = []
    picture = Picture(
        1024,
        1024,
        lambda factor: (
            asked.append(factor)
            or torch.zeros(
                3,
                1024 // factor,
                1024 // factor,
            )
        ),
    )
    for least in (
        (100, 500),
        (500, 100),
        (100, 130),
        (100, 100),
    ):
        picture.whole(least)
    assert asked == [2, 2, 4, 8]


@pytest.mark.parametrize("size", SIZES)
def test_a_cached_validation_photo_has_the_same_pixels(tmp_path, size):
    path = saved(tmp_path / "a.jpg")
    how = Format("raw", compute_shorter_side(size), 3)
    stored = prepared(os.fsencode(path), how)
    assert torch.equal(
        prepare_for_evaluation(picture_of(stored, how), size),
        prepare_for_evaluation(open_image(path, 3), size),
    )
    assert stored.rows * stored.columns < 602 * 815
    assert f"{how}" != f"{Format('raw', max(size), 3)}"


@pytest.mark.parametrize("key", ["data.image_size", "data.cache_size"])
def test_invalid_sizes_are_refused_typed_and_from_a_file(tmp_path, key):
    for value in WRONG:
        (tmp_path / "mine.yaml").write_text(f"data: {{{key.partition('.')[2]}: {value}}}\n")
        for words in ((None, f"{key}={value}"), (str(tmp_path / "mine.yaml"),)):
            with pytest.raises(RecipeError, match=rf"{re.escape(key)}=.*\b16384\b.*\[224,320\]$"):
                recipes.load(*words)
    assert parse_dimension(key, "[96,128]").values == ("96", "128"), "two squares, as ever"
    assert parse_dimension(key, "[[96,128],64]").values == ("[96,128]", "64")


@pytest.mark.parametrize(
    "told", [{"image_size": "[8]"}, {"image_size": "[8, 0]"}, {"shorter_side": "[9, 40]"}]
)
def test_weights_that_tell_another_size_are_refused(tmp_path, told):
    facts = {
        "classes": '["a"]',
        "mean": "[0.5]",
        "std": "[0.2]",
        "image_size": "[8, 16]",
        "channels": "1",
    }
    known_names = WeightFacts.read(tmp_path, facts | {"shorter_side": "[9, 18]"})
    assert (known_names.image_size, known_names.shorter((8, 16)), known_names.spec.shape) == (
        (8, 16),
        (9, 18),
        (1, 8, 16),
    )
    with pytest.raises(CheckpointError):
        WeightFacts.read(tmp_path, facts | {"shorter_side": "[9, 18]"} | told)


@pytest.mark.parametrize(
    "name", ["resnet18", "swin_t", "mlp", "cnn", "resnet8", "fast_cnn", "vgg11"]
)
def test_models_take_them(name):
    with torch.device("meta"):
        model = zoo.build(ModelRecipe(name=name), 5, 3, (64, 96))
        assert model.eval()(torch.zeros(2, 3, 64, 96)).shape == (2, 5)


@pytest.mark.slow(cases=["vit_b_16-size0-224"])
@pytest.mark.parametrize(
    ("name", "size", "works"),
    [
        ("vit_b_16", (224, 320), "224"),
        ("vit_tiny", (40, 72), "64"),
        pytest.param("maxvit_t", (224, 320), "224", marks=pytest.mark.slow),
        ("alexnet", (32, 96), "64"),
        ("mine", (64, 96), "64"),
    ],
)
def test_models_of_square_images_get_a_size_that_works(name, size, works):
    def mine(num_classes, channels, image_size):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(channels * image_size**2, num_classes)
        )

    with zoo.builders.lent("mine", mine), torch.device("meta"):
        with pytest.raises(
            RecipeError, match=rf"{size[0]} x {size[1]} .*data\.image_size={works}$"
        ):
            zoo.build(ModelRecipe(name=name), 5, 3, size)
        zoo.build(ModelRecipe(name=name), 5, 3, int(works))


def test_timms_models_accept_them_or_suggest_a_size():
    pytest.importorskip("timm", reason="pip install timm")
    with torch.device("meta"):
        for name, size in (("vit_tiny_patch16_224", (64, 96)), ("resnet18", (64, 96))):
            recipe = ModelRecipe(name=f"timm:{name}")
            assert zoo.build(recipe, 5, 3, size).eval()(torch.zeros(2, 3, *size)).shape == (2, 5)
            created = eval(zoo.format_bare_call(recipe, 5, size, 3), {"timm": __import__("timm")})
            assert created.eval()(torch.zeros(2, 3, *size)).shape == (2, 5)
        with pytest.raises(RecipeError, match=r"data\.image_size=\[96,160\]$"):
            zoo.build(ModelRecipe(name="timm:coatnet_0_rw_224"), 5, 3, (90, 130))


OBLONG = [word for word in SMALL if not word.startswith(("data.image_size=", "augment.crop="))]
OBLONG += ["data.image_size=[8,12]", "augment.erase=0.5", "augment.cutmix=1", "model.name=cnn_gn"]
OBLONG += [
    "optimizer.lr=0.01",
    "data.samples=320",
    "epochs=1",
    "augment.crop=resized",
    "augment.hflip=0.5",
]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    run = tmp_path_factory.mktemp("single") / "run"
    ok(*OBLONG, "mode=single", f"output={run}")
    return run


@pytest.mark.slow(cases=["1f1b", "fsdp", "ddp"])
@pytest.mark.parametrize("way", ["ddp", "1f1b", "fsdp"])
def test_modes_train_as_single_does(single, way, tmp_path):
    run = tmp_path / "run"
    ok(*OBLONG, *EXACT[way], f"output={run}")
    assert_same_training(run, single)


@pytest.mark.slow
def test_a_trained_model_has_its_size_through_every_entry_point(single, tmp_path):
    image = photo(60, 70)[:1].contiguous()
    model = load(single)
    expected = prepare_for_evaluation(Picture.of(image), (8, 12))
    with torch.no_grad():
        row = model.model((expected[None] / 255 - 0.5) / 0.289).softmax(1)[0]
    for devices in (None, ["cpu", "cpu"]):
        assert model.predict(image, devices).probability == pytest.approx(
            float(row.max()), abs=1e-5
        )
    assert evaluate(single)["val_loss"] == pytest.approx(result(single)["val_loss"], rel=1e-5)
    output = ok(
        "export",
        single,
        "format=exported_program",
        "preprocess=false",
        f"output={tmp_path}/x.pt2",
    ).stdout
    assert "1, 8, 12" in output
    assert "1 x 8 x 12" in ok("plan", *OBLONG).stdout
    words = [word for word in OBLONG if "image_size" not in word]
    assert (
        trainer(*words, "data.image_size=[12,8]", "resume=auto", f"output={single}").returncode == 2
    )
    again = ok(*words, "resume=auto", f"output={single}").stdout
    assert "1 x 8 x 12" in again, "a run that goes on keeps its size"
