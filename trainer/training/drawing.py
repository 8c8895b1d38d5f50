"""Grids of images and confusion matrices, drawn with Pillow.

Drawing takes milliseconds. Text is drawn in matplotlib's font and shortened to the available space.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

# Longer sides of drawn images in pixels. Images smaller than TILE are enlarged by an integer factor
# to about TILE, and images larger than LARGEST are reduced to LARGEST.
TILE = 96
LARGEST = 152
# Maximum width in pixels of a class name or a line of a caption.
ROOM = 160
GAP = 8
FRAME = 4
FONT = 14
LINE = FONT + 4
INK = "#222222"
GROUND = "#ffffff"
# Green and vermilion of Okabe and Ito's palette, which color-blind readers can tell apart.
RIGHT = (0, 158, 115)
WRONG = (213, 94, 0)
# Color of a cell without samples.
EMPTY = 245
# Maximum number of classes of a confusion matrix with counts in its cells. A larger matrix has only
# colors in its cells, and names at as many rows as there is space for.
WRITTEN = 24
# Maximum width and height in pixels of the cells of a matrix without counts. With more classes than
# this, each cell has one pixel.
SIDE = 800
Numbers = npt.NDArray[Any]
Colour = tuple[int, int, int]


def escape_missing_characters(text: str) -> str:
    """Replace each character that the font lacks by an escape, such as \\u732b."""
    characters = []
    for character in text:
        code = ord(character)
        # DejaVu Sans has the characters in these two ranges: the letters of Europe and the Near
        # East, and symbols.
        is_drawn = character.isprintable() and (code < 0x700 or 0x1E00 <= code < 0x2C00)
        if not is_drawn:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


@cache
def _load_font() -> Any:
    # Find matplotlib's font file without importing matplotlib, which would take long.
    package = find_spec("matplotlib")
    assert package and package.origin is not None
    path = Path(package.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf"
    return ImageFont.truetype(str(path), FONT)


def measure_text(text: str) -> int:
    """Return the width of `text` in pixels, with missing characters escaped."""
    return round(float(_load_font().getlength(escape_missing_characters(text))))


def fit(text: str, width: float) -> str:
    """Shorten `text` to at most `width` pixels, with an ellipsis at the end."""
    if measure_text(text) <= width:
        return text
    while text and measure_text(text + "…") > width:
        text = text[:-1]
    return text + "…"


def draw_grid(
    images: Numbers,
    captions: Sequence[Sequence[str]],
    columns: int = 8,
    frames: Sequence[Colour] = (),
) -> Image.Image:
    """Draw images in rows, each above its caption.

    Args:
        images: (n, H, W, C) uint8, n at least 1, C 1 or 3. TILE and LARGEST define the size in
            which they are drawn.
        captions: Lines of text for each image; empty for no captions.
        columns: Maximum number of images in a row.
        frames: Color of the frame around each image; empty for no frames.
    """
    height, width = images.shape[1:3]
    longest = max(height, width)
    scale = min(LARGEST / longest, max(1, round(TILE / longest)))
    tile_width = max(1, round(width * scale))
    tile_height = max(1, round(height * scale))
    columns = min(columns, len(images))
    widths = [TILE, tile_width]
    for lines in captions:
        widths += [min(ROOM, measure_text(text)) for text in lines]
    column_width = max(widths) + 2 * GAP
    line_count = max(map(len, captions), default=0)
    row_height = tile_height + 2 * GAP + line_count * LINE
    rows = -(-len(images) // columns)
    size = (columns * column_width + GAP, rows * row_height + GAP)
    sheet = Image.new("RGB", size, GROUND)
    draw = ImageDraw.Draw(sheet)
    resampling = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR
    for n, image in enumerate(images):
        x = GAP + n % columns * column_width
        y = GAP + n // columns * row_height
        right = x + tile_width
        bottom = y + tile_height
        if frames:
            corners = (x - FRAME, y - FRAME, right + FRAME - 1, bottom + FRAME - 1)
            draw.rectangle(corners, fill=frames[n])
        pixels = image[..., 0] if image.shape[-1] == 1 else image
        picture = Image.fromarray(pixels).convert("RGB")
        picture = picture.resize((tile_width, tile_height), resampling)
        sheet.paste(picture, (x, y))
        if captions:
            for number, text in enumerate(captions[n]):
                position = (x - FRAME, bottom + FRAME + 1 + number * LINE)
                _write(draw, position, fit(text, ROOM))
    return sheet


def draw_confusion(matrix: Numbers, names: Sequence[str]) -> Image.Image:
    """Draw a confusion matrix, with the number of samples and the recall of each class.

    The strength of a cell's color shows its fraction of the samples in its row, on a square-root
    scale off the diagonal.

    Args:
        matrix: (classes, classes) counts, with a row for each actual class and a column for each
            predicted class.
        names: Names of the classes.
    """
    count = len(matrix)
    is_written = count <= WRITTEN
    cell = max(1, SIDE // count)
    if is_written:
        cell = max(2 * LINE, measure_text(f"{matrix.max()}") + GAP)
    side = count * cell
    # If rows are closer together than lines of text, only every k-th row has a name.
    labelled = range(0, count, -(-LINE // cell))
    name_width = max(min(ROOM, measure_text(names[row])) for row in labelled)
    is_upright = name_width <= cell - GAP
    left = LINE + name_width + 3 * GAP
    top = LINE + 3 * GAP + (LINE if is_upright else name_width)
    totals = matrix.sum(1)
    widest = measure_text(f"100.0% of {max(totals.max(), 100_000):,}")
    right = left + side + GAP + widest
    sheet = Image.new("RGB", (right + GAP, top + side + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    middle = side // 2
    _write(draw, (left + middle, GAP), "predicted", "ma")
    _write_upwards(sheet, (GAP, top + middle + LINE), "true")
    _write(draw, (right, top - GAP), "recall, samples", "rs")
    sheet.paste(_colour_cells(matrix).resize((side, side), Image.Resampling.NEAREST), (left, top))
    for row in labelled:
        name = fit(names[row], ROOM)
        offset = row * cell + cell // 2
        y = top + offset
        _write(draw, (left - GAP, y), name, "rm")
        if is_upright:
            _write(draw, (left + offset, top - GAP), name, "ms")
        else:
            _write_upwards(sheet, (left + offset - LINE // 2, top - GAP), name)
        text = "no samples"
        if totals[row]:
            text = f"{matrix[row, row] / totals[row]:.1%} of {totals[row]:,}"
        _write(draw, (right, y), text, "rm")
    if is_written:
        for offset in range(0, side, cell):
            draw.line((left, top + offset, left + side, top + offset), fill=GROUND)
            draw.line((left + offset, top, left + offset, top + side), fill=GROUND)
        for row, column in np.argwhere(matrix).tolist():
            is_dark = matrix[row, column] > totals[row] / 2
            center = (left + (column + 0.5) * cell, top + (row + 0.5) * cell)
            ink = GROUND if is_dark else INK
            _write(draw, center, f"{matrix[row, column]}", "mm", ink)
    # Draw the frame around the cells and not over them, because a cell may be one pixel wide.
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline=INK)
    return sheet


def _colour_cells(matrix: Numbers) -> Image.Image:
    """Return a picture of one pixel per cell of a confusion matrix, (classes, classes)."""
    is_right = np.eye(len(matrix), dtype=bool)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    # The square root makes rare mistakes visible.
    strength = np.where(is_right, shares, np.sqrt(shares))[..., None]
    full = np.where(is_right[..., None], RIGHT, WRONG)
    colours = EMPTY + (full - EMPTY) * strength
    return Image.fromarray(colours.round().astype(np.uint8))


def _write(
    draw: ImageDraw.ImageDraw,
    position: tuple[float, float],
    text: str,
    anchor: str = "la",
    ink: str = INK,
) -> None:
    draw.text(position, escape_missing_characters(text), fill=ink, font=_load_font(), anchor=anchor)


def _write_upwards(sheet: Image.Image, position: tuple[int, int], text: str) -> None:
    """Write text from bottom to top. `position` is the lower left corner of the rotated text."""
    line = Image.new("RGB", (measure_text(text) + 1, LINE), GROUND)
    _write(ImageDraw.Draw(line), (0, 0), text)
    x, bottom = position
    sheet.paste(line.transpose(Image.Transpose.ROTATE_90), (x, bottom - line.width))
