"""Pictures made of images and of tables of classes: whole, small, and of any size and number."""

import io

import numpy as np
import pytest
from PIL import Image

from trainer.telemetry import gallery


def opened(picture):
    image = Image.open(io.BytesIO(picture.encoded))
    image.load()
    assert image.size == picture.size
    return image


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 8, 8, 1), (32, 28, 28, 3), (9, 224, 224, 3), (2, 5, 300, 1)])
@pytest.mark.parametrize("captions", [True, False])
def test_a_grid_of_images_of_any_size(shape, captions):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    words = [[(f"is {n}", ""), ("said a name that is far too long to be shown whole", " 57%")] for n in range(shape[0])]
    picture = gallery.grid(images, words if captions else [])
    image = opened(picture)
    assert image.format == ("JPEG" if max(shape[1:3]) > gallery.LARGEST else "PNG")
    assert max(picture.size) < 1400


def test_an_image_is_shown_as_it_is():
    images = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    images[0, :, :, 1] = 200
    image = opened(gallery.grid(images, [[]])).convert("RGB")
    assert image.getpixel((gallery.GAP + 5, gallery.GAP + 5)) == (0, 200, 0)


def test_frames_tell_right_from_wrong_and_the_end_of_a_path_is_shown():
    images = np.zeros((3, 8, 8, 1), dtype=np.uint8)
    picture = gallery.grid(images, [[("", f"{'a/' * 99}{n}.png")] for n in range(3)], right=[True, False, None])
    colours = {colour for _, colour in opened(picture).convert("RGB").getcolors(100_000)}
    assert {*gallery.IN_FRAME.values()} <= colours
    right, wrong = (gallery.grid(images[:1], [[]], right=[value]) for value in (True, False))
    for one, colour in ((right, gallery.IN_FRAME[True]), (wrong, gallery.IN_FRAME[False])):
        assert opened(one).convert("RGB").getpixel((gallery.GAP - 1, gallery.GAP + 5)) == colour
    cut = gallery.fit_end("a/long/path/to/cat/0123.jpg", 80)
    assert cut.startswith("…") and cut.endswith("0123.jpg") and gallery.text_width(cut) <= 80


def test_a_confusion_matrix_tells_right_from_wrong():
    matrix = np.array([[9, 1], [0, 10]])
    image = opened(gallery.confusion(matrix, ["cat", "dog"])).convert("RGB")
    colours = {colour for _, colour in image.getcolors(100_000)}
    assert gallery.RIGHT in colours, "all dogs are right"
    assert gallery.WRONG not in colours


@pytest.mark.parametrize("classes", [1, 2, 24, 25, 256])
def test_tables_of_any_number_of_classes(classes):
    matrix = np.eye(classes, dtype=np.int64) * 3
    names = [f"class {n} of a long name, with ümläuts and 日本" for n in range(classes)]
    assert max(opened(gallery.confusion(matrix, names)).size) < 1300
    picture = gallery.class_bars([n / classes for n in range(classes)], [7] * classes, names, "accuracy")
    assert max(opened(picture).size) < 800


def test_a_class_without_samples_is_no_division_by_zero():
    assert opened(gallery.confusion(np.zeros((3, 3), dtype=np.int64), ["a", "b", "c"]))


def test_words_are_cut_to_their_room():
    assert gallery.fit("short", 100) == "short"
    cut = gallery.fit("a very long name of a class", 60)
    assert cut.endswith("…") and gallery.text_width(cut) <= 60


def test_what_must_be_read_is_never_cut():
    cut = gallery.fit("said a class with a very long name", 120, " 57%")
    assert cut.endswith("… 57%") and gallery.text_width(cut) <= 120


def test_names_of_a_matrix_are_whole_below_it():
    names = ["airplane", "automobile"]
    image = opened(gallery.confusion(np.array([[9, 1], [0, 10]]), names)).convert("L")
    top = 2 * (gallery.FONT + gallery.GAP) + 2 * 34 + gallery.GAP
    dark = np.argwhere(np.asarray(image)[top:] < 128)
    assert max(map(gallery.text_width, names)) - 6 < np.ptp(dark[:, 0]) < image.height - top
