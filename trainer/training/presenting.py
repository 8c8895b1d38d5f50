"""Pictures of a run in TensorBoard: images as the model sees them, and a confusion matrix.

Rank 0 draws its first batch at the start, and at the end the confusion matrix over the samples of
all ranks. Drawing takes milliseconds. Text is drawn in matplotlib's font and shortened to the
available space.
"""

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

from trainer.data import Batch, Datasets, as_pictures
from trainer.errors import TrainerError, describe
from trainer.saving.files import escape_non_utf8, format_csv
from trainer.tasks import Task
from trainer.telemetry import events
from trainer.telemetry.tracking import NullTracker
from trainer.training.evaluation import WORST, Mistakes
from trainer.training.state import Resolved

# Maximum number of samples of the first batch that are shown, and maximum number of their pixels
# together. One sample is shown even if it has more pixels.
SEEN = 32
PIXELS = 2**22
# Longer sides of drawn images in pixels: images smaller than TILE are enlarged by an integer factor
# to about TILE, and images larger than LARGEST are reduced to LARGEST.
TILE = 72
LARGEST = 128
# Maximum width in pixels of a class name next to a matrix (ROOM) and of a row of images (SHEET),
# and maximum number of images in a row (COLUMNS).
ROOM = 180
SHEET = 1200
COLUMNS = 8
GAP = 8
FONT = 12
INK = "#222222"
GROUND = "#ffffff"
# Blue and vermilion of Okabe and Ito's palette, which color-blind readers can tell apart.
RIGHT = (0, 114, 178)
WRONG = (213, 94, 0)
# A confusion matrix of at most this number of classes has counts in its cells and names at its
# rows. A larger matrix has colors only.
WRITTEN = 24
Numbers = npt.NDArray[Any]


