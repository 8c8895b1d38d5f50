"""data.decode=gpu, with a CPU's decoder in the place of a GPU's."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from tests.command_line import latest, suggested, trainer
from tests.data.archives.making import tarred
from tests.data.loading import epoch
from tests.data.photo_folders import exif, scene
from tests.simulated.simcuda import simulated
from trainer.commands.predict import labelling, predict_command
from trainer.commands.predict.labelling import Labeller, LabelModel, Preparation
from trainer.data import as_pictures, gpu_decoding, open_datasets
from trainer.data.gpu_decoding import load_decoder
from trainer.data.photos import photo_reader
from trainer.data.photos.copies import copy_to_device
from trainer.data.photos.decoding import open_image
from trainer.data.photos.jpeg import decode_jpeg
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import PhotoDraws
from trainer.devices.cuda_graphs import host_random_states
from trainer.errors import RecipeError, SetupError
from trainer.recipe import AugmentRecipe, load
from trainer.recipe.checks import check_options
from trainer.tasks import Classification


def pixels(height, width):
    return torch.from_numpy(scene(height, width)).permute(2, 0, 1)


AUGMENTS = {
    "resized": {"crop": "resized", "hflip": 0.5, "vflip": 0.5},
    "pad": {"crop": "pad", "crop_padding": 4},
}


@pytest.mark.parametrize("size", [32, (24, 40), 96])
@pytest.mark.parametrize("name", AUGMENTS)
def test_a_gpu_resizes_in_float_to_the_same_bytes_within_one_level(name, size, monkeypatch):
    """A CPU rounds between its two passes over an image, too."""
    draws = PhotoDraws(AugmentRecipe(**AUGMENTS[name]), 0, 1, np.arange(40))
    for row in range(40):
        picture = Picture.of(pixels(90 + row, 130 - 2 * row))
        in_bytes = draws.apply(row, picture, size)
        with monkeypatch.context() as patched:
            patched.setattr(photo_reader.vision, "resize", resize_in_float)
            patched.setattr(photo_reader, "VECTORISED", False)
            in_float = draws.apply(row, picture, size)
        assert (in_bytes.int() - in_float.int()).abs().max() <= 1


def resize_in_float(image, size, mode, antialias):
    """Resize as torchvision does on a GPU, which has no kernel for bytes."""
    resized = F.interpolate(image.float(), [*size], mode="bilinear", antialias=antialias)
    return resized.round_().to(torch.uint8)


# Whole batches.


class FakeDecoder:
    """Decodes lists of JPEGs on the CPU, and refuses a list with a photo of these colors."""

    channels = 3

    def __init__(self, refused=()):
        self.refused = refused
        self.lists = []

    def __call__(self, data):
        self.lists.append(len(data))
        images = [decode_jpeg(one, self.channels) for one in data]
        if any(image[0, 0, 0] in self.refused for image in images):
            raise RuntimeError("nvJPEG: not supported")
        return images


@pytest.fixture
def decoder(monkeypatch):
    fake = FakeDecoder()
    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda device, channels: fake)
    # A batch has several lists.
    monkeypatch.setattr(gpu_decoding, "TOGETHER", 4)
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


@pytest.mark.parametrize(
    "words",
    [
        ["data.workers=0"],
        ["data.workers=2", "augment.auto=trivial", "augment.hflip=0.5"],
        ["data.channels=1", "augment.crop=pad", "augment.vflip=0.5", "data.interpolation=bicubic"],
        ["data.workers=0", "batch_size=8", "data.resize=70", "data.train_size=64"],
        ["data.name=shards"],
    ],
)
def test_batches_are_those_of_the_cpu(loading, photos, decoder, words, tmp_path):
    """Also the padding of the last batch, which repeats a photo."""
    if words == ["data.name=shards"]:
        for part in ("train", "val"):
            paths = sorted((photos / part).rglob("*.*"))
            names = [str(path.relative_to(photos / part)) for path in paths]
            files = [path.read_bytes() for path in paths]
            tarred(tmp_path / f"{part}-000.tar", zip(names, files, strict=True))
        photos = tmp_path
    decoder.channels = 1 if "data.channels=1" in words else 3
    on_cpu = read_all(loading, photos, *words)
    assert decoder.lists == []
    states = [*host_random_states(), torch.get_rng_state().tolist()]
    on_gpu = read_all(loading, photos, *words, "data.decode=gpu")
    # Shards are opened in a random order.
    if words != ["data.name=shards"]:
        assert repr(states) == repr([*host_random_states(), torch.get_rng_state().tolist()])
    assert all(map(torch.equal, on_cpu, on_gpu))
    if "batch_size=8" not in words:
        # Training and evaluation have 21 photos each. Two are no upright JPEGs, and one has more
        # bytes than pixels.
        assert sum(decoder.lists) == 2 * 18


def test_a_photo_that_the_gpu_refuses_is_decoded_on_the_cpu(loading, photos, decoder):
    on_cpu = read_all(loading, photos, "data.workers=0")
    decoder.refused = range(0, 256, 3)
    on_gpu = read_all(loading, photos, "data.workers=0", "data.decode=gpu")
    assert 1 in decoder.lists
    assert all(map(torch.equal, on_cpu, on_gpu))


def test_a_photo_that_no_decoder_reads_stops_the_run_and_is_named(loading, tmp_path, decoder):
    broken = two_classes(
        tmp_path, lambda path: Image.fromarray(scene(60, 90)).save(path, quality=60)
    )
    data = bytearray(broken.read_bytes())
    table = data.index(b"\xff\xc4")
    data[table + 4 : table + 40] = b"\xff" * 36
    broken.write_bytes(data)
    with pytest.raises((RuntimeError, SyntaxError)):
        open_image(str(broken), 3).decode(1)
    words = ["data.check=off", "data.workers=0", "batch_size=4", "data.decode=gpu"]
    with pytest.raises(SetupError, match=r"a/2\.jpg"):
        read_all(loading, tmp_path, *words)


def two_classes(root, paint):
    """Write four photos of each of two classes, and return the file of one."""
    for part in ("train", "val"):
        for name in "ab":
            (root / part / name).mkdir(parents=True)
            for number in range(4):
                paint(root / part / name / f"{number}.jpg")
    return root / "train" / "a" / "2.jpg"


def test_a_photo_that_cannot_be_prepared_is_named(loading, tmp_path, decoder):
    stripe = two_classes(tmp_path, lambda path: Image.fromarray(scene(60, 90)).save(path))
    Image.fromarray(scene(2, 2500)).save(stripe)
    words = ["data.check=off", "data.workers=0", "batch_size=4", "augment.crop=none"]
    for where in ("cpu", "gpu"):
        with pytest.raises(SetupError, match=r"a/2\.jpg"):
            read_all(loading, tmp_path, *words, f"data.decode={where}")


def test_an_error_of_the_gpu_is_no_fault_of_a_photo(loading, photos, monkeypatch):
    def decode(data):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda device, channels: decode)
    with pytest.raises(torch.OutOfMemoryError):
        read_all(loading, photos, "data.workers=0", "data.decode=gpu")


def test_photos_that_are_all_too_large_are_reported(loading, tmp_path, decoder):
    two_classes(tmp_path, lambda path: Image.fromarray(scene(400, 400)).save(path, quality=100))
    words = ["data.workers=0", "batch_size=4", "data.decode=gpu"]
    with pytest.raises(RecipeError) as error:
        read_all(loading, tmp_path, *words)
    assert suggested(str(error.value)) == ["data.decode=cpu"]


def test_cmyk_is_left_to_the_workers(tmp_path):
    for mode, is_kept in (("RGB", True), ("L", True), ("CMYK", False)):
        path = tmp_path / f"{mode}.jpg"
        Image.fromarray(scene(60, 90)).convert(mode).save(path)
        assert (open_image(str(path), 3).jpeg is not None) == is_kept


# Predictions.


class Recorder(nn.Module):
    """Two classes; keeps its inputs."""

    def forward(self, images):
        self.images = images.clone()
        return images.new_zeros(len(images), 2)


SMALL = Preparation(64, 73, 3, (0.5,) * 3, (0.25,) * 3)


def predictor(*words, device="cpu", preparation=SMALL, **options):
    """Return a worker of predict whose device decodes photos."""
    recipe = load(None, *words, "precision=fp32", "graphs=false")
    task = Classification(recipe, ("a", "b"))
    worker = Labeller(Recorder(), preparation, recipe, task, gpu_decoding=True, **options)
    worker.setup(torch.device(device))
    return worker


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("threads", [0, 2])
def test_predict_decodes_the_same_photos_as_an_evaluation(
    loading, photos, monkeypatch, decoder, threads
):
    """Its pixels are those of the evaluation, in the data set's order."""
    # The GPU's pixels are darker, so that it matters which photos it decodes.
    decode = decoder.__class__.__call__
    monkeypatch.setattr(
        FakeDecoder, "__call__", lambda self, data: [one // 2 for one in decode(self, data)]
    )
    words = ["data.name=imagefolder", f"data.root={photos}", "data.image_size=64"]
    words += ["augment.crop=resized", "batch_size=7", "data.workers=0", "data.decode=gpu"]
    datasets = open_datasets(load(None, *words))
    loader = loading(datasets, *words)
    evaluated = torch.cat([batch.inputs[: batch.count] for batch in loader.evaluation()])
    worker = predictor(
        *words, preparation=Preparation.of(datasets), source=datasets.val, threads=threads
    )
    decoder.lists.clear()
    items = list(range(len(datasets.val)))
    paths = [datasets.val.where(item) for item in items]
    for rows in (items, paths):
        assert [row.error for row in worker.batch(worker.prepare(rows))] == [""] * len(rows)
        assert torch.equal(worker.model.images, evaluated)
    # All photos except the turned one, the large one and the PNG.
    assert decoder.lists == 2 * [4, 4, 4, 4, 2]


def test_predict_names_a_damaged_photo_and_labels_the_others(tmp_path, decoder):
    paths = []
    for number in range(5):
        paths.append(str(tmp_path / f"{number}.jpg"))
        Image.fromarray(scene(60, 90)).save(paths[-1], quality=60)
    data = bytearray((tmp_path / "2.jpg").read_bytes())
    table = data.index(b"\xff\xc4")
    data[table + 4 : table + 40] = b"\xff" * 36
    (tmp_path / "2.jpg").write_bytes(data)
    (tmp_path / "3.jpg").write_bytes(data[:30])
    Image.fromarray(scene(2, 2500)).save(paths[4])
    worker = predictor()
    assert [bool(row.error) for row in worker.batch(paths)] == [False, False, True, True, True]
    assert 1 in decoder.lists


@pytest.mark.parametrize("step", ["decode_jpeg", "prepare_for_evaluation"])
def test_an_error_of_the_gpu_reaches_the_pool(photos, monkeypatch, decoder, step):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = predictor()
    place = labelling if step == "prepare_for_evaluation" else sys.modules[__name__]
    monkeypatch.setattr(place, step, fail)
    with pytest.raises(torch.OutOfMemoryError):
        worker.batch([str(photos / "val" / "a" / "00.jpg")])


@pytest.mark.usefixtures("own_threads")
def test_predict_on_a_simulated_gpu_has_no_race(photos, monkeypatch):
    paths = [str(path) for path in sorted((photos / "val").rglob("*.*"))]
    inputs = []
    for device in ("cpu", "cuda:0"):
        with simulated(1) as machine:
            monkeypatch.setattr(
                gpu_decoding,
                "load_decoder",
                lambda device, channels: (
                    lambda data: [copy_to_device(decode_jpeg(one, 3), device) for one in data]
                ),
            )
            worker = predictor(device=device, threads=2)
            assert not any(row.error for row in worker.batch(worker.prepare(paths)))
            inputs.append(worker.model.images.cpu())
        assert machine.errors == []
    difference = (inputs[0] - inputs[1]).abs().max()
    # Two levels of 255, in units of the standard deviation of 0.25.
    assert difference <= 2 / 255 / 0.25


# Requirements.


def test_a_device_without_a_decoder_is_refused():
    with pytest.raises(RecipeError):
        load_decoder(torch.device("cpu"), 3)


class PoolOfThisProcess:
    def __init__(self, devices, worker, arguments, **_):
        self.worker = worker(*arguments)
        self.worker.setup(torch.device(devices[0]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, items):
        return iter(self.worker.batch([*items]))


@pytest.mark.usefixtures("own_threads")
def test_a_run_without_a_gpu_suggests_what_works(photos, tmp_path, decoder, monkeypatch):
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
    assert trainer(*words).returncode == 0
    words = ["predict", str(tmp_path / "run"), str(photos / "val"), "devices=[cpu]"]
    words.append(f"output={tmp_path / 'labels'}")
    ended = trainer(*words, "data.decode=gpu")
    assert ended.returncode == 2
    assert suggested(ended.stderr) == ["data.decode=cpu"]
    assert trainer(*words, "data.decode=cpu").returncode == 0
    # The same in this process, with a decoder.
    monkeypatch.setattr(predict_command, "load_decoder", gpu_decoding.load_decoder)
    monkeypatch.setattr(predict_command, "DevicePool", PoolOfThisProcess)
    words = ["data.decode=gpu", "devices=[cpu]", "threads=1"]
    model = LabelModel.read(tmp_path / "run", words, [str(photos / "val")])
    predict_command.label(model, tmp_path / "labels on a gpu")
    assert len(decoder.lists) == 5
    rows = [
        (tmp_path / name / "predictions.csv").read_text() for name in ("labels", "labels on a gpu")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "word",
    [
        "augment.transforms=[RandomInvert]",
        "data.cache=disk",
        "data.on_error=skip",
    ],
)
def test_keys_that_do_not_work_with_it_are_refused(word):
    words = ["data.name=imagefolder", "data.root=photos", "data.decode=gpu"]
    check_options(load(None, *words))
    with pytest.raises(RecipeError) as error:
        check_options(load(None, *words, word))
    first, second = suggested(str(error.value))
    assert second == "data.decode=cpu"
    check_options(load(None, *latest(*words, word, first)))
    check_options(load(None, *latest(*words, word, second)))
