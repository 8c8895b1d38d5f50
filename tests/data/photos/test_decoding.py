"""Decoding of photos: any kind of file is turned upright, and files that cannot be read have a
reason.
"""

import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.data.photo_folders import KINDS, TURNS, exif, read_image, save_kind
from trainer.data.photos.decoding import decode_item, open_encoded


def upright():
    """Four fields of 32 x 48 that look different in each of the eight orientations."""
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24], pixels[:16, 24:], pixels[16:, :24] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    return pixels


def seen(path):
    """Compute the pixels (height, width, 3) that a viewer with a white page shows for an image of
    `KINDS`.
    """
    image = Image.open(path)
    pixels = np.asarray(image).astype(float)
    clear = image.info.get("transparency")
    if image.mode in ("F", "I;16", "1"):
        shown = pixels * (255 if image.mode in "F1" else 1 / 257)
        alpha = np.ones(pixels.shape)
        alpha[pixels == clear] = 0
    elif image.mode == "P":
        table = np.reshape(image.getpalette("RGB"), (-1, 3)).astype(float)
        opaque = np.array(
            list(clear) if isinstance(clear, bytes) else [255 * (n != clear) for n in range(256)]
        )
        shown = table[np.asarray(image)]
        alpha = opaque[np.asarray(image)] / 255
    elif image.mode in ("LA", "RGBA"):
        shown = pixels[..., :-1]
        alpha = pixels[..., -1] / 255
    else:
        shown = (
            pixels if image.mode in ("L", "RGB") else np.asarray(image.convert("RGB")).astype(float)
        )
        whole = shown.reshape(*shown.shape[:2], -1)
        alpha = 1.0 - (whole == np.array(-1 if clear is None else clear)).all(-1)
    shown = np.broadcast_to(shown.reshape(*alpha.shape, -1), (*alpha.shape, 3))
    alpha = alpha[..., None]
    laid = shown * alpha + 255 * (1 - alpha)
    # Pillow rotates these by itself.
    turned = KINDS[path.name][1].keys() & {"exif", "xmp"} and path.suffix != ".tif"
    return np.rot90(laid, -1) if turned else laid


@pytest.mark.parametrize("name", KINDS)
def test_images_of_every_kind_lie_upright_on_white(tmp_path, name):
    path = save_kind(tmp_path, name)
    array = read_image(path, 3).permute(1, 2, 0).numpy()
    expected = seen(path)
    assert array.shape == expected.shape
    assert np.abs(array - expected).max() <= (8 if name.endswith("jpg") else 1)


def loaded(path):
    with Image.open(path) as image:
        image.load()
    return image


DOORS = {
    "bytes": lambda path, channels: open_encoded(np.fromfile(path, np.uint8), channels).decode(1),
    "pillow": lambda path, channels: decode_item(Image.open(path), channels),
    "loaded": lambda path, channels: decode_item(loaded(path), channels),
    "pickled": lambda path, channels: decode_item(
        pickle.loads(pickle.dumps(Image.open(path))), channels
    ),
    "turned by the user": lambda path, channels: decode_item(
        ImageOps.exif_transpose(Image.open(path)), channels
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_the_same_through_every_entry_point(tmp_path, door, channels):
    for name in KINDS:
        path = save_kind(tmp_path, name)
        actual = DOORS[door](path, channels).int()
        expected = read_image(path, channels).int()
        # torchvision takes the gray that a color JPEG stores, and Pillow computes gray from the
        # colors.
        bound = 0.5 if channels == 1 and path.suffix == ".jpg" and door != "bytes" else 0
        assert (
            actual.shape == expected.shape and (actual - expected).abs().float().mean() <= bound
        ), name


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff", "avif"])
@pytest.mark.parametrize("orientation", TURNS)
def test_photos_stand_upright(tmp_path, suffix, orientation):
    path = tmp_path / f"a.{suffix}"
    pixels = upright()
    Image.fromarray(np.ascontiguousarray(TURNS[orientation](pixels))).save(
        path, exif=exif(orientation)
    )
    array = read_image(path, 3).permute(1, 2, 0).numpy()
    assert array.shape == pixels.shape
    assert np.abs(array.astype(int) - pixels).mean() < 12
    assert read_image(path, 1).shape == (1, 32, 48)


@pytest.mark.parametrize("ends", [(0, 1), (-0.02, 1.02)])
def test_real_pixels_are_as_bright_as_they_were(tmp_path, ends):
    """Slightly beyond black or white too, as filters leave them that sharpen or enlarge."""
    values = np.tile(np.linspace(*ends, 48, dtype=np.float32), (32, 1))
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "real.tiff")
    actual = read_image(tmp_path / "real.tiff", 1)[0].int()
    assert (
        actual
        - torch.linspace(
            255 * ends[0],
            255 * ends[1],
            48,
        )
        .clamp(0, 255)
        .int()
    ).abs().max() <= 1


@pytest.mark.parametrize("ends", [(-1, 1), (0, 255), (0, 1e6)])
def test_real_pixels_of_another_range_are_refused(tmp_path, ends):
    Image.fromarray(np.tile(np.linspace(*ends, 48, dtype=np.float32), (32, 1))).save(
        tmp_path / "real.tiff"
    )
    says = (
        f"numbers from {ends[0]:g} to {ends[1]:g}: data.pixel_range=[{ends[0]},{ends[1]:.7g}] says"
    )
    with pytest.raises(ValueError, match=re.escape(says)):
        read_image(tmp_path / "real.tiff", 3)
