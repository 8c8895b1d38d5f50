"""JPEG files: the pixels are the same with every decoder and encoder, and torchcodec is loaded only
to read one.
"""

import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torchvision.io
from PIL import Image, ImageOps

from tests.data.photo_folders import XMP, exif
from trainer.data.photos import jpeg
from trainer.data.photos.decoding import open_encoded


def gone(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)


def broken(monkeypatch, folder):
    """Simulate a package that was built for another version of CUDA."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    (folder / "torchcodec").mkdir()
    (folder / "torchcodec" / "__init__.py").write_text(
        "raise OSError('no libtorchcodec_image.so\\nfor this')"
    )
    monkeypatch.syspath_prepend(folder)


def nothing_but_pillow(monkeypatch, folder):
    gone(monkeypatch, folder)
    monkeypatch.delattr(torchvision.io, "decode_jpeg")


def as_installed(monkeypatch, folder):
    pytest.importorskip("torchcodec", reason="pip install torchcodec")


WAYS = {  # Decoders whose functions are used, with the messages.
    as_installed: ("torchcodec", ""),
    gone: ("torchvision", "pip install --upgrade torchcodec"),
    broken: ("torchvision", "no libtorchcodec_image.so"),
    nothing_but_pillow: ("Pillow", "pip install --upgrade torchcodec"),
}


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request, monkeypatch, tmp_path):
    """Return the name of the decoder in this test."""
    jpeg.get_codec.cache_clear()
    request.param(monkeypatch, tmp_path)
    name, says = WAYS[request.param]
    assert jpeg.get_codec().name == name
    assert says in jpeg.get_codec().instead
    assert "\n" not in jpeg.get_codec().instead
    yield name
    jpeg.get_codec.cache_clear()


def photo(mode="RGB", size=(120, 90)):
    """Smooth, with some noise: different in every corner."""
    x, y = np.meshgrid(np.linspace(0, 200, size[0]), np.linspace(0, 120, size[1]))
    noise = np.random.default_rng(0).integers(0, 30, (size[1], size[0], 3))
    return Image.fromarray((np.stack([x, y, (x + y) / 2], -1) + noise).astype(np.uint8)).convert(
        mode
    )


def saved(mode="RGB", size=(120, 90), **options):
    file = io.BytesIO()
    photo(mode, size).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def shown(data):
    """Upright, as Pillow shows it, (H, W, 3)."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


FILES = {
    "plain": saved(),
    "gray": saved("L"),
    "cmyk": saved("CMYK"),
    "progressive": saved(progressive=True),
    "whole chroma": saved(subsampling=0),
    "odd": saved(size=(61, 33)),
    **{f"turned {number}": saved(exif=exif(number)) for number in range(1, 9)},
    "turned 9": saved(exif=exif(9)),
    "XMP": saved(xmp=XMP),
    "EXIF of 3, and XMP of 6": saved(exif=exif(3), xmp=XMP),
}


@pytest.mark.parametrize("name", FILES)
def test_a_photo_stands_as_pillow_shows_it(way, name):
    data = np.frombuffer(bytearray(FILES[name]), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        picture = open_encoded(data, 3)
        actual = picture.decode(1).permute(1, 2, 0)
        expected = shown(FILES[name])
    assert data.tobytes() == FILES[name]
    assert (picture.height, picture.width) == expected.shape[:2]
    assert np.array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_file_is_that_of_torchvision(mode):
    image = torch.from_numpy(np.array(photo(mode)).reshape(90, 120, -1)).permute(2, 0, 1)
    with warnings.catch_warnings(action="ignore"):
        expected = torchvision.io.encode_jpeg(image.contiguous(), 90)
    actual = jpeg.encode_jpeg(image, 90)
    pixels = [
        np.asarray(Image.open(io.BytesIO(data.numpy().tobytes()))) for data in (actual, expected)
    ]
    assert np.array_equal(*pixels)


@pytest.mark.parametrize("length", [2, 300, 2000, -200])
def test_a_photo_that_was_cut_says_the_same_whoever_decodes(way, length):
    data = np.frombuffer(bytearray(FILES["turned 6"][:length]), np.uint8)
    with pytest.raises((OSError, SyntaxError, ValueError)) as caught:
        open_encoded(data, 3).decode(1)
    assert "truncated" in str(caught.value) or length < 1000
    assert "decode" not in str(caught.value)


@pytest.mark.full("starts from nothing")
def test_the_decoder_is_not_imported_before_a_photo_is_decoded():
    program = "import sys, trainer.data.photos.photo_reader, trainer.data.cache.stored as stored\n"
    program += "assert 'torchcodec' not in sys.modules and stored.jpeg_pixels"
    subprocess.run([sys.executable, "-c", program], check=True)
