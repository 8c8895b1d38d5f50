"""Pictures made of images, and tables of classes: small, and drawn in milliseconds, so that each run can have them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

TILE, LARGEST = 72, 128  # pixels of an image's side: tiny ones are enlarged to the first, large ones made smaller
GAP, FONT = 8, 12
INK, GROUND, RIGHT, WRONG = "#222222", "#ffffff", (0, 114, 178), (213, 94, 0)  # Okabe and Ito's blue and vermilion
WRITTEN = 24  # classes up to which the cells of a matrix hold numbers and its sides names
Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class EncodedImage:
    """An encoded picture: PNG, or JPEG where it is made of photos."""

    encoded: bytes
    size: tuple[int, int]  # width, height


def grid(images: Numbers, captions: Sequence[Sequence[str]], columns: int = 8) -> EncodedImage:
    """Images (n, H, W, C) uint8, of 1 or 3 channels, in rows, each over its lines of words."""
    height, width = images.shape[1:3]
    scale = min(LARGEST / max(height, width), max(1, round(TILE / max(height, width))))
    tile = (max(1, round(width * scale)), max(1, round(height * scale)))
    columns = min(columns, len(images))
    lines = max((len(caption) for caption in captions), default=0)
    room = max([TILE, tile[0], *(min(150, _width(line)) for caption in captions for line in caption)]) + GAP
    below = tile[1] + GAP + lines * (FONT + 3)
    sheet = Image.new("RGB", (columns * room + GAP, -(-len(images) // columns) * below + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    for n, image in enumerate(images):
        x, y = GAP + n % columns * room, GAP + n // columns * below
        one = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")
        sheet.paste(one.resize(tile, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR), (x, y))
        for row, line in enumerate(captions[n] if captions else ()):
            draw.text((x, y + tile[1] + 2 + row * (FONT + 3)), _fit(line, room - GAP), fill=INK, font=_font())
    return _encoded(sheet, photos=scale < 1)


def confusion(matrix: Numbers, names: Sequence[str]) -> EncodedImage:
    """Counts (actual, predicted): a row shows what the samples of a class are taken for, as shares of the row."""
    count = len(matrix)
    written = count <= WRITTEN
    cell = 34 if written else max(2, 640 // count)
    left = (max(map(_width, names), default=0) if written else 0) + 2 * GAP + FONT
    left = min(left, 180)
    top = 2 * (FONT + GAP)
    sheet = Image.new(
        "RGB", (max(260, left + count * cell + GAP), top + count * cell + GAP + (FONT if written else 0)), GROUND
    )
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), "rows: what it is; columns: what is said", fill=INK, font=_font())
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    for row in range(count):
        for column in np.flatnonzero(matrix[row]) if not written else range(count):
            share, x, y = float(shares[row, column]), left + int(column) * cell, top + row * cell
            colour = _mixed(RIGHT if row == column else WRONG, share if row == column else share**0.5)
            draw.rectangle((x, y, x + cell - 1 - written, y + cell - 1 - written), fill=colour)
            if written and matrix[row, column]:
                words = f"{int(matrix[row, column])}"
                ink = GROUND if share > 0.5 or (row != column and share > 0.25) else INK
                draw.text((x + cell / 2, y + cell / 2), words, fill=ink, font=_font(), anchor="mm")
        if written:
            draw.text((left - GAP, top + row * cell + cell / 2), _fit(names[row], left - 2 * GAP), fill=INK,
                      font=_font(), anchor="rm")  # fmt: skip
            draw.text((left + row * cell + cell / 2, top + count * cell + GAP), _fit(names[row], cell), fill=INK,
                      font=_font(), anchor="mm")  # fmt: skip
    return _encoded(sheet)


def class_bars(shares: Sequence[float], counts: Sequence[int], names: Sequence[str], title: str) -> EncodedImage:
    """A bar a class, the worst first, with its percentage and number of samples; at most WRITTEN of them."""
    order = sorted(range(len(shares)), key=lambda n: shares[n])[:WRITTEN]
    left = min(180, max(map(_width, (names[n] for n in order)), default=0) + 2 * GAP)
    length, step, top = 360, FONT + 9, 2 * (FONT + GAP)
    sheet = Image.new("RGB", (left + length + 170, top + len(order) * step + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    more = f"; the {len(order)} worst of {len(shares)} classes" if len(order) < len(shares) else ""
    draw.text((GAP, GAP), f"{title}{more}", fill=INK, font=_font())
    for row, n in enumerate(order):
        y = top + row * step
        draw.text((left - GAP, y + step / 2), _fit(names[n], left - 2 * GAP), fill=INK, font=_font(), anchor="rm")
        draw.rectangle((left, y + 2, left + length, y + step - 4), fill="#eeeeee")
        draw.rectangle((left, y + 2, left + length * shares[n], y + step - 4), fill=RIGHT)
        words = f"{shares[n]:.1%} of {counts[n]:,}"
        draw.text((left + length + GAP, y + step / 2), words, fill=INK, font=_font(), anchor="lm")
    return _encoded(sheet)


def _mixed(colour: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    red, green, blue = (round(245 + (part - 245) * share) for part in colour)
    return red, green, blue


@cache
def _font() -> Any:
    """Matplotlib's, which has the letters of most languages; without importing matplotlib, which takes long."""
    found = find_spec("matplotlib")
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if file.is_file():
            return ImageFont.truetype(str(file), FONT)
    return ImageFont.load_default(FONT)


def _width(words: str) -> int:
    return round(float(_font().getlength(words)))


def _fit(words: str, width: float) -> str:
    """Cut to so many pixels."""
    if _width(words) <= width:
        return words
    while words and _width(words + "…") > width:
        words = words[:-1]
    return words + "…"


def _encoded(sheet: Image.Image, photos: bool = False) -> EncodedImage:
    buffer = io.BytesIO()
    if photos:
        sheet.save(buffer, "JPEG", quality=80)
    else:
        sheet.save(buffer, "PNG")
    return EncodedImage(buffer.getvalue(), sheet.size)
