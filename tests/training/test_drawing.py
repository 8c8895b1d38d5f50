"""Pictures of images and of a confusion table: whole, small, and of any size and number; labels fit
in their cells.
"""

import numpy as np
import pytest

from trainer.training import drawing


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 8, 8, 1), (32, 28, 28, 3), (9, 224, 224, 3), (2, 5, 300, 1)]
)
@pytest.mark.parametrize("captions", [True, False])
def test_a_grid_of_images_of_any_size(shape, captions):
    images = np.random.default_rng(0).integers(
        0,
        256,
        shape,
        dtype=np.uint8,
    )
    lines = ["a name that is far too long to be shown whole", "second line"]
    picture = drawing.draw_grid(images, [lines] * shape[0] * captions)
    assert max(picture.size) < 1450


def test_an_image_is_shown_as_it_is():
    images = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    images[0, :, :, 1] = 200
    image = drawing.draw_grid(images, [])
    assert image.getpixel((drawing.GAP + 5, drawing.GAP + 5)) == (0, 200, 0)


def test_frames_have_the_colours_that_they_are_given():
    images = np.full((3, 8, 8, 1), 77, dtype=np.uint8)
    frames = [drawing.RIGHT, drawing.WRONG, drawing.RIGHT]
    image = drawing.draw_grid(images, [], 4, frames)
    column = (image.width - drawing.GAP) // 3
    for number, colour in enumerate(frames):
        x = drawing.GAP + number * column
        assert image.getpixel((x - 2, drawing.GAP + 9)) == colour
        assert image.getpixel((x + 2, drawing.GAP + 9)) == (77, 77, 77)


def test_a_confusion_matrix_shows_right_and_wrong():
    image = drawing.draw_confusion(
        np.array([[9, 1], [0, 10]]),
        ["cat", "dog"],
    )
    colours = {colour for _, colour in image.getcolors(100_000)}
    assert drawing.RIGHT in colours, "all dogs are right"
    assert drawing.WRONG not in colours


@pytest.mark.parametrize("classes", [1, 2, 24, 25, 100, 1000])
def test_a_matrix_of_any_number_of_classes(classes):
    names = [f"class {n} of a long name, with ümläuts and 日本" for n in range(classes)]
    assert max(drawing.draw_confusion(np.eye(classes, dtype=np.int64) * 3, names).size) < 1400
    empty = np.zeros((3, 3), dtype=np.int64)
    assert drawing.draw_confusion(empty, ["a", "b", "c"]).size, "no division by zero"


@pytest.mark.parametrize("classes", [2, 10, 30, 100, 1000])
def test_the_cells_of_a_matrix_are_in_their_places(classes, monkeypatch):
    """Both axes have their titles, and a row at the right its number of samples and recall."""
    written = {}

    def keep(draw, position, text, anchor="la", ink=drawing.INK):
        written.setdefault(text, position)

    monkeypatch.setattr(drawing, "_write", keep)
    matrix = np.eye(classes, dtype=np.int64) * 7
    matrix[0, classes - 1] = 21
    image = drawing.draw_confusion(matrix, [f"n{n}" for n in range(classes)])
    assert {"true", "predicted", "recall, samples", "n0"} <= written.keys()
    # The first row has 28 samples, of which 7 are right.
    first = written["n0"]
    assert first[1] == written["25.0% of 28"][1]
    # The cells start right of the names. Their number and size is that of the classes.
    cell = max(1, drawing.SIDE // classes) if classes > drawing.WRITTEN else 2 * drawing.LINE
    left = round(first[0]) + drawing.GAP
    y = round(first[1])
    x = left + cell // 2
    red, _, blue = image.getpixel((x + (classes - 1) * cell, y + cell // 4))
    assert red - blue > 100, "a mistake"
    last = y + (classes - 1) * cell + cell // 4
    assert image.getpixel((x + (classes - 1) * cell, last)) == drawing.RIGHT


@pytest.mark.parametrize(
    ("words", "written"),
    [
        *((words, words) for words in ("cat", "Гладкошёрстная", "Άλφα", "")),
        ("猫 1", "\\u732b 1"),
        ("cat\nx", "cat\\nx"),
    ],
)
def test_unprintable_characters_are_escaped(words, written):
    assert drawing.escape_missing_characters(words) == written


@pytest.mark.parametrize("words", ["short", "long name " * 3, "猫" * 30])
@pytest.mark.parametrize("room", [60, 200])
def test_labels_are_cut_to_their_width(words, room):
    actual = drawing.fit(words, room)
    kept = actual.removesuffix("…")
    assert drawing.measure_text(actual) <= room and words.startswith(kept)
    # A longer text would be too wide.
    assert actual == words or drawing.measure_text(f"{words[: len(kept) + 1]}…") > room
