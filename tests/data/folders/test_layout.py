"""Folders in any usual layout: the meaning is detected, or one sentence suggests what to type."""

import re

import pytest

from tests.data.photo_folders import opened, photo, photo_set
from trainer.data import open_datasets
from trainer.errors import SetupError
from trainer.recipe import load

PETS = {"cat": 5, "dog": 5}


@pytest.mark.parametrize("train", ["train", "Train", "TRAINING"])
@pytest.mark.parametrize("held_out", ["val", "valid", "Validation", "test"])
def test_parts_are_known_by_many_names(tmp_path, train, held_out):
    datasets = opened(photo_set(tmp_path, PETS, split=True, parts=(train, held_out)))
    assert (len(datasets.train), len(datasets.val), datasets.holdout) == (
        10,
        10,
        str(tmp_path / held_out),
    )
    assert datasets.holdout_table is None


def test_a_test_folder_next_to_val_is_ignored_and_reported(tmp_path):
    datasets = opened(
        photo_set(
            tmp_path,
            PETS,
            split=True,
            parts=("train", "val", "test", "raw"),
        )
    )
    assert datasets.holdout == str(tmp_path / "val")
    assert datasets.notes["beside"].endswith(f" {tmp_path}: raw, test")


def test_a_test_folder_of_images_without_classes_is_left_alone(tmp_path):
    photo_set(tmp_path, PETS, split=True, parts=("train",))
    photo(tmp_path / "test" / "1.jpg")
    for root in (tmp_path, tmp_path / "train"):
        assert len(opened(root).train) == 8
        assert re.match(r"0\.2 .*\(data\.val_fraction\)$", opened(root).holdout)
    assert opened(tmp_path).notes["beside"].endswith(f" {tmp_path}: test")
    (tmp_path / "test").rename(tmp_path / "val")
    with pytest.raises(SetupError, match=r"/val .*\b1 images\b.*/val/<class>"):
        opened(tmp_path)


@pytest.mark.parametrize("parts", [(), ("train",), ("Training",)])
def test_a_missing_validation_split_takes_a_fifth_of_each_class(tmp_path, parts):
    datasets = opened(photo_set(tmp_path, PETS, split=bool(parts), parts=parts))
    assert (len(datasets.train), len(datasets.val)) == (8, 2)
    assert datasets.val.labels.tolist() == [0, 1]
    assert re.match(r"0\.2 .*\(data\.val_fraction\)$", datasets.holdout)
    assert datasets.notes["classes"].startswith("cat 4 + 1, dog 4 + 1 ")


def test_the_training_folder_finds_the_validation_folder_next_to_it(tmp_path):
    photo_set(tmp_path / "pets", PETS, split=True, parts=("train", "Valid"))
    datasets = opened(tmp_path / "pets" / "train")
    assert (len(datasets.train), len(datasets.val), datasets.holdout) == (
        10,
        10,
        str(tmp_path / "pets" / "Valid"),
    )
    alone = opened(
        photo_set(
            tmp_path / "other",
            PETS,
            split=True,
            parts=("train",),
        )
        / "train"
    )
    assert (len(alone.train), len(alone.val)) == (8, 2)


UNCLEAR = {  # Messages for numbers of photos in these folders, and a text.
    "{root} holds one class, 'cat': put the images of each in a folder of its own, {root}/<": {
        "cat": 3
    },
    "{root} holds one class, 'photos': .*; if what it holds (pets) is the data set, type "
    "data.root={root}": {
        "photos/pets/cat": 5,
        "photos/pets/dog": 5,
    },
    "{root} holds 4 images and no class folders: put each class's images in a folder of its own, "
    "{root}/<cl": {"": 4},
    "{root} holds val and no train: move the classes to be trained to {root}/train, or type "
    "data.root={root}/val, which trains on that and holds out a part": PETS
    | {"val/cat": 5, "val/dog": 5},
    "{root}: each class holds train and val: put the classes into these": dict.fromkeys(
        ("cat/train", "cat/val", "dog/train", "dog/val"), 2
    ),
    "{root}: every class has one image, so none can be held out: give each two or more": {
        "cat": 1,
        "dog": 1,
    },
    "{root} holds no images that can be read here (1 other file (.txt)) and no class folders: put "
    "each": {},
}


@pytest.mark.parametrize("sentence", UNCLEAR)
def test_ambiguous_folders_are_one_sentence_with_a_suggestion(tmp_path, sentence):
    root = tmp_path / "photos"  # alone in its folder
    photo_set(root, UNCLEAR[sentence])
    root.mkdir(exist_ok=True)
    (root / "notes.txt").write_text("")
    with pytest.raises(
        SetupError, match=".*".join(map(re.escape, sentence.format(root=root).split(".*")))
    ) as error:
        opened(root)
    assert "\n" not in str(error.value)


def test_one_of_two_folders_of_a_split_is_used_and_the_other_reported(tmp_path):
    photo_set(tmp_path, PETS, split=True, parts=("train", "Train", "val"))
    assert opened(tmp_path).notes["beside"].endswith(f" {tmp_path}: train")


@pytest.mark.parametrize("name", ["imagefolder", "shards"])
@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("~/my pets.zip", r"\barchive\b.*\bunpack\b"),
        ("https://example.org/pets.zip", r"\baddress\b.*\bdownload\b"),
    ],
)
def test_archives_and_addresses(root, says, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SetupError, match=rf"^data\.root={re.escape(root)} .*{says}.*data\.root=FOLDER\b"
    ):
        open_datasets(load(None, f"data.name={name}", f"data.root={root}"))


def test_a_class_with_one_image_trains_and_is_reported(tmp_path):
    datasets = opened(photo_set(tmp_path, {"cat": 1, "dog": 9}))
    assert datasets.notes["classes"].startswith("cat 1 + 0, dog 7 + 2 ")
    assert "balance" not in opened(tmp_path, "data.balance=true").notes
    assert re.search(r"\bdog .*\b7 .*\bcat\b.*data\.balance=true", datasets.notes["balance"])
