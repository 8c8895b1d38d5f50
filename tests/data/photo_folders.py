"""Small folders of photos, as people have them."""

import numpy as np
from PIL import Image

from trainer.data import open_datasets
from trainer.data.folders.layout import NOTHING_BEFORE
from trainer.data.photos.decoding import open_image
from trainer.recipe import load


def photo(path, size=(40, 30), seed=0, **options):
    """An image of noise; other noise for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)


def coloured(path, colour, size=(40, 30), seed=0, **options):
    """A plain image, slightly different for each seed: a small model learns its colour in a few steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 21, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(path, **options)


def photo_set(root, classes, split=False, parts=("train", "val"), suffix="jpg"):
    """Class folders with so many photos each, in `parts` where it is split."""
    for part in parts if split else ("",):
        for label, (name, count) in enumerate(classes.items()):
            for number in range(count):
                photo(root / part / name / f"{number}.{suffix}", seed=label)
    return root


def read_image(path, channels):
    """A whole image file, upright, as (channels, height, width) uint8."""
    picture = open_image(path, channels)
    return picture.whole(max(picture.height, picture.width))


def opened(root, *words, before=NOTHING_BEFORE):
    """A data set of photos; not decoded."""
    plain = ("data.name=imagefolder", f"data.root={root}", "augment.crop=resized")
    return open_datasets(load(None, *plain, *words), before)