def show_first_batch(tracker: NullTracker, datasets: Datasets, task: Task, batch: Batch) -> None:
    """Show the first batch as the model sees it: augmented, with labels if this rank reads them.

    Only the first step waits for the drawing. With logging.warmup_steps > 0, no reported speed
    includes that step.
    """
    if not tracker.shows:
        return
    with skip_on_error(tracker):
        pixels = max(1, batch.inputs.shape[2:].numel())
        count = min(SEEN, max(1, PIXELS // pixels))
        images = as_pictures(datasets, batch.inputs[:count])
        if images is not None and len(images):
            targets = batch.targets[:count].cpu()
            captions = [format_caption(task, datasets.classes, target) for target in targets]
            channels = batch.inputs.shape[1]
            if (shown := images.shape[-1]) < channels:
                tracker.say(f"  pictures show {shown} of the {channels} channels, the first")
            picture = draw_grid(images.numpy(), captions)
            tracker.show(picture.summarize("batch as the model sees it"), 0)


def report_mistakes(resolved: Resolved, collected: Mistakes, step: int) -> None:
    """Write worst.csv and show the confusion matrix of the evaluation after `step`. Collective."""
    datasets = resolved.datasets
    tracker = resolved.tracker
    classes = datasets.classes
    address = getattr(datasets.val, "where", None) or f"{datasets.name}/val/{{}}".format
    rows = []
    for mistake in collected.gathered(resolved.world):
        rows.append(
            (
                escape_non_utf8(str(address(mistake.place))),
                format_class(classes, mistake.target),
                format_class(classes, mistake.predicted),
                f"{mistake.label_probability:.4g}",
                f"{mistake.predicted_probability:.4g}",
            )
        )
    if tracker.path and not datasets.synthetic and rows:
        head = ("path", "label", "predicted", "label_probability", "predicted_probability")
        tracker.replace(WORST, format_csv([head, *rows]))
    if tracker.shows and collected.pairs is not None:
        with skip_on_error(tracker):
            names = [format_class(classes, index) for index in range(len(collected.pairs))]
            matrix = draw_confusion(collected.pairs.numpy(), names)
            tracker.show(matrix.summarize("confusion matrix"), step)


@contextmanager
def skip_on_error(tracker: NullTracker) -> Iterator[None]:
    """Print an error of this block instead of raising it, because a picture must not end a run.

    A TrainerError is raised all the same.
    """
    try:
        yield
    # An error of the run folder concerns more than the picture, so it must end the run.
    except TrainerError:
        raise
    except Exception as error:
        tracker.say(f"  a picture is left out: {describe(error)}")


def format_class(names: Sequence[str], index: int) -> str:
    """Return the name of a class, or its index if it has no name.

    A model may have more outputs than there are names.
    """
    return names[index] if 0 <= index < len(names) else str(index)


def format_caption(task: Task, classes: Sequence[str], target: Tensor) -> str:
    """Return the caption of a sample with this target; empty for targets such as masks."""
    if target.dim() == 0 and not target.is_floating_point():
        return format_class(classes, int(target))
    if target.dim() > 1 or not target.is_floating_point():
        return ""
    if task.reads == "values" or target.dim() == 0:
        values = target.flatten().tolist()
        return ", ".join(f"{value:.4g}" for value in values[:3])
    # The target is a mixture of classes, such as mixup makes.
    values = target.tolist()
    shares = [(share, index) for index, share in enumerate(values) if share > 0]
    texts = []
    for share, index in sorted(shares, reverse=True)[:3]:
        text = format_class(classes, index)
        if share != 1:
            text += f" {share:.0%}"
        texts.append(text)
    return ", ".join(texts)


# Drawing.


def escape_missing_characters(text: str) -> str:
    """Return `text` with each character that the font lacks replaced by an escape (\\u732b)."""
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
    # The file is matplotlib's, but importing matplotlib for it would take long.
    package = find_spec("matplotlib")
    assert package and package.origin is not None
    path = Path(package.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf"
    return ImageFont.truetype(str(path), FONT)


def measure_text(text: str) -> int:
    """Return the width of `text` in pixels, as it is drawn."""
    return round(float(_load_font().getlength(escape_missing_characters(text))))


def fit(text: str, width: float) -> str:
    """Shorten `text` to at most `width` pixels."""
    if measure_text(text) <= width:
        return text
    while text and measure_text(text + "…") > width:
        text = text[:-1]
    return text + "…"


@dataclass(frozen=True)
class EncodedImage:
    """An encoded picture: JPEG if its images are larger than LARGEST, otherwise PNG.

    Attributes:
        encoded: Content of the file.
        size: Width and height in pixels.
    """

    encoded: bytes
    size: tuple[int, int]

    def summarize(self, tag: str) -> Any:
        """Return the picture as a summary for TensorBoard."""
        return events.image_summary(tag, self.encoded, self.size)


def draw_grid(images: Numbers, captions: Sequence[str]) -> EncodedImage:
    """Draw images in rows, each above its caption.

    Args:
        images: (n, H, W, C) uint8, with 1 or 3 channels. See TILE and LARGEST for the size in which
            they are drawn.
        captions: A caption for each image, or an empty sequence.
    """
    height, width = images.shape[1:3]
    longest = max(height, width)
    scale = min(LARGEST / longest, max(1, round(TILE / longest)))
    tile_width = max(1, round(width * scale))
    tile_height = max(1, round(height * scale))
    columns = min(COLUMNS, len(images))
    widths = [TILE, tile_width]
    for text in captions:
        widths.append(min(SHEET // columns - GAP, measure_text(text)))
    column_width = GAP + max(widths)
    row_height = tile_height + GAP
    if any(captions):
        row_height += FONT + 3
    rows = -(-len(images) // columns)
    size = (columns * column_width + GAP, rows * row_height + GAP)
    sheet = Image.new("RGB", size, GROUND)
    draw = ImageDraw.Draw(sheet)
    resampling = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR
    for n, image in enumerate(images):
        x = GAP + n % columns * column_width
        y = GAP + n // columns * row_height
        pixels = image[..., 0] if image.shape[-1] == 1 else image
        picture = Image.fromarray(pixels).convert("RGB")
        picture = picture.resize((tile_width, tile_height), resampling)
        sheet.paste(picture, (x, y))
        if captions:
            text = fit(captions[n], column_width - GAP)
            _write(draw, (x, y + tile_height + 2), text)
    return _encode(sheet, photos=scale < 1)


def draw_confusion(matrix: Numbers, names: Sequence[str]) -> EncodedImage:
    """Draw a confusion matrix.

    The color of a cell shows its fraction of the samples of its row.

    Args:
        matrix: (classes, classes) counts, with a row for each actual class and a column for each
            predicted class.
        names: Names of the classes.
    """
    count = len(matrix)
    is_written = count <= WRITTEN
    cell = 34 if is_written else max(2, 640 // count)
    left = 2 * GAP
    if is_written:
        left += min(ROOM, max(map(measure_text, names), default=0))
    top = 2 * (FONT + GAP)
    title = "rows: actual class; columns: predicted, in the same order"
    width = max(measure_text(title) + GAP, left + count * cell) + GAP
    sheet = Image.new("RGB", (width, top + count * cell + GAP), GROUND)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (GAP, GAP), title)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    # Pillow draws a rectangle including both corners, so `cell - 2` leaves a gap of one pixel
    # between cells with counts, and `cell - 1` leaves none.
    side = cell - 2 if is_written else cell - 1
    for row in range(count):
        y = top + row * cell
        if is_written:
            _write(draw, (left - GAP, y + cell / 2), fit(names[row], ROOM), "rm")
        for column in map(int, np.flatnonzero(matrix[row])):
            x = left + column * cell
            strength = float(shares[row, column])
            full_colour = RIGHT
            if row != column:
                # The square root makes rare mistakes visible.
                strength = strength**0.5
                full_colour = WRONG
            colour = tuple(round(245 + (part - 245) * strength) for part in full_colour)
            draw.rectangle((x, y, x + side, y + side), fill=colour)
            if is_written:
                ink = GROUND if strength > 0.5 else INK
                center = (x + cell / 2, y + cell / 2)
                _write(draw, center, f"{int(matrix[row, column])}", "mm", ink)
    return _encode(sheet)


def _write(
    draw: ImageDraw.ImageDraw,
    position: tuple[float, float],
    text: str,
    anchor: str = "la",
    ink: str = INK,
) -> None:
    draw.text(position, escape_missing_characters(text), fill=ink, font=_load_font(), anchor=anchor)


def _encode(sheet: Image.Image, photos: bool = False) -> EncodedImage:
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG" if photos else "PNG", quality=80)
    return EncodedImage(buffer.getvalue(), sheet.size)
