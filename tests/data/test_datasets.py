"""Data sets: those of the package, those of torchvision, folders of photos, and the user's own."""

import functools
import gzip
import hashlib
import http.server
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import EpsImagePlugin, Image

from tests.data.photo_folders import photo_set
from trainer.data import ImageSet, downloads, open_datasets
from trainer.errors import RecipeError, SetupError
from trainer.recipe import load


def opened(*words):
    return open_datasets(load(None, *words))


@pytest.fixture
def folder(tmp_path):
    return photo_set(tmp_path, {"bee": 3, "ant": 3}, split=True)


def tiny(folder, *words):
    """A folder's images, small enough to lie in memory."""
    return opened("data.name=imagefolder", f"data.root={folder}", "data.image_size=16", *words)


def test_digits_hold_out_every_fifth_image():
    datasets = opened()
    assert (
        len(datasets.train),
        len(datasets.val),
        datasets.channels,
        datasets.image_size,
    ) == (1437, 360, 1, 8)
    assert datasets.train.images.max() == 255 and datasets.train.images.dtype == torch.uint8
    assert datasets.val.labels[:3].tolist() == [0, 5, 0]  # images 0, 5 and 10
    pixels = datasets.train.images / 255
    assert pixels.mean().item() == pytest.approx(datasets.mean[0], abs=0.01)
    assert pixels.std().item() == pytest.approx(datasets.std[0], abs=0.01)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_folder_that_a_set_does_not_read_is_refused(name, tmp_path):
    with pytest.raises(RecipeError, match=r"data\.root=.*data\.name=imagefolder"):
        open_datasets(load(None, f"data.name={name}", f"data.root={tmp_path}"))


def test_sets_in_memory_are_brought_to_the_recipes_shape_once():
    datasets = opened("data.image_size=32", "data.channels=3")
    assert datasets.train.images.shape == (1437, 3, 32, 32)
    assert datasets.mean == (datasets.mean[0],) * 3


def test_synthetic_sets_are_as_long_as_asked_and_depend_on_the_seed():
    words = (
        "data.name=synthetic",
        "data.samples=5000",
        "model.num_classes=7",
        "data.image_size=16",
        "data.channels=1",
    )
    a = opened(*words)
    b = opened(*words)
    c = opened(*words, "seed=1")
    assert (len(a.train), len(a.val), len(a.classes)) == (5000, 256, 7)
    assert a.synthetic
    assert a.train.images.shape == (256, 1, 16, 16)
    assert torch.equal(a.train.images, b.train.images)
    assert not torch.equal(a.train.images, c.train.images)
    assert not torch.equal(a.train.images, a.val.images)


def test_missing_photos_may_be_stood_in_for():
    datasets = opened("data.name=imagefolder", "data.missing=synthetic", "batch_size=100")
    assert datasets.synthetic
    assert len(datasets.train) >= 2000
    assert len(datasets.classes) == 1000
    assert datasets.image_size == 224


@pytest.mark.parametrize(
    "words", [["data.missing=error"], ["data.missing=synthetic", "data.root=/not/here"]]
)
def test_missing_photos_are_an_error(words):
    with pytest.raises(SetupError, match=r"data\.root="):
        opened("data.name=imagefolder", *words)


def test_folders_of_tiny_images_lie_in_memory(folder):
    actual = tiny(folder)
    assert isinstance(actual.train, ImageSet)
    assert actual.train.images.shape == (6, 3, 16, 16)
    assert actual.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert not isinstance(tiny(folder, "augment.crop=resized").train, ImageSet)


def test_unreadable_tiny_images_stop_or_are_skipped(folder):
    bad = folder / "train" / "ant" / "1.jpg"
    bad.write_bytes(b"no image")
    (folder / "val" / "bee" / "2.jpg").write_bytes(b"")
    with pytest.raises(SetupError, match=r"ant/1\.jpg.*data\.on_error=skip"):
        tiny(folder)
    actual = tiny(folder, "data.on_error=skip")
    assert (len(actual.train), len(actual.val)) == (6, 5)
    assert torch.equal(actual.train.images[1], actual.train.images[2])
    assert actual.train.failures[0][0] == str(bad)


def huge_jpeg(path):
    frame = b"\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01"
    path.write_bytes(
        b"\xff\xd8\xff\xe0\x00\x04ab"
        + frame
        + b"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x3f\x00"
        + bytes(99)
    )


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n"
ODD = {
    "a pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a huge frame": huge_jpeg,
    "PostScript": lambda path: path.write_bytes(POSTSCRIPT),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("held_in", ["memory", "files"])
def test_a_file_that_is_no_image_is_one_bad_image(folder, odd, held_in, monkeypatch):
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was started")
    )
    bad = folder / "train" / "ant" / "1.jpg"
    bad.unlink()
    ODD[odd](bad)
    if held_in == "memory":
        actual = tiny(folder, "data.on_error=skip")
        assert len(actual.train) == 6
        assert [path for path, _ in actual.train.failures] == [str(bad)]
        return
    source = tiny(folder, "augment.crop=resized").train
    assert len(source) == 6 and source.where(1) == str(bad)
    with pytest.raises((OSError, ValueError)):
        source.read(1, 3)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_published_sets_that_are_missing_say_what_to_put_where(name, tmp_path):
    with pytest.raises(SetupError) as error:
        opened(f"data.name={name}", f"data.root={tmp_path}", "data.download=false")
    assert str(tmp_path) in str(error.value)
    assert downloads.PUBLISHED[name].folder in str(error.value)
    assert "\n" not in str(error.value) and os.listdir(tmp_path) == []


