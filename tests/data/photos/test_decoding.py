"""Decoding: photos of phones stand upright, whatever kind of file they are, and kinds that cannot be read say why."""

import pickle
import re

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from tests.data.photo_folders import read_image
from trainer.data.photos.decoding import from_item, open_encoded

XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
TURNS = {  # how the upright picture has to be turned, and mirrored, so that the tag turns it back
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels, -1),
}


def upright():
    """Four fields of 32 x 48 that look different in each of the eight orientations."""
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24], pixels[:16, 24:], pixels[16:, :24] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    return pixels


def exif(orientation):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def _kinds():
    """Image files of every kind by name, each with how Pillow saves it."""
    y, x = np.mgrid[:90, :120]
    noise = np.random.default_rng(0).integers(-20, 21, (90, 120, 3))
    pixels = np.clip(np.stack([2 * x, 2.5 * y, x + y], -1) + noise, 0, 255).astype(np.uint8)
    image, fade = Image.fromarray(pixels), Image.fromarray((x * 255 // 119).astype(np.uint8))
    gray = image.convert("L")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    indexed = image.convert("P", palette=Image.Palette.ADAPTIVE)
    glass, smoke = image.copy(), gray.copy()
    glass.putalpha(fade)
    smoke.putalpha(fade)
    return {
        "gray.png": (gray, {}),
        "palette.gif": (image, {}),
        "bits.png": (gray.convert("1"), {}),
        "cmyk.jpg": (image.convert("CMYK"), {"quality": 95}),
        "turned.jpg": (image, {"exif": exif(6)}),
        "turned.png": (image, {"exif": exif(6)}),
        "turned.tif": (image, {"exif": exif(6)}),
        "xmp.jpg": (image, {"xmp": XMP, "quality": 95}),
        "xmp.webp": (image, {"xmp": XMP, "lossless": True}),
        "deep.png": (deep, {}),
        "deep.tif": (deep, {}),
        "deep-turned.png": (deep, {"exif": exif(6)}),
        "deep-transparent.png": (deep, {"transparency": 100 * 257}),
        "real.tif": (Image.fromarray((np.asarray(gray) / 255).astype(np.float32)), {}),
        "alpha.png": (glass, {}),
        "alpha-turned.png": (glass, {"exif": exif(6)}),
        "alpha.webp": (glass, {"lossless": True}),
        "gray-alpha.png": (smoke, {}),
        "one-index.png": (indexed, {"transparency": 5}),
        "indices.png": (indexed, {"transparency": bytes(range(256))}),
        "one-gray.png": (gray, {"transparency": 100}),
        "one-colour.png": (Image.fromarray(pixels // 16 * 16), {"transparency": (96, 96, 96)}),
    }


KINDS = _kinds()


def save_kind(folder, name):
    image, options = KINDS[name]
    image.save(folder / name, **options)
    return folder / name


def seen(path):
    """What a viewer with a white page shows of an image of `KINDS`, (height, width, 3), computed here."""
    image = Image.open(path)
    pixels, clear = np.asarray(image).astype(float), image.info.get("transparency")
    if image.mode in ("F", "I;16", "1"):
        shown, alpha = pixels * (255 if image.mode in "F1" else 1 / 257), np.ones(pixels.shape)
        alpha[pixels == clear] = 0
    elif image.mode == "P":
        table = np.reshape(image.getpalette("RGB"), (-1, 3)).astype(float)
        opaque = np.array(list(clear) if isinstance(clear, bytes) else [255 * (n != clear) for n in range(256)])
        shown, alpha = table[np.asarray(image)], opaque[np.asarray(image)] / 255
    elif image.mode in ("LA", "RGBA"):
        shown, alpha = pixels[..., :-1], pixels[..., -1] / 255
    else:
        shown = pixels if image.mode in ("L", "RGB") else np.asarray(image.convert("RGB")).astype(float)
        whole = shown.reshape(*shown.shape[:2], -1)
        alpha = 1.0 - (whole == np.array(-1 if clear is None else clear)).all(-1)
    shown, alpha = np.broadcast_to(shown.reshape(*alpha.shape, -1), (*alpha.shape, 3)), alpha[..., None]
    laid = shown * alpha + 255 * (1 - alpha)
    turned = KINDS[path.name][1].keys() & {"exif", "xmp"} and path.suffix != ".tif"  # which Pillow turns by itself
    return np.rot90(laid, -1) if turned else laid


@pytest.mark.parametrize("name", KINDS)
def test_images_of_every_kind_lie_upright_on_white(tmp_path, name):
    path = save_kind(tmp_path, name)
    found = read_image(path, 3).permute(1, 2, 0).numpy()
    wanted = seen(path)
    assert found.shape == wanted.shape and np.abs(found - wanted).max() <= (8 if name.endswith("jpg") else 1)


def loaded(path):
    with Image.open(path) as image:
        image.load()
    return image


DOORS = {
    "bytes": lambda path, channels: open_encoded(np.fromfile(path, np.uint8), channels).decode(1),
    "pillow": lambda path, channels: from_item(Image.open(path), channels),
    "loaded": lambda path, channels: from_item(loaded(path), channels),
    "pickled": lambda path, channels: from_item(pickle.loads(pickle.dumps(Image.open(path))), channels),
    "turned by the user": lambda path, channels: from_item(ImageOps.exif_transpose(Image.open(path)), channels),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_the_same_through_every_door(tmp_path, door, channels):
    for name in KINDS:
        path = save_kind(tmp_path, name)
        found, wanted = DOORS[door](path, channels).int(), read_image(path, channels).int()
        # Of a JPEG in colour torchvision takes the gray that is stored, and Pillow that of the colours.
        bound = 0.5 if channels == 1 and path.suffix == ".jpg" and door != "bytes" else 0
        assert found.shape == wanted.shape and (found - wanted).abs().float().mean() <= bound, name


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff", "avif"])
@pytest.mark.parametrize("orientation", TURNS)
def test_photos_stand_upright(tmp_path, suffix, orientation):
    path, pixels = tmp_path / f"a.{suffix}", upright()
    Image.fromarray(np.ascontiguousarray(TURNS[orientation](pixels))).save(path, exif=exif(orientation))
    found = read_image(path, 3).permute(1, 2, 0).numpy()
    assert found.shape == pixels.shape and np.abs(found.astype(int) - pixels).mean() < 12
    assert read_image(path, 1).shape == (1, 32, 48)


@pytest.mark.parametrize("ends", [(0, 1), (-0.02, 1.02)])
def test_real_pixels_are_as_bright_as_they_were(tmp_path, ends):
    """Slightly beyond black or white too, as filters leave them that sharpen or enlarge."""
    values = np.tile(np.linspace(*ends, 48, dtype=np.float32), (32, 1))
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "real.tiff")
    found = read_image(tmp_path / "real.tiff", 1)[0].int()
    assert (found - torch.linspace(255 * ends[0], 255 * ends[1], 48).clamp(0, 255).int()).abs().max() <= 1


@pytest.mark.parametrize("ends", [(-1, 1), (0, 255), (0, 1e6)])
def test_real_pixels_of_another_range_are_refused(tmp_path, ends):
    Image.fromarray(np.tile(np.linspace(*ends, 48, dtype=np.float32), (32, 1))).save(tmp_path / "real.tiff")
    says = f"numbers from {ends[0]:g} to {ends[1]:g}: data.pixel_range=[{ends[0]},{ends[1]:.7g}] says"
    with pytest.raises(ValueError, match=re.escape(says)):
        read_image(tmp_path / "real.tiff", 3)
