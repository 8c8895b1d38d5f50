"""data.train_size, data.resize and data.interpolation, from the photo to the trained model."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

import trainer
from tests.command_line import WHOLE, ok, result, suggested
from tests.command_line import trainer as command
from tests.data.loading import epoch, opened
from tests.data.photo_folders import write_two_classes
from tests.modes.ways import EXACT, assert_same_training
from trainer.commands.export.exporting import load as load_for_export
from trainer.data import as_pictures, open_datasets, sampling
from trainer.data.cache.stored import format_of
from trainer.data.photos.decoding import open_image
from trainer.data.photos.photo_reader import resize
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.recipe.image_sizes import check_resize, typed_size
from trainer.saving.weights import read_metadata

MODES = {
    "bilinear": vision.InterpolationMode.BILINEAR,
    "bicubic": vision.InterpolationMode.BICUBIC,
    "nearest": vision.InterpolationMode.NEAREST_EXACT,
}
SIZES = ["data.train_size=24", "data.image_size=32", "data.resize=40", "data.interpolation=bicubic"]
TRAIN = [
    "data.name=imagefolder",
    *SIZES,
    "model.name=cnn_gn",
    "batch_size=8",
    "optimizer.lr=0.01",
    "epochs=2",
    "data.workers=1",
    "augment.crop=resized",
    "augment.erase=0.5",
    "logging.verdict=false",
    "ema=0.9",
    *WHOLE,
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """24 photos of two classes, of 60 x 90 pixels, and the same for validation."""
    return write_two_classes(
        tmp_path_factory.mktemp("photos"),
        coarse=(12, 18),
        size=(60, 90),
    )


def evaluation_images(root, shorter, size, interpolation):
    """Return the validation images as torchvision's evaluation preset prepares them, by path."""
    mode = MODES[interpolation]
    resize = v2.Resize(shorter, mode, antialias=True)
    preset = v2.Compose([resize, v2.CenterCrop(size)])
    return {
        path: preset(open_image(str(path), 3).decode(1)) for path in sorted(root.glob("val/?/*"))
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_training_and_evaluation_have_their_own_sizes(loading, photos, workers, interpolation):
    words = [
        "data.name=imagefolder",
        f"data.root={photos}",
        *SIZES[:-1],
        f"data.interpolation={interpolation}",
        "batch_size=8",
        f"data.workers={workers}",
    ]
    datasets = open_datasets(load(None, *words))
    loader = loading(datasets, *words, "augment.crop=resized", "augment.erase=0.9")
    # Training and evaluation take turns in the same slots.
    for number in (0, 1):
        assert [inputs.shape for inputs, _ in epoch(loader, number)] == [(8, 3, 24, 24)] * 3
        pictures = torch.cat([as_pictures(datasets, batch.inputs) for batch in loader.evaluation()])
        expected = evaluation_images(photos, 40, 32, interpolation).values()
        assert torch.equal(pictures.permute(0, 3, 1, 2), torch.stack([*expected]))

    loader = loading(datasets, *words, "augment.crop=resized")
    actual = torch.cat([as_pictures(datasets, inputs) for inputs, _ in epoch(loader, 0)])
    order = sampling.draw_permutation(0, 0, 24)
    boxes = sampling.crop_boxes(
        sampling.draw_boxes(0, 0, order, sampling.CROP), 60, 90, (0.08, 1.0)
    )
    mode = MODES[interpolation]
    for picture, index, box in zip(actual, order, boxes.tolist(), strict=True):
        image = open_image(datasets.train.where(index), 3).decode(1)
        expected = vision.resized_crop(image, *box, [24, 24], mode, antialias=True)
        assert torch.equal(picture.permute(2, 0, 1), expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_an_interpolation_is_torchvisions(interpolation, channels):
    image = torch.randint(0, 256, (channels, 41, 33), dtype=torch.uint8)
    mode = MODES[interpolation]
    for size in ([20, 30], [60, 50]):
        expected = vision.resize(image, size, mode, antialias=True)
        assert torch.equal(resize(image, size, interpolation), expected)
        assert torch.equal(resize(image[None], size, interpolation)[0], expected)
    if interpolation == "nearest" and channels == 1:
        picture = Image.fromarray(image[0].numpy())
        by_pillow = np.asarray(picture.resize((50, 60), Image.Resampling.NEAREST))
        assert np.array_equal(resize(image, [60, 50], interpolation)[0].numpy(), by_pillow)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.name=mlp"], "model.name=mlp"),
        (["model.name=vit_tiny"], "model.name=vit_tiny"),
        (["data.resize=31"], "data.resize=31"),
        (["data.resize=70"], "data.resize=70"),
        (["data.name=digits", "data.root=null", "data.resize=null"], "data.train_size=24"),
        (["data.name=digits", "data.root=null", "data.train_size=null"], "data.resize=40"),
    ],
)
def test_what_cannot_be_is_refused_before_training(photos, words, says):
    arguments = dict(word.split("=", 1) for word in [*TRAIN, f"data.root={photos}", *words])
    completed = command("mode=single", *(f"{key}={value}" for key, value in arguments.items()))
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert says in line


