"""Pictures made of images, and tables of classes: small, and drawn in milliseconds, so that each run can have them.

Words on them are in matplotlib's font, and cut to the room that there is.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

TILE, LARGEST = 72, 128  # pixels of an image's side: tiny ones are enlarged to the first, large ones made smaller
WIDE_TILE = 200  # of both where words are long
ROOM, SHEET = 180, 1200  # pixels that a name may take beside a table, and a row of images at most
GAP, FONT, FRAME = 8, 12, 3
IN_FRAME = {True: (44, 160, 44), False: (214, 39, 40)}  # green of what is right, red of what is wrong
INK, GROUND, RIGHT, WRONG = "#222222", "#ffffff", (0, 114, 178), (213, 94, 0)  # Okabe and Ito's blue and vermilion
WRITTEN = 24  # classes up to which the cells of a matrix hold numbers and its sides names
UNDRAWN = ("Cc", "Cs", "Zl", "Zp")  # control characters, bytes of no character, and what breaks a line
NOWHERE = "\U0010ffff"  # no letter, so every font has its sign for that instead


def font_for(words: str, size: int) -> tuple[str, Any]:
    """Words as they can be written, and the font for them; a letter that it lacks becomes its number (\\u732b)."""
    letters, first = set(words), _first(size)
    if all(_has(first, letter) for letter in letters):
        return words, first
    numbers = {letter: letter.encode("unicode_escape").decode() for letter in letters if not _has(first, letter)}
    return "".join(numbers.get(letter, letter) for letter in words), first


def text_width(words: str, size: int = FONT) -> int:
    """Of words in pixels, as they are written."""
    written, face = font_for(words, size)
    return round(float(face.getlength(written)))


def fit(words: str, room: float, end: str = "", size: int = FONT) -> str:
    """Cut words so that they, with an `end` that is never cut, take so many pixels."""
    if text_width(words + end, size) <= room:
        return words + end
    while words and text_width(words + "…" + end, size) > room:
        words = words[:-1]
    return words + "…" + end


def fit_end(words: str, room: float, size: int = FONT) -> str:
    """Cut the beginning of words, such as a path, so that they take so many pixels."""
    if text_width(words, size) <= room:
        return words
    while words and text_width("…" + words, size) > room:
        words = words[1:]
    return "…" + words


@cache
def _first(size: int) -> Any:
    """Matplotlib's font, which has the letters of most languages; importing matplotlib for it would take long."""
    package = find_spec("matplotlib")
    for place in (package.submodule_search_locations if package else None) or ():
        with suppress(OSError):
            return ImageFont.truetype(str(Path(place, "mpl-data/fonts/ttf/DejaVuSans.ttf")), size)
    return ImageFont.load_default(size)


@cache
def _has(face: Any, letter: str) -> bool:
    if unicodedata.category(letter) in UNDRAWN:
        return False
    return letter.isspace() or _drawn(face, letter) != _drawn(face, NOWHERE)


def _drawn(face: Any, letter: str) -> tuple[tuple[int, int], bytes]:
    mask = face.getmask(letter)
    return mask.size, bytes(mask)


Numbers = npt.NDArray[Any]
Line = tuple[str, str]  # words that may be cut, and an end that is not; without words the end, cut at its beginning


@dataclass(frozen=True)
class EncodedImage:
    """An encoded picture: PNG, or JPEG where it is made of photos."""

    encoded: bytes
    size: tuple[int, int]  # width, height


