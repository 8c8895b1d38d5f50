"""Small folders of photos, as people have them."""

import os
import shutil

import numpy as np
from PIL import ExifTags, Image

from trainer.data import open_datasets
from trainer.data.folders.layout import NOTHING_BEFORE
from trainer.data.photos.decoding import open_image
from trainer.recipe import load


def noise(seed=0, size=(40, 30)):
    """Other noise for each seed."""
    return Image.fromarray(
        np.random.default_rng(seed).integers(
            0,
            256,
            (size[1], size[0], 3),
            dtype=np.uint8,
        )
    )


def photo(path, size=(40, 30), seed=0, **options):
    """A file of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed, size).save(path, **options)


def coloured(path, colour, size=(40, 30), seed=0, **options):
    """A plain image, slightly different for each seed: a small model learns its colour in a few
    steps.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 21, (size[1], size[0], 3))
    Image.fromarray(
        np.clip(
            np.array(colour) + noise,
            0,
            255,
        ).astype(np.uint8)
    ).save(path, **options)


def photo_set(
    root,
    classes,
    split=False,
    parts=("train", "val"),
    suffix="jpg",
    size=(40, 30),
):
    """Make class folders of different photos; `classes` maps a name to its number of photos, for
    each split if `split`.
    """
    for part in parts if split else ("",):
        for label, (name, count) in enumerate(classes.items()):
            for number in range(count):
                photo(
                    root / part / name / f"{number}.{suffix}", size, number * len(classes) + label
                )
    return root


def cut(path):
    """Half of the file is lost."""
    os.truncate(path, path.stat().st_size // 2)


def whole(picture):
    """Return all pixels of a picture, upright, as (channels, height, width) uint8."""
    return picture.whole(max(picture.height, picture.width))


def read_image(path, channels, pixel_range=None):
    return whole(open_image(str(path), channels, pixel_range))


def opened(root, *words, before=NOTHING_BEFORE, name="imagefolder"):
    """A data set of photos; not decoded."""
    plain = (f"data.name={name}", f"data.root={root}", "augment.crop=resized")
    return open_datasets(load(None, *plain, *words), before)


def names_of(source):
    return [source.name(index) for index in range(len(source))]


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


def exif(orientation):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def _kinds():
    """Image files of every kind by name, each with how Pillow saves it."""
    y, x = np.mgrid[:90, :120]
    noise = np.random.default_rng(0).integers(-20, 21, (90, 120, 3))
    pixels = np.clip(
        np.stack([2 * x, 2.5 * y, x + y], -1) + noise,
        0,
        255,
    ).astype(np.uint8)
    image = Image.fromarray(pixels)
    fade = Image.fromarray((x * 255 // 119).astype(np.uint8))
    gray = image.convert("L")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    indexed = image.convert("P", palette=Image.Palette.ADAPTIVE)
    glass = image.copy()
    smoke = gray.copy()
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


HEIGHT, WIDTH = 602, 815  # no multiples of a JPEG's blocks, nor of the factors


def scene(height=HEIGHT, width=WIDTH):
    """Something smooth that looks different everywhere and in each orientation."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(9 * x + 5 * y), np.cos(13 * y * x + 2), x + 0.4 * np.sin(20 * y)]
    return np.clip(
        127 + 100 * np.stack(waves, -1),
        0,
        255,
    ).astype(np.uint8)


def saved(path, orientation=1):
    turned = np.ascontiguousarray(TURNS[orientation](scene()))
    Image.fromarray(turned).save(path, exif=exif(orientation), quality=95)
    return str(path)


def write_two_classes(root, coarse, size):
    """Write 24 photos of two classes below `root`, and the same ones for validation.

    Args:
        root: directory to fill, which is returned.
        coarse: (height, width) of random pixels, which are enlarged to a photo.
        size: (height, width) of the photos.
    """
    stream = np.random.default_rng(0)
    for number in range(24):
        folder = root / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = stream.integers(0, 256, (*coarse, 3), dtype=np.uint8)
        photo = Image.fromarray(pixels).resize((size[1], size[0]))
        photo.save(folder / f"{number:02}.png")
    shutil.copytree(root / "train", root / "val")
    return root
