"""Small folders of photos, as people have them."""

import os

import numpy as np
from PIL import Image

from trainer.data import open_datasets
from trainer.data.folders.layout import NOTHING_BEFORE
from trainer.data.photos.decoding import open_image
from trainer.recipe import load


def noise(seed=0, size=(40, 30)):
    """Other noise for each seed."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def photo(path, size=(40, 30), seed=0, **options):
    """A file of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed, size).save(path, **options)


def coloured(path, colour, size=(40, 30), seed=0, **options):
    """A plain image, slightly different for each seed: a small model learns its colour in a few steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 21, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(path, **options)


def photo_set(root, classes, split=False, parts=("train", "val"), suffix="jpg", size=(40, 30)):
    """Class folders with so many photos each, no two alike, in `parts` where it is split."""
    for part in parts if split else ("",):
        for label, (name, count) in enumerate(classes.items()):
            for number in range(count):
                photo(root / part / name / f"{number}.{suffix}", size, number * len(classes) + label)
    return root


def cut(path):
    """Half of the file is lost."""
    os.truncate(path, path.stat().st_size // 2)


def whole(picture):
    """All pixels of it, upright, as (channels, height, width) uint8."""
    return picture.whole(max(picture.height, picture.width))


def read_image(path, channels, pixel_range=None):
    return whole(open_image(str(path), channels, pixel_range))


def opened(root, *words, before=NOTHING_BEFORE, name="imagefolder"):
    """A data set of photos; not decoded."""
    plain = (f"data.name={name}", f"data.root={root}", "augment.crop=resized")
    return open_datasets(load(None, *plain, *words), before)


def names_of(source):
    return [source.name(index) for index in range(len(source))]
