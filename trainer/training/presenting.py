"""A run in TensorBoard beside its curves: the images as its model sees them, and its mistakes.

Drawn once at the start and once at the end, on rank 0; what other ranks have comes to it there. Pictures are drawn in
milliseconds, so that each run can have them; words on them are in matplotlib's font, and cut to the room that there is.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from trainer.data import Batch, as_pictures
from trainer.errors import TrainerError, text_of
from trainer.saving.files import csv_text, portable
from trainer.telemetry import events
from trainer.telemetry.tracking import NullTracker
from trainer.training.evaluation import WORST, Mistakes
from trainer.training.run import Run

SEEN, PIXELS = 32, 2**22  # samples of the first batch that are shown, and their pixels: of large images fewer
TILE, LARGEST = 72, 128  # pixels of an image's side: tiny ones are enlarged to the first, large ones made smaller
ROOM, SHEET, COLUMNS = 180, 1200, 8  # pixels that a name may take beside a table, and a row of so many images at most
GAP, FONT = 8, 12
INK, GROUND, RIGHT, WRONG = "#222222", "#ffffff", (0, 114, 178), (213, 94, 0)  # Okabe and Ito's blue and vermilion
WRITTEN = 24  # classes up to which the cells of a matrix hold numbers and its rows names
Numbers = npt.NDArray[Any]


def first_batch(run: Run, batch: Batch) -> None:
    """The first batch as the model sees it, augmented, with its labels where this rank has them.

    Only the first step waits for it, which counts for no speed.
    """
    if not run.tracker.shows:
        return
    with dispensable(run.tracker):
        some = min(SEEN, max(1, PIXELS // max(1, batch.inputs.shape[2:].numel())))
        images = as_pictures(run.datasets, batch.inputs[:some])
        if images is not None and len(images):
            captions = [named(run, target) for target in batch.targets[:some].cpu()]
            if (shown := images.shape[-1]) < batch.inputs.shape[1]:
                run.tracker.say(f"  pictures show {shown} of the {batch.inputs.shape[1]} channels, the first")
            _picture(run, "batch as the model sees it", grid(images.numpy(), captions), 0)


def mistakes(run: Run, collected: Mistakes) -> None:
    """Of the last evaluation worst.csv, and which class is taken for which. Collective."""
    where = getattr(run.datasets.val, "where", None) or f"{run.datasets.name}/val/{{}}".format
    rows = [
        (
            " ".join(portable(str(where(mistake.place))).splitlines()),  # each takes one line
            *(name(run, mistake.target), name(run, mistake.predicted)),
            *(f"{share:.4g}" for share in (mistake.label_probability, mistake.predicted_probability)),
        )
        for mistake in collected.gathered(run.world)
    ]
    if run.tracker.path is not None and not run.datasets.synthetic and rows:
        head = ("path", "label", "predicted", "label_probability", "predicted_probability")
        run.tracker.replace(WORST, csv_text([head, *rows]))
    if run.tracker.shows and collected.pairs is not None:
        with dispensable(run.tracker):
            names = [name(run, place) for place in range(len(collected.pairs))]
            matrix = confusion(collected.pairs.numpy(), names)
            _picture(run, "confusion matrix", matrix, run.state.position.step)


@contextmanager
def dispensable(tracker: NullTracker) -> Iterator[None]:
    """A picture that cannot be drawn ends no run."""
    try:
        yield
    except TrainerError:  # of the folder that it is written to
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"
        tracker.say(f"  a picture is left out: {reason}")


def _picture(run: Run, tag: str, picture: EncodedImage, step: int) -> None:
    run.tracker.show(events.image(tag, picture.encoded, picture.size), step)


def name(run: Run, place: int) -> str:
    """Of a class; a model may have more outputs than there are names."""
    names = run.datasets.classes
    return names[place] if 0 <= place < len(names) else str(place)


def named(run: Run, target: Tensor) -> str:
    """One sample's target in words; empty where words cannot say it."""
    if target.dim() == 0 and not target.is_floating_point():
        return name(run, int(target))
    if target.dim() > 1 or not target.is_floating_point():
        return ""
    if run.task.reads == "values" or target.dim() == 0:
        return ", ".join(f"{value:.4g}" for value in target.flatten().tolist()[:3])
    shares = sorted(((share, place) for place, share in enumerate(target.tolist()) if share > 0), reverse=True)
    return ", ".join(f"{name(run, place)}{'' if share == 1 else f' {share:.0%}'}" for share, place in shares[:3])


