"""data.decode=gpu, with a CPU's decoder in the place of a GPU's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.command_line import latest, suggested, trainer
from tests.data.loading import epoch
from tests.data.photo_folders import exif, scene
from trainer.data import as_pictures, open_datasets
from trainer.data.photos import gpu_decoding
from trainer.data.photos.decoding import open_image
from trainer.data.photos.gpu_decoding import Crop, PhotoDecoder, group_by_size, render
from trainer.data.photos.jpeg import decode_jpeg
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import PhotoDraws, plan_center_crop, prepare_for_evaluation
from trainer.errors import RecipeError, SetupError
from trainer.recipe import AugmentRecipe, load
from trainer.recipe.checks import check_options

CPU = torch.device("cpu")


def pixels(height, width):
    return torch.from_numpy(scene(height, width)).permute(2, 0, 1)


def in_float(image, crop, height, width):
    """The image of a crop by torch's own operations, in float64."""
    top, left, rows, columns = crop.box
    part = image[:, top : top + rows, left : left + columns].double()[None]
    size = [*crop.size]
    part = F.interpolate(part, size, mode="bilinear", antialias=True)[0]
    up, beside = crop.offset
    part = part[:, up : up + height, beside : beside + width]
    dimensions = [axis + 1 for axis, flip in enumerate(crop.flips) if flip]
    return part.flip(dimensions).permute(1, 2, 0)


CROPS = {
    "smaller": Crop((10, 20, 100, 150), (32, 48)),
    "larger": Crop((3, 4, 9, 11), (32, 48)),
    "both": Crop((0, 0, 12, 160), (32, 48), flips=(False, True)),
    "the middle": Crop((0, 0, 120, 200), (40, 66), (4, 9), (True, False)),
    "a corner": Crop((0, 0, 120, 200), (40, 66), (8, 18), (True, True)),
    "one pixel": Crop((50, 60, 1, 1), (32, 48)),
    "the same size": Crop((5, 6, 32, 48), (32, 48)),
}


def test_crops_are_those_of_torch_in_float():
    """All of them at the same time, so that each is padded to the largest box."""
    images = [pixels(120, 200)] * len(CROPS)
    results = render(images, [*CROPS.values()], 32, 48)
    for result, (name, crop) in zip(results, CROPS.items(), strict=True):
        expected = in_float(images[0], crop, 32, 48)
        assert (result - expected).abs().max() <= 0.501, name


AUGMENTS = {
    "resized": {"crop": "resized", "hflip": 0.5, "vflip": 0.5},
    "none": {"crop": "none", "hflip": 0.5, "vflip": 0.5},
}


@pytest.mark.parametrize("size", [32, (24, 40), 96])
@pytest.mark.parametrize("name", AUGMENTS)
def test_pixels_are_within_two_levels_of_those_of_the_cpu(name, size):
    """The CPU rounds between its two passes over an image, too."""
    height, width = (size, size) if isinstance(size, int) else size
    draws = PhotoDraws(AugmentRecipe(**AUGMENTS[name]), 0, 1, np.arange(40))
    images = [pixels(90 + row, 130 - 2 * row) for row in range(40)]
    pictures = [Picture.of(image) for image in images]
    crops = [draws.plan(row, picture, size) for row, picture in enumerate(pictures)]
    results = render(images, crops, height, width)
    for row, picture in enumerate(pictures):
        expected = draws.apply(row, picture, size).permute(1, 2, 0)
        assert (results[row].int() - expected.int()).abs().max() <= 2


@pytest.mark.parametrize("shape", [(90, 130), (131, 90), (40, 300), (33, 32)])
@pytest.mark.parametrize("shorter", [None, 32, 50, (40, 90)])
def test_evaluation_crops_the_same_part(shape, shorter):
    image = pixels(*shape)
    picture = Picture.of(image)
    crop = plan_center_crop(picture, (32, 32), shorter)
    result = render([image], [crop], 32, 32)[0]
    expected = prepare_for_evaluation(picture, (32, 32), shorter).permute(1, 2, 0)
    assert (result.int() - expected.int()).abs().max() <= 2


def test_a_stripe_is_refused_as_on_the_cpu():
    picture = Picture.of(torch.zeros(3, 2, 2002, dtype=torch.uint8))
    with pytest.raises(ValueError, match="stripe"):
        plan_center_crop(picture, 32)


def test_large_photos_are_resized_in_small_groups(monkeypatch):
    monkeypatch.setattr(gpu_decoding, "LARGEST_GROUP", 3 * 1000)
    boxes = [(10, 10), (40, 50), (11, 9), (30, 100), (10, 20), (20, 10)]
    photos = []
    for row, box in enumerate(boxes):
        photos.append((row, gpu_decoding.EncodedPhoto(None, Crop((0, 0, *box), (8, 8)), "")))
    groups = [*map(list, group_by_size(photos))]
    assert sorted(row for group in groups for row, _ in group) == [*range(6)]
    for group in groups:
        tallest = max(photo.crop.box[2] for _, photo in group)
        widest = max(photo.crop.box[3] for _, photo in group)
        assert len(group) == 1 or len(group) * tallest * widest <= 1000
    assert len(groups) == 4


# Whole batches.


class FakeDecoder:
    """Decodes lists of JPEGs on the CPU, and refuses a list with a photo of these colors."""

    def __init__(self, refused=()):
        self.refused = refused
        self.lists = []

    def __call__(self, data, channels):
        self.lists.append(len(data))
        images = [decode_jpeg(one, channels) for one in data]
        if any(image[0, 0, 0] in self.refused for image in images):
            raise RuntimeError("nvJPEG: not supported")
        return images


