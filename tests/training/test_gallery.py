"""Pictures of images and of a confusion table: whole, small, and of any size and number; labels fit
in their cells.
"""

import io

import numpy as np
import pytest
from PIL import Image

from trainer.training import presenting


def opened(picture):
    image = Image.open(io.BytesIO(picture.encoded))
    image.load()
    assert image.size == picture.size
    return image


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 8, 8, 1), (32, 28, 28, 3), (9, 224, 224, 3), (2, 5, 300, 1)]
)
@pytest.mark.parametrize("captions", [True, False])
def test_a_grid_of_images_of_any_size(shape, captions):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    picture = presenting.draw_grid(
        images, ["a name that is far too long to be shown whole"] * shape[0] * captions
    )
    assert opened(picture).format == ("JPEG" if max(shape[1:3]) > presenting.LARGEST else "PNG")
    assert max(picture.size) < 1400


def test_an_image_is_shown_as_it_is():
    images = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    images[0, :, :, 1] = 200
    image = opened(presenting.draw_grid(images, [])).convert("RGB")
    assert image.getpixel((presenting.GAP + 5, presenting.GAP + 5)) == (0, 200, 0)


def test_a_confusion_matrix_shows_right_and_wrong():
    image = opened(presenting.draw_confusion(np.array([[9, 1], [0, 10]]), ["cat", "dog"])).convert(
        "RGB"
    )
    colours = {colour for _, colour in image.getcolors(100_000)}
    assert presenting.RIGHT in colours, "all dogs are right"
    assert presenting.WRONG not in colours


@pytest.mark.parametrize("classes", [1, 2, 24, 25, 256])
def test_a_matrix_of_any_number_of_classes(classes):
    names = [f"class {n} of a long name, with ümläuts and 日本" for n in range(classes)]
    assert (
        max(opened(presenting.draw_confusion(np.eye(classes, dtype=np.int64) * 3, names)).size)
        < 1300
    )
    assert opened(presenting.draw_confusion(np.zeros((3, 3), dtype=np.int64), ["a", "b", "c"])), (
        "no division by zero"
    )


@pytest.mark.parametrize(
    ("words", "written"),
    [
        *((words, words) for words in ("cat", "Гладкошёрстная", "Άλφα", "")),
        ("猫 1", "\\u732b 1"),
        ("cat\nx", "cat\\nx"),
    ],
)
def test_unprintable_characters_are_escaped(words, written):
    assert presenting.escape_missing_characters(words) == written


@pytest.mark.parametrize("words", ["short", "long name " * 3, "猫" * 30])
@pytest.mark.parametrize("room", [60, 200])
def test_labels_are_cut_to_their_width(words, room):
    actual = presenting.fit(words, room)
    kept = actual.removesuffix("…")
    assert presenting.measure_text(actual) <= room and words.startswith(kept)
    # A longer text would be too wide.
    assert actual == words or presenting.measure_text(f"{words[: len(kept) + 1]}…") > room