# --- pictures made of images ------------------------------------------------------------------------------------------


def writable(words: str) -> str:
    """Words as they can be written: a letter that the font lacks becomes its number (\u732b)."""
    # DejaVu has the letters of Europe and the Near East, and signs.
    has = (n.isprintable() and (ord(n) < 0x700 or 0x1E00 <= ord(n) < 0x2C00) for n in words)
    return "".join(n if there else n.encode("unicode_escape").decode() for n, there in zip(words, has, strict=True))


@cache
def _font() -> Any:
    """Matplotlib's; importing matplotlib for it would take long."""
    package = find_spec("matplotlib")
    assert package is not None and package.origin is not None
    return ImageFont.truetype(str(Path(package.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf"), FONT)


def text_width(words: str) -> int:
    """Of words in pixels, as they are written."""
    return round(float(_font().getlength(writable(words))))


def fit(words: str, room: float) -> str:
    """Cut words so that they take so many pixels."""
    if text_width(words) <= room:
        return words
    while words and text_width(words + "…") > room:
        words = words[:-1]
    return words + "…"


@dataclass(frozen=True)
class EncodedImage:
    """An encoded picture: PNG, or JPEG where it is made of photos."""

    encoded: bytes
    size: tuple[int, int]  # width, height


def grid(images: Numbers, captions: Sequence[str]) -> EncodedImage:
    """Images (n, H, W, C) uint8, of 1 or 3 channels, in rows, each over its words; small ones near TILE."""
    height, width = images.shape[1:3]
    scale = min(LARGEST / max(height, width), max(1, round(TILE / max(height, width))))
    tile = (max(1, round(width * scale)), max(1, round(height * scale)))
    columns = min(COLUMNS, len(images))
    room = GAP + max([TILE, tile[0], *(min(SHEET // columns - GAP, text_width(words)) for words in captions)])
    below = tile[1] + GAP + (FONT + 3) * any(captions)
    sheet = Image.new("RGB", (columns * room + GAP, -(-len(images) // columns) * below + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    for n, image in enumerate(images):
        x, y = GAP + n % columns * room, GAP + n // columns * below
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")
        sheet.paste(picture.resize(tile, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR), (x, y))
        if captions:
            _write(draw, (x, y + tile[1] + 2), fit(captions[n], room - GAP))
    return _encoded(sheet, photos=scale < 1)


def confusion(matrix: Numbers, names: Sequence[str]) -> EncodedImage:
    """Counts (actual, predicted): each row shows what the samples of a class are predicted as, as shares of the row."""
    count = len(matrix)
    written = count <= WRITTEN
    cell = 34 if written else max(2, 640 // count)
    left = 2 * GAP + min(ROOM, max(map(text_width, names), default=0)) * written
    top = 2 * (FONT + GAP)
    title = "rows: actual class; columns: predicted, in the same order"
    size = (max(text_width(title) + GAP, left + count * cell) + GAP, top + count * cell + GAP)
    sheet = Image.new("RGB", size, GROUND)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (GAP, GAP), title)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    for row in range(count):
        if written:
            _write(draw, (left - GAP, top + row * cell + cell / 2), fit(names[row], ROOM), "rm")
        for column in map(int, np.flatnonzero(matrix[row])):
            share, x, y = float(shares[row, column]), left + column * cell, top + row * cell
            strength = share if row == column else share**0.5
            colour = [round(245 + (part - 245) * strength) for part in (RIGHT if row == column else WRONG)]
            draw.rectangle((x, y, x + cell - 1 - written, y + cell - 1 - written), fill=tuple(colour))
            if written:
                ink = GROUND if strength > 0.5 else INK
                _write(draw, (x + cell / 2, y + cell / 2), f"{int(matrix[row, column])}", "mm", ink)
    return _encoded(sheet)


def _write(draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str, anchor: str = "la", ink: str = INK) -> None:
    draw.text(at, writable(words), fill=ink, font=_font(), anchor=anchor)


def _encoded(sheet: Image.Image, photos: bool = False) -> EncodedImage:
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG" if photos else "PNG", quality=80)
    return EncodedImage(buffer.getvalue(), sheet.size)