@pytest.fixture
def decoder(monkeypatch):
    fake = FakeDecoder()
    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda device: fake)
    return fake


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of several kinds: small JPEGs, a turned one, a large one, a gray one, and a PNG."""
    root = tmp_path_factory.mktemp("photos")
    for part in ("train", "val"):
        for number in range(21):
            folder = root / part / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(np.roll(scene(60 + number, 90), 5 * number, 1))
            if number == 3:
                image.save(folder / f"{number:02}.jpg", exif=exif(6))
            elif number == 4:
                Image.fromarray(scene(200, 300)).save(folder / f"{number:02}.jpg", quality=100)
            elif number == 5:
                image.save(folder / f"{number:02}.png")
            elif number == 6:
                image.convert("L").save(folder / f"{number:02}.jpg")
            else:
                image.save(folder / f"{number:02}.jpg", quality=60)
    return root


def read_all(loading, photos, *words):
    """Return the pictures of a training epoch and of an evaluation."""
    words = latest(
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=64",
        "data.train_size=48",
        "batch_size=7",
        "augment.crop=resized",
        *words,
    )
    datasets = open_datasets(load(None, *words))
    loader = loading(datasets, *words)
    pictures = [as_pictures(datasets, inputs) for inputs, _ in epoch(loader, 1)]
    for batch in loader.evaluation():
        pictures.append(as_pictures(datasets, batch.inputs))
    loader.close()
    return pictures


@pytest.mark.parametrize("words", [["data.workers=0"], ["data.workers=2"], ["data.channels=1"]])
def test_batches_are_those_of_the_cpu_within_two_levels(loading, photos, decoder, words):
    on_cpu = read_all(loading, photos, *words)
    assert decoder.lists == []
    on_gpu = read_all(loading, photos, *words, "data.decode=gpu")
    # Training has 21 photos and evaluation 21, of which two are no upright JPEGs, and one has more
    # bytes than its pixels. The last batches of both are full.
    assert sum(decoder.lists) == 2 * 18
    equal = 0
    for one, two in zip(on_cpu, on_gpu, strict=True):
        assert one.shape == two.shape
        assert (one.int() - two.int()).abs().max() <= 2
        equal += sum(map(torch.equal, one, two))
    # Photos that were decoded on the CPU.
    assert equal >= 6


def test_padding_repeats_the_last_photo(loading, photos, decoder):
    words = ["batch_size=8", "data.workers=0"]
    on_cpu = read_all(loading, photos, *words)
    on_gpu = read_all(loading, photos, *words, "data.decode=gpu")
    assert torch.equal(on_gpu[-1][5], on_gpu[-1][-1])
    for one, two in zip(on_cpu, on_gpu, strict=True):
        assert (one.int() - two.int()).abs().max() <= 2


def test_a_photo_that_the_gpu_refuses_is_decoded_on_the_cpu(loading, photos, decoder):
    on_cpu = read_all(loading, photos, "data.workers=0")
    decoder.refused = range(0, 256, 3)
    on_gpu = read_all(loading, photos, "data.workers=0", "data.decode=gpu")
    assert 1 in decoder.lists
    for one, two in zip(on_cpu, on_gpu, strict=True):
        assert (one.int() - two.int()).abs().max() <= 2


def test_a_photo_that_no_decoder_reads_stops_the_run_and_is_named(loading, tmp_path, decoder):
    for part in ("train", "val"):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(4):
                path = tmp_path / part / name / f"{number}.jpg"
                Image.fromarray(scene(60, 90)).save(path, quality=60)
    broken = tmp_path / "train" / "a" / "2.jpg"
    data = bytearray(broken.read_bytes())
    table = data.index(b"\xff\xc4")
    data[table + 4 : table + 40] = b"\xff" * 36
    broken.write_bytes(data)
    with pytest.raises((RuntimeError, SyntaxError)):
        open_image(str(broken), 3).decode(1)
    words = ["data.check=off", "data.workers=0", "batch_size=4", "data.decode=gpu"]
    with pytest.raises(SetupError, match=r"a/2\.jpg"):
        read_all(loading, tmp_path, *words)


# Requirements.


def test_a_device_without_a_decoder_is_refused():
    with pytest.raises(RecipeError):
        PhotoDecoder(CPU, 3)


def test_a_run_without_a_gpu_suggests_what_works(photos, tmp_path):
    words = [
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=96",
        "model.name=cnn",
        "batch_size=7",
        "epochs=1",
        "devices=[cpu]",
        f"output={tmp_path / 'run'}",
    ]
    ended = trainer(*words, "data.decode=gpu")
    assert ended.returncode == 2
    assert suggested(ended.stderr) == ["data.decode=cpu"]


@pytest.mark.parametrize(
    "word",
    [
        "augment.auto=trivial",
        "augment.crop=pad",
        "augment.transforms=[RandomInvert]",
        "data.cache=disk",
        "data.interpolation=bicubic",
        "data.on_error=skip",
    ],
)
def test_keys_that_need_pixels_in_a_worker_are_refused(word):
    words = ["data.name=imagefolder", "data.root=photos", "data.decode=gpu"]
    check_options(load(None, *words))
    with pytest.raises(RecipeError) as error:
        check_options(load(None, *words, word))
    first, second = suggested(str(error.value))
    assert second == "data.decode=cpu"
    check_options(load(None, *latest(*words, word, first)))
    check_options(load(None, *latest(*words, word, second)))