def grid(
    images: Numbers,
    captions: Sequence[Sequence[Line]],
    columns: int = 8,
    side: int = TILE,
    right: Sequence[bool | None] = (),
) -> EncodedImage:
    """Images (n, H, W, C) uint8, of 1 or 3 channels, in rows, each over its lines of words; small ones near `side`.

    `right` frames them in green, or red where it is False.
    """
    height, width = images.shape[1:3]
    scale = min(max(LARGEST, side) / max(height, width), max(1, round(side / max(height, width))))
    tile = (max(1, round(width * scale)), max(1, round(height * scale)))
    columns = min(columns, len(images))
    lines = max((len(caption) for caption in captions), default=0)
    widths = [min(SHEET // columns - GAP, text_width(words + end)) for caption in captions for words, end in caption]
    room = max([TILE, tile[0], *widths]) + GAP
    below = tile[1] + GAP + lines * (FONT + 3) + 3 * FRAME * bool(right)
    sheet = Image.new("RGB", (columns * room + GAP, -(-len(images) // columns) * below + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    for n, image in enumerate(images):
        x, y = GAP + n % columns * room, GAP + n // columns * below
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")
        if right and (is_right := right[n]) is not None:
            box = (x - FRAME, y - FRAME, x + tile[0] + FRAME - 1, y + tile[1] + FRAME - 1)
            draw.rectangle(box, fill=IN_FRAME[is_right])
        sheet.paste(picture.resize(tile, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR), (x, y))
        for row, (words, end) in enumerate(captions[n] if captions else ()):
            line = fit(words, room - GAP, end) if words else fit_end(end, room - GAP)
            _write(draw, (x, y + tile[1] + 2 + FRAME * bool(right) + row * (FONT + 3)), line)
    return _encoded(sheet, photos=scale < 1)


def confusion(matrix: Numbers, names: Sequence[str]) -> EncodedImage:
    """Counts (actual, predicted): each row shows what the samples of a class are predicted as, as shares of the row."""
    count = len(matrix)
    written = count <= WRITTEN
    cell = 34 if written else max(2, 640 // count)
    longest = min(ROOM, max(map(text_width, names), default=0)) if written else 0
    left = longest + 2 * GAP + FONT * (not written)
    top = 2 * (FONT + GAP)
    below = longest + GAP if written else 0
    sheet = Image.new("RGB", (max(260, left + count * cell + GAP), top + count * cell + GAP + below), GROUND)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (GAP, GAP), "rows: actual class; columns: predicted class")
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    for row in range(count):
        for column in np.flatnonzero(matrix[row]) if not written else range(count):
            share, x, y = float(shares[row, column]), left + int(column) * cell, top + row * cell
            colour = _mixed(RIGHT if row == column else WRONG, share if row == column else share**0.5)
            draw.rectangle((x, y, x + cell - 1 - written, y + cell - 1 - written), fill=colour)
            if written and matrix[row, column]:
                words = f"{int(matrix[row, column])}"
                ink = GROUND if share > 0.5 or (row != column and share > 0.25) else INK
                _write(draw, (x + cell / 2, y + cell / 2), words, "mm", ink)
        if written:
            name = fit(names[row], longest)
            _write(draw, (left - GAP, top + row * cell + cell / 2), name, "rm")
            _upright(sheet, (left + row * cell + cell // 2, top + count * cell + GAP), name)
    return _encoded(sheet)


def class_bars(shares: Sequence[float], counts: Sequence[int], names: Sequence[str], title: str) -> EncodedImage:
    """A bar a class, the worst first, with its percentage and number of samples; at most WRITTEN of them."""
    order = sorted(range(len(shares)), key=lambda n: shares[n])[:WRITTEN]
    left = min(ROOM, max(map(text_width, (names[n] for n in order)), default=0) + 2 * GAP)
    length, step, top = 360, FONT + 9, 2 * (FONT + GAP)
    sheet = Image.new("RGB", (left + length + 170, top + len(order) * step + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    more = f"; the {len(order)} worst of {len(shares)} classes" if len(order) < len(shares) else ""
    _write(draw, (GAP, GAP), f"{title}{more}")
    for row, n in enumerate(order):
        y = top + row * step
        _write(draw, (left - GAP, y + step / 2), fit(names[n], left - 2 * GAP), "rm")
        draw.rectangle((left, y + 2, left + length, y + step - 4), fill="#eeeeee")
        draw.rectangle((left, y + 2, left + length * shares[n], y + step - 4), fill=RIGHT)
        words = f"{shares[n]:.1%} of {counts[n]:,}"
        _write(draw, (left + length + GAP, y + step / 2), words, "lm")
    return _encoded(sheet)


def _mixed(colour: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    red, green, blue = (round(245 + (part - 245) * share) for part in colour)
    return red, green, blue


def _write(draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str, anchor: str = "la", ink: str = INK) -> None:
    written, font = font_for(words, FONT)
    draw.text(at, written, fill=ink, font=font, anchor=anchor)


def _upright(sheet: Image.Image, at: tuple[int, int], words: str) -> None:
    """Words that are read from below, their end at the top: the middle of that is `at`."""
    written, font = font_for(words, FONT)
    strip = Image.new("RGB", (round(font.getlength(written)) + 2, FONT + 4), GROUND)
    ImageDraw.Draw(strip).text((0, (FONT + 4) / 2), written, fill=INK, font=font, anchor="lm")
    turned = strip.transpose(Image.Transpose.ROTATE_90)
    sheet.paste(turned, (at[0] - turned.width // 2, at[1]))


def _encoded(sheet: Image.Image, photos: bool = False) -> EncodedImage:
    buffer = io.BytesIO()
    if photos:
        sheet.save(buffer, "JPEG", quality=80)
    else:
        sheet.save(buffer, "PNG")
    return EncodedImage(buffer.getvalue(), sheet.size)