@pytest.fixture
def mirror(tmp_path_factory, monkeypatch):
    """A place that offers a tiny MNIST."""
    place = tmp_path_factory.mktemp("mirror")
    resources = []
    for split, count in (("train", 6), ("t10k", 2)):
        pixels = bytes(range(count)) * 784
        labels = bytes(index % 10 for index in range(count))
        for kind, header, body in (
            ("images-idx3", struct.pack(">4i", 2051, count, 28, 28), pixels),
            ("labels-idx1", struct.pack(">2i", 2049, count), labels),
        ):
            file = place / f"{split}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(header + body))
            resources.append((file.name, hashlib.md5(file.read_bytes()).hexdigest()))
    maker = downloads.PUBLISHED["mnist"].maker
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=place)
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *what: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(maker, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(maker, "resources", resources)
        yield place
        server.shutdown()


@pytest.mark.parametrize(
    ("sizes", "mode", "words", "shape"),
    [
        (((28, 28),), "L", (), (1, 28, 28)),
        (((28, 28),), "I;16", ("data.pixel_range=[0,255]",), (1, 28, 28)),
        (((28, 28),), "RGB", (), (3, 28, 28)),
        (((28, 28),), "L", ("data.image_size=32",), (1, 32, 32)),
        (((28, 28),), "L", ("model.name=resnet18",), (3, 28, 28)),
        (((28, 28),), "L", ("model.name=resnet18", "model.weights=DEFAULT"), (3, 224, 224)),
        (((28, 28),), "L", ("model.init_from=mine.pth",), (3, 28, 28)),
        (((28, 28), (28, 30)), "L", (), (1, 224, 224)),
        (((28, 30),), "RGB", (), (3, 224, 224)),
    ],
)
def test_small_images_of_one_size_stay_as_they_are(tmp_path, sizes, mode, words, shape):
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / folder).mkdir(parents=True)
        for index in range(3):
            image = Image.new(mode, sizes[index % len(sizes)], 60 * index)
            image.save(tmp_path / folder / f"{index}.png")
    datasets = opened("data.name=imagefolder", f"data.root={tmp_path}", *words)
    assert (datasets.channels, datasets.image_size, datasets.image_size) == shape
    assert len(datasets.mean) == shape[0]
    assert f" {shape[0]} x {shape[1]} x {shape[2]} (6 " in datasets.notes["images"]
    chosen = [
        key
        for key in ("channels", "image_size")
        if f"data.{key}={shape[key != 'channels']}" not in words
    ]
    assert all(f"data.{key}=" in datasets.notes["images"] for key in chosen)


def test_a_download_appears_whole_and_leaves_nothing_else(mirror, tmp_path):
    (tmp_path / ".mnist-1.tmp").mkdir()  # A killed download leaves this folder.
    datasets = opened("data.name=mnist", f"data.root={tmp_path}")
    assert (len(datasets.train), len(datasets.val), datasets.train.images.shape[1:]) == (
        6,
        2,
        (1, 28, 28),
    )
    assert sorted(os.listdir(tmp_path)) == [".mnist.lock", "MNIST"]
    for file in mirror.iterdir():
        file.unlink()
    assert len(opened("data.name=mnist", f"data.root={tmp_path}").train) == 6


def test_a_failed_download_leaves_nothing_half(mirror, tmp_path):
    (mirror / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(SetupError, match=r"download.*\bMNIST/"):
        opened("data.name=mnist", f"data.root={tmp_path}")
    assert os.listdir(tmp_path) == [".mnist.lock"]


def test_two_at_once_download_once(mirror, tmp_path, monkeypatch):
    calls = []
    plain = downloads._download
    monkeypatch.setattr(
        downloads,
        "_download",
        lambda *what: (calls.append(what), plain(*what))[1],
    )
    # The lock is held by an open file, so threads are kept apart as processes are.
    with ThreadPoolExecutor(2) as ranks:
        actual = list(
            ranks.map(lambda _: opened("data.name=mnist", f"data.root={tmp_path}"), range(2))
        )
    assert [len(each.train) for each in actual] == [6, 6]
    assert len(calls) == 1


def test_mean_and_deviation_of_the_recipe_are_used(folder):
    plain = tiny(folder)
    assert plain.mean == (0.485, 0.456, 0.406) and plain.std == (0.229, 0.224, 0.225)
    message = tiny(folder, "data.mean=[0.1,0.2,0.3]")
    assert message.mean == (0.1, 0.2, 0.3) and message.std == plain.std
    assert tiny(folder, "data.mean=[0.5]", "data.std=[1]").mean == (0.5, 0.5, 0.5)
    gray = tiny(folder, "data.channels=1", "data.mean=[0.5,0.5,0.5]", "data.std=[0.25,0.25,0.25]")
    assert gray.mean == pytest.approx((0.5,))
    assert gray.std == pytest.approx((0.25,))
    assert opened("data.mean=[0.5]", "data.std=[0.25]").std == (0.25,)  # digits
