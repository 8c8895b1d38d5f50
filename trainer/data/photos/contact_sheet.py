"""The contact sheet: a picture of some training images of each class as the model sees them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from trainer.data.augment import Auto, Draws, Gallery, private_random_state
from trainer.data.encoded import EncodedPhotos
from trainer.data.photos.photo_reader import Reader
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet
from trainer.recipe import Recipe
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.saving.files import draft_of, put, writing
from trainer.telemetry import gallery

FILE = "contact_sheet.png"
CLASSES, IMAGES = 20, 8  # rows and columns, at most
SECONDS = 3.0  # of reading, after which no further column begins
WIDTH, CELL, LARGEST = 1140, 112, 224  # pixels: of the sheet, and of a photo's side at least and at most
MARGIN, NAMES, TEXT, SMALL = 6, 190, 14, 11


class Photo(NamedTuple):
    """A training image, (H, W, C) uint8, or None if it cannot be read, and its file's name."""

    name: str
    image: Tensor | None


def write(folder: Path, data: Datasets, recipe: Recipe) -> None:
    """Draw it into a run folder without one, of photos with a class each. Raises SetupError, DiskFullError."""
    part = data.train
    if recipe.data.name not in OWN_PHOTOS or data.synthetic or not isinstance(part, EncodedPhotos | ImageSet):
        return
    labels = torch.as_tensor(part.labels)
    if labels.dim() != 1 or labels.is_floating_point() or (folder / FILE).exists():
        return
    sheet = drawn(part, labels.numpy(), data, recipe)
    draft = draft_of(folder / FILE)
    with writing(folder):
        try:
            sheet.save(draft, "PNG")
            put(draft, folder / FILE)
        finally:
            draft.unlink(missing_ok=True)


def drawn(part: EncodedPhotos | ImageSet, labels: Array, data: Datasets, recipe: Recipe) -> Image.Image:
    """A row for each class with its name, and images as they reach the model in the first epoch, over their file names.

    The fewer there are in a row, the larger they are.
    """
    count = len(data.classes)
    classes = sorted(set(np.linspace(0, count - 1, min(CLASSES, count)).round().astype(int).tolist()))
    members = [np.flatnonzero(labels == label) for label in classes]
    columns = list(_columns(part, members, data, recipe))
    side = min(LARGEST, max(CELL, (WIDTH - NAMES) // max(1, len(columns)) - MARGIN))
    width, height = side + MARGIN, side + SMALL + 2 * MARGIN
    shown = f"{len(classes)} of {len(data.classes)} classes" if len(classes) < len(data.classes) else "training images"
    title = f"{shown} as the model sees them, {data.channels} x {data.image_size} x {data.image_size}"
    title += ", augmented; before mixup, cutmix and erasing"
    across = max(NAMES + len(columns) * width, gallery.text_width(title, TEXT) + MARGIN)
    canvas = Image.new("RGB", (across + MARGIN, 2 * TEXT + len(classes) * height + MARGIN), "white")
    paper = ImageDraw.Draw(canvas)
    _write(paper, (MARGIN, MARGIN), title)
    for row, (label, samples) in enumerate(zip(classes, members, strict=True)):
        below = 2 * TEXT + row * height + side // 3
        _write(paper, (MARGIN, below), gallery.fit(data.classes[label], NAMES - 2 * MARGIN, size=TEXT))
        _write(paper, (MARGIN, below + TEXT + 4), f"{len(samples):,} images")
    for column, photos in enumerate(columns):
        for row, photo in photos.items():
            left, top = NAMES + column * width, 2 * TEXT + row * height
            if photo.image is None:
                _write(paper, (left, top + side // 3), "cannot be read", "red")
            else:
                canvas.paste(_cell(photo.image, side), (left, top))
            _write(paper, (left, top + side + 1), gallery.fit_end(photo.name, side, SMALL), "gray", SMALL)
    return canvas


def _write(paper: ImageDraw.ImageDraw, at: tuple[int, int], words: str, ink: str = "black", size: int = TEXT) -> None:
    written, font = gallery.font_for(words, size)
    paper.text(at, written, ink, font)


def _columns(
    part: EncodedPhotos | ImageSet, members: list[Array], data: Datasets, recipe: Recipe
) -> Iterator[dict[int, Photo]]:
    """Columns of one image of each class, by its row, until there are enough or time is up."""
    start = time.monotonic()
    for column in range(IMAGES):
        rows = [row for row, samples in enumerate(members) if column < len(samples)]
        if not rows or (column and time.monotonic() - start > SECONDS):
            return
        spread = [members[row][column * len(members[row]) // min(IMAGES, len(members[row]))] for row in rows]
        images = _seen(part, np.array(spread), data, recipe)
        names = ["" if part.where is None else os.path.basename(part.where(index)) for index in spread]
        yield dict(zip(rows, map(Photo, names, images), strict=True))


def _seen(part: EncodedPhotos | ImageSet, index: Array, data: Datasets, recipe: Recipe) -> list[Tensor | None]:
    """Training images of the first epoch, (H, W, C) uint8 each; None for those that cannot be read."""
    augment, seed = recipe.augment, recipe.seed
    if isinstance(part, ImageSet):
        cpu = torch.device("cpu")
        gallery = Gallery(part.images[index % len(part.images)], augment.crop_padding * (augment.crop == "pad"), cpu)
        draws = Draws.of(augment, seed, 0, index, gallery.width, cpu)
        images = gallery.take(torch.arange(len(index)), draws)
        with private_random_state():
            return list(Auto(augment, seed, 0, index).batch(images))
    images = torch.empty(len(index), 1, data.image_size, data.image_size, data.channels, dtype=torch.uint8)
    labels = torch.empty(len(index), 1, dtype=torch.int64)
    reader = Reader(part, images, labels, augment, seed, skip=False)
    counts = [reader.fill(slot, 0, index[slot : slot + 1]).rows for slot in range(len(index))]
    return [image[0] if count else None for image, count in zip(images, counts, strict=True)]


def _cell(image: Tensor, side: int) -> Image.Image:
    """Resized to a cell; small images without interpolation, so that their pixels are seen."""
    pixels = image.numpy()
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
    small = picture.width < side / 2
    return picture.resize((side, side), Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR)
