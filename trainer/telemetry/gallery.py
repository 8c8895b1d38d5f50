"""Pictures made of images, drawn in milliseconds, and tables of classes, so that each run can have them.

Words on them are in matplotlib's font, and cut to the room that there is.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from trainer.telemetry import plots

TILE, LARGEST = 72, 128  # pixels of an image's side: tiny ones are enlarged to the first, large ones made smaller
WIDE_TILE = 200  # of both where words are long
ROOM, SHEET = 180, 1200  # pixels that a name may take beside a table, and a row of images at most
GAP, FONT, FRAME = 8, 12, 3
IN_FRAME = {True: (44, 160, 44), False: (214, 39, 40)}  # green of what is right, red of what is wrong
INK, GROUND, RIGHT, WRONG = "#222222", "#ffffff", (0, 114, 178), (213, 94, 0)  # Okabe and Ito's blue and vermilion
WRITTEN = 24  # classes up to which the cells of a matrix hold numbers and its sides names


@cache
def font(size: int) -> Any:
    """Matplotlib's own, which has the letters of most languages."""
    (home,) = find_spec("matplotlib").submodule_search_locations  # type: ignore[union-attr, misc]
    return ImageFont.truetype(f"{home}/mpl-data/fonts/ttf/DejaVuSans.ttf", size)


def one_line(words: str) -> str:
    """Words as they can be drawn: what breaks a line is a space, and bytes of no character are numbers."""
    return " ".join(words.encode("utf-8", "backslashreplace").decode().split())


def text_width(words: str, size: int = FONT) -> int:
    """Of words in pixels, as they are written."""
    return round(float(font(size).getlength(one_line(words))))


def fit(words: str, room: float, end: str = "", size: int = FONT) -> str:
    """Cut words so that they, with an `end` that is never cut, take so many pixels."""
    whole = words + end
    while words and text_width(whole, size) > room:
        words = words[:-1]
        whole = f"{words}…{end}"
    return whole


def fit_end(words: str, room: float, size: int = FONT) -> str:
    """Cut the beginning of words, such as a path, so that they take so many pixels."""
    return fit(words[::-1], room, size=size)[::-1]


def write(draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str, ink: str = INK, size: int = FONT) -> None:
    """Draw words in one line, `at` their upper left corner."""
    draw.text(at, one_line(words), fill=ink, font=font(size))


Numbers = npt.NDArray[Any]
Line = tuple[str, str]  # words that may be cut, and an end that is not; without words the end, cut at its beginning


@dataclass(frozen=True)
class EncodedImage:
    """An encoded picture: PNG, or JPEG where it is made of photos."""

    encoded: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width, height in pixels."""
        return Image.open(io.BytesIO(self.encoded)).size


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
            write(draw, (x, y + tile[1] + 2 + FRAME * bool(right) + row * (FONT + 3)), line)
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG" if scale < 1 else "PNG")
    return EncodedImage(buffer.getvalue())


def confusion(matrix: Numbers, names: Sequence[str]) -> EncodedImage:
    """Counts (actual, predicted): each row shows what the samples of a class are predicted as, as shares of the row."""
    count = len(matrix)
    side = 2.5 + 0.32 * count if count <= WRITTEN else 7.0
    figure, (axes,) = plots.canvas(side, side)
    axes.grid(False)
    shares = (matrix / np.maximum(1, matrix.sum(1, keepdims=True)))[..., None]
    right = np.eye(count, dtype=bool)[..., None]
    # A share of wrong ones is small where it matters, so its root is shown.
    colours = 245 + (np.where(right, RIGHT, WRONG) - 245.0) * np.where(right, shares, np.sqrt(shares))
    axes.imshow(colours.round().astype(np.uint8), interpolation="nearest")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("actual class")
    axes.set_xticks([])
    axes.set_yticks([])
    if count <= WRITTEN:
        sides = [_label(name) for name in names[:count]]
        axes.set_xticks(range(count), sides, rotation=90)
        axes.set_yticks(range(count), sides)
        for row, column in zip(*matrix.nonzero(), strict=True):
            ink = GROUND if shares[row, column] > (0.5 if row == column else 0.25) else INK
            axes.text(column, row, f"{int(matrix[row, column])}", ha="center", va="center", color=ink, fontsize=8)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks, which it draws as boxes
        figure.savefig(buffer, dpi=100, transparent=True)
    return EncodedImage(buffer.getvalue())


def class_bars(shares: Sequence[float], counts: Sequence[int], names: Sequence[str], title: str) -> EncodedImage:
    """A bar a class, the worst first, with its percentage and number of samples; at most WRITTEN of them."""
    order = sorted(range(len(shares)), key=lambda n: shares[n])[:WRITTEN]
    more = f"; the {len(order)} worst of {len(shares)} classes" if len(order) < len(shares) else ""
    rows = [plots.Bar(_label(names[n]), 100 * shares[n], words=f"{shares[n]:.1%} of {counts[n]:,}") for n in order]
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plots.bars(buffer, rows, "%", title + more)
    return EncodedImage(buffer.getvalue())


def _label(name: str) -> str:
    """A class's name beside a table; matplotlib would take what is between two dollars for a formula."""
    return fit(one_line(name), ROOM).replace("$", r"\$")
