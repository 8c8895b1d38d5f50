"""Pixels of more than 8 bits, or with a sign: one decision for a whole data set, held against what
NumPy has.
"""

import math
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.data.photo_folders import opened, read_image
from trainer.errors import SetupError

SAMPLE_FORMAT = 339
PHOTOMETRIC = 262


def values(low, high, dtype, seed=0, shape=(32, 32)):
    whole = np.linspace(low, high, math.prod(shape)).astype(dtype)
    return np.random.default_rng(seed).permutation(whole).reshape(*shape)


def tiff(path, pixels, order="<", **tags):
    """An uncompressed TIFF of one channel or three, of any type of number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = pixels.astype(pixels.dtype.newbyteorder(order))
    height, width, *channels = pixels.shape
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    facts = {
        256: width,
        257: height,
        258: 8 * pixels.dtype.itemsize,
        259: 1,
        PHOTOMETRIC: 2 if channels else 1,
    }
    facts |= {
        277: channels[0] if channels else 1,
        278: height,
        279: pixels.nbytes,
        SAMPLE_FORMAT: kind,
    }
    facts |= {int(key.removeprefix("tag")): value for key, value in tags.items()}
    count = len(facts) + 1
    facts[273] = 8 + 2 + 12 * count + 4
    head = struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, 8, count)
    rows = (
        struct.pack(
            order + "HHII",
            tag,
            4,
            1,
            value,
        )
        for tag, value in sorted(facts.items())
    )
    path.write_bytes(head + b"".join(rows) + bytes(4) + pixels.tobytes())
    return path


def png16(path, pixels):
    """A PNG of 16 bits: gray, gray and alpha, colour, or colour and alpha."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width, *channels = pixels.shape
    colour = {
        0: 0,
        1: 0,
        2: 4,
        3: 2,
        4: 6,
    }[channels[0] if channels else 0]

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks))
    return path


def gray(path, pixel_range=None):
    """The one channel of an image file."""
    return read_image(path, 1, pixel_range)[0].numpy()


def wanted(pixels, black, white):
    """Compute the expected pixels."""
    return np.clip(
        np.rint((pixels.astype(float) - black) * 255 / (white - black)),
        0,
        255,
    ).astype(np.uint8)


@pytest.mark.parametrize(
    "write", [tiff, lambda path, pixels: png16(path.with_suffix(".png"), pixels)]
)
def test_sixteen_bits_are_as_bright_as_their_file_says_however_dark_the_image_is(tmp_path, write):
    for high in (65535, 4095, 200):
        pixels = values(0, high, np.uint16)
        assert np.array_equal(gray(write(tmp_path / f"{high}.tif", pixels)), pixels >> 8)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("dtype", "black", "white"),
    [(np.uint16, 0, 4095), (np.uint16, -100, 50_000), (np.float32, -1, 1)],
)
def test_a_given_range_is_black_and_white(tmp_path, dtype, black, white, order):
    pixels = values(max(0, black) if dtype == np.uint16 else black, white, dtype)
    path = tiff(tmp_path / "a.tif", pixels, order)
    assert np.array_equal(gray(path, (black, white)), wanted(pixels, black, white))
    # Values above white become white.
    assert gray(path, (black, (black + white) / 2)).max() == 255


@pytest.mark.parametrize(
    ("dtype", "ends", "tags"),
    [
        (np.int16, (-1000, 3000), {}),
        (np.int8, (-100, 100), {}),
        (np.uint32, (0, 4095), {}),
        (np.int32, (0, 100000), {}),
        (np.uint16, (0, 65535), {"tag262": 0}),  # 0 is white
        (np.uint16, (0, 4095), {"tag258": 12}),
    ],
)
def test_numbers_of_other_kinds_are_refused(tmp_path, dtype, ends, tags):
    path = tiff(tmp_path / "a.tif", values(*ends, dtype), **tags)
    for pixel_range in (None, ends):
        with pytest.raises(ValueError, match=r"\bsigned\b.*\bPNG\b.*\b8 or 16\b"):
            gray(path, pixel_range)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_in_color_with_16_bits_65535_is_white(tmp_path, channels):
    pixels = values(0, 65535, np.uint16, shape=(32, 32, channels))
    path = png16(tmp_path / "a.png", pixels)
    array = read_image(path, 3).numpy()
    high = np.broadcast_to((pixels >> 8)[..., : 1 if channels == 2 else 3], (32, 32, 3)).transpose(
        2, 0, 1
    )
    alpha = 1.0 if channels == 3 else (pixels[..., -1] >> 8) / 255
    assert np.abs(array - (alpha * high + 255 * (1 - alpha))).max() <= 0.5
    assert np.array_equal(gray(path, (0, 65535)), gray(path))
    with pytest.raises(ValueError, match=r"\b65,535 .*data\.pixel_range\b"):
        gray(path, (0, 4095))
    if channels == 3:
        assert np.array_equal(read_image(tiff(tmp_path / "a.tif", pixels), 3).numpy(), array)


def photo_set(root, pixels):
    for label, name in enumerate("ab"):
        for number in range(5):
            tiff(root / name / f"{number}.tif", pixels(10 * label + number))
    return root


UNCLEAR = {  # Messages for each.
    r"16-bit numbers.* images .* from 0 to 4000 of 65535: .*=\[0,4095\] ": lambda n: values(
        0, 4000, np.uint16, n
    ),
    r"to 255 of 65535: data.pixel_range=\[0,255\]": lambda n: values(0, 255, np.uint16, n),
    r"real numbers.* to (\S+): data.pixel_range=\[0,\1\]": lambda n: values(
        0, 0.1 * n, np.float32, n
    ),
    r"real numbers.* to 0.14 of 1: ": lambda n: values(0, 0.01 * n, np.float32, n),
    r"to 4095 of 65535: save them with 8 bits": lambda n: values(
        0, 4000, np.uint16, n, (32, 32, 3)
    ),
}


@pytest.mark.parametrize("says", UNCLEAR)
def test_a_set_whose_white_nobody_can_tell_is_refused_as_a_whole(tmp_path, says):
    photo_set(tmp_path, UNCLEAR[says])
    with pytest.raises(SetupError, match=says):
        opened(tmp_path)


def test_a_dark_image_among_bright_ones_is_no_reason_to_ask(tmp_path):
    photo_set(
        tmp_path,
        lambda n: values(
            0,
            60000 if n == 3 else 100,
            np.uint16,
            n,
        ),
    )
    data = opened(tmp_path)
    assert re.search(r"\b16-bit\b.*\b0 .*\b65535\b", data.notes["pixels"])
    actual = {
        data.train.where(n): data.train.read(n, 1)[0].max().item() for n in range(len(data.train))
    }
    assert sorted(actual.values())[-1] in (0, 234)
    assert set(actual.values()) <= {0, 234}


def test_a_range_without_effect_and_further_frames_are_reported(tmp_path):
    photo_set(tmp_path, lambda n: values(0, 255, np.uint8, n))
    frames = [Image.fromarray(values(0, 255, np.uint8, n)) for n in range(3)]
    for number in range(5):
        frames[0].save(
            tmp_path / "a" / f"{number}.gif",
            save_all=True,
            append_images=frames[1:],
        )
    notes = opened(tmp_path, "data.pixel_range=[0,4095]").notes
    assert "data.pixel_range" in notes["unused"]
    assert re.match(r"4 .*\bframes\b", notes["frames"])