def test_copies_in_the_cache_depend_on_the_interpolation_and_cover_both_sizes():
    def describe(*words):
        return str(format_of(load(None, *words), 224, 3))

    # Blocks of earlier versions have this name, and are still read.
    assert describe() == "3-raw-256-3-None"
    assert describe("data.interpolation=bicubic") == "3-raw-256-3-None-bicubic"
    assert describe("data.resize=232", "data.train_size=176") == "3-raw-232-3-None"
    assert describe("data.resize=232", "data.train_size=280") == "3-raw-320-3-None"


@pytest.fixture(scope="module")
def single(photos, tmp_path_factory):
    run = tmp_path_factory.mktemp("sizes") / "single"
    ok(*TRAIN, f"data.root={photos}", "mode=single", f"output={run}")
    return run


@pytest.mark.full(but=["ddp", "interleaved1f1b"])
@pytest.mark.slow
@pytest.mark.parametrize("way", EXACT)
def test_modes_train_and_evaluate_as_single_does(photos, single, way, tmp_path):
    run = tmp_path / "run"
    ok(*TRAIN, f"data.root={photos}", *EXACT[way], f"output={run}")
    assert_same_training(run, single)


@pytest.mark.slow
def test_a_trained_model_prepares_images_as_the_run_did(photos, single):
    """The run, `load`, evaluate, predict and export agree with torchvision's preset."""
    metadata = read_metadata(single)
    sizes = {key: json.loads(metadata[key]) for key in ("image_size", "shorter_side", "inputs")}
    assert sizes == {"image_size": 32, "shorter_side": 40, "inputs": ["float32", [3, 32, 32]]}
    assert json.loads(metadata["interpolation"]) == "bicubic"

    images = evaluation_images(photos, 40, 32, "bicubic")
    model = trainer.load(single, "last")
    pixels = torch.stack([*images.values()]).double() / 255
    mean, std = (
        torch.tensor(json.loads(metadata[key])).view(-1, 1, 1).double() for key in ("mean", "std")
    )
    with torch.no_grad():
        outputs = model.model(((pixels - mean) / std).float())
    labels = torch.tensor(["ab".index(path.parent.name) for path in images])
    loss = torch.nn.functional.cross_entropy(outputs, labels)
    assert result(single)["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    answers = model.predict([str(path) for path in images])
    for answer, scores in zip(answers, outputs.softmax(1), strict=True):
        assert answer.probability == pytest.approx(scores.max().item(), abs=1e-5)
    assert model.evaluate()["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    # Arguments replace what the weights say.
    other = trainer.load(single, "data.interpolation=nearest", "data.resize=48")
    assert other.evaluate()["val_loss"] != pytest.approx(loss.item(), rel=1e-5)
    exported = load_for_export(single / "last.safetensors", (), True, "fp32").facts
    assert (exported["shorter_side"], exported["interpolation"]) == (40, "bicubic")
    assert "bicubic with antialiasing" in exported["resize"]


@pytest.mark.slow
def test_resuming_with_other_sizes_is_refused(photos, single):
    words = [*TRAIN, f"data.root={photos}", "mode=single", f"output={single}", "resume=auto"]
    for word in ("data.train_size=32", "data.interpolation=bilinear", "data.resize=36"):
        kept = [other for other in words if other.split("=")[0] != word.split("=")[0]]
        completed = command(*kept, word)
        assert completed.returncode == 2
        assert word.split("=")[0] in completed.stderr


def test_a_size_of_inputs_that_are_no_images_is_refused():
    floats = torch.rand(16, 5), torch.arange(16) % 2
    with pytest.raises(RecipeError, match=r"^data\.train_size=8\b.*data\.train_size=null"):
        opened((floats, floats, ("a", "b")), "data.train_size=8")


@pytest.mark.parametrize("size", [224, (128, 256), (300, 100)])
def test_the_suggested_resize_is_accepted(size):
    with pytest.raises(RecipeError) as refused:
        check_resize(8, size)
    [argument] = suggested(str(refused.value))
    check_resize(typed_size(load(None, argument).data.resize), size)


def test_training_photos_of_the_size_of_evaluation_are_resized_alike(loading, photos):
    words = ["data.name=imagefolder", f"data.root={photos}", "data.image_size=32"]
    words += ["data.resize=40", "batch_size=8", "data.workers=0"]
    pictures = []
    for more in ([], ["data.train_size=32"]):
        datasets = open_datasets(load(None, *words, *more))
        batches = epoch(loading(datasets, *words, *more), 0)
        pictures.append(torch.cat([inputs for inputs, _ in batches]))
    assert torch.equal(*pictures)


@pytest.mark.slow
def test_a_run_names_how_the_images_of_its_first_weights_were_prepared(photos, single, tmp_path):
    words = ["data.name=imagefolder", f"data.root={photos}", "model.name=cnn_gn", *WHOLE]
    words += ["data.image_size=32", "mode=single", "max_steps=1", f"model.init_from={single}"]
    words.append("batch_size=8")
    printed = ok(*words, f"output={tmp_path / 'other'}").stdout
    hints = ["data.interpolation=bicubic", "data.resize=40"]
    assert all(hint in printed for hint in hints)
    again = ok(*words, *hints, f"output={tmp_path / 'same'}").stdout
    assert not any(hint in again for hint in hints)
