"""The picture of photos before the first step: a row a class, named, as the model sees them."""

import numpy as np
import pytest
from PIL import Image

from tests.command_line import QUIET, ok, result
from tests.data.photo_folders import coloured, opened
from trainer.data import open_datasets
from trainer.data.photos import contact_sheet
from trainer.data.photos.contact_sheet import FILE, LARGEST, MARGIN, NAMES, SMALL, TEXT
from trainer.recipe import load

COLOURS = {"blue": (0, 0, 200), "red": (200, 0, 0)}


@pytest.fixture
def root(tmp_path):
    for name, colour in COLOURS.items():
        for number in range(5):
            coloured(tmp_path / "photos" / name / f"{number}.png", colour, (90, 80), number)
    return tmp_path / "photos"


def cell(sheet, row, column, side=LARGEST):
    """The middle of a picture's cell."""
    left, top = NAMES + column * (side + MARGIN), 2 * TEXT + row * (side + SMALL + 2 * MARGIN)
    return np.asarray(sheet)[top + 40 : top + 70, left + 40 : left + 70].reshape(-1, 3).mean(0)


@pytest.mark.parametrize(
    "words", [(), ("data.image_size=16", "augment.crop=pad", "augment.auto=rand"), ("data.channels=1",)]
)
def test_each_class_has_a_row(root, tmp_path, words):
    recipe = load(None, "data.name=imagefolder", f"data.root={root}", "augment.hflip=0.5", *words)
    contact_sheet.write(tmp_path, open_datasets(recipe), recipe)
    sheet = Image.open(tmp_path / FILE)
    for row, colour in enumerate(COLOURS.values()):
        seen = cell(sheet, row, 0)
        assert seen.max() < 250  # paper is white
        if not words:
            assert np.abs(seen - colour).max() < 30
    assert cell(sheet, 0, 3).max() < 250  # 4 of 5 images train
    assert sheet.width == NAMES + 4 * (LARGEST + MARGIN) + MARGIN, "and no room is left for others"


def test_of_many_classes_some_are_shown_and_odd_names_do_no_harm(tmp_path):
    for number in range(30):
        for copy in range(2):
            coloured(tmp_path / f"класс {number:02} 猫 {'x' * 30}" / f"{copy}.png", (9 * number, 0, 99), seed=copy)
    assert opened(tmp_path).classes[0].startswith("класс 00")
    recipe = load(None, "data.name=imagefolder", f"data.root={tmp_path}", "data.image_size=32")
    contact_sheet.write(tmp_path, open_datasets(recipe), recipe)
    assert Image.open(tmp_path / FILE).height == 2 * TEXT + 20 * (LARGEST + SMALL + 2 * MARGIN) + MARGIN


def test_unreadable_photos_leave_room(root, tmp_path):
    """And no other class's image stands in for them."""
    for path in (root / "blue").iterdir():
        path.write_bytes(b"no image")
    recipe = load(None, "data.name=imagefolder", f"data.root={root}", "data.on_error=skip")
    contact_sheet.write(tmp_path, open_datasets(recipe), recipe)
    sheet = Image.open(tmp_path / FILE)
    for column in range(4):
        assert (np.asarray(cell(sheet, 0, column)) > 100).all()  # red words on paper
        assert np.abs(cell(sheet, 1, column) - COLOURS["red"]).max() < 30


def test_what_is_no_photo_of_a_class_has_none(tmp_path):
    recipe = load(None)
    contact_sheet.write(tmp_path, open_datasets(recipe), recipe)
    assert not list(tmp_path.iterdir())


def test_a_run_draws_it_before_its_first_step(root, tmp_path):
    words = ["mode=ddp", "nproc=2", "model.name=mlp", "data.name=imagefolder", f"data.root={root}", "data.image_size=8"]
    said = ok(*words, "batch_size=4", "max_steps=1", f"output={tmp_path / 'run'}", *QUIET).stdout
    facts = result(tmp_path / "run")["facts"]
    assert facts["look at"].startswith(f"{tmp_path / 'run' / FILE}: ")
    assert facts["classes"].startswith("blue 4 + 1, red 4 + 1 ") and "blue 4 + 1, red 4 + 1 " in said
    drawn = (tmp_path / "run" / FILE).stat().st_mtime_ns
    ok(*words, "batch_size=4", "max_steps=1", f"output={tmp_path / 'run'}", "resume=auto", *QUIET)
    assert (tmp_path / "run" / FILE).stat().st_mtime_ns == drawn
