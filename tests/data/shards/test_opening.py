"""Shards as they are published: what trains, what is held out, what classes are called, and what is wrong."""

import os

import numpy as np
import pytest

from tests.data.shards.making import in_folders, jpeg, opened, tarred, with_classes
from trainer.data.folders.layout import Before
from trainer.errors import SetupError

PETS = {"cat": 5, "dog": 5}


def test_parts_by_the_names_of_shards(tmp_path):
    for n in range(3):
        tarred(tmp_path / f"pets-train-{n:06}.tar", in_folders(PETS, n))
    tarred(tmp_path / "pets-val-000000.tar", in_folders({"cat": 2, "dog": 1}))
    found = opened(tmp_path)
    assert (len(found.train), len(found.val), found.classes) == (30, 3, ("cat", "dog"))
    assert "val" in found.split and found.split_table is None
    assert found.notes["classes"].startswith("cat 15 + 2, dog 15 + 1 ")
    assert found.train.where(7) == f"{tmp_path}/pets-train-000000.tar/dog/2.jpg"
    only = opened(tmp_path / "pets-train-*.tar")
    assert (len(only.train), len(only.val)) == (24, 6) and only.split_table is not None


def test_images_are_read_from_shard_to_shard(tmp_path):
    """Also where folders are classes, and in a tar whose members are in no order."""
    for part in ("train", "val"):
        tarred(tmp_path / f"{part}-0.tar", in_folders({"dog": 2, "cat": 1}))
        tarred(tmp_path / f"{part}-1.tar", [(f"{name}/{n}.jpg", jpeg(n)) for n in (7, 8) for name in ("cat", "dog")])
    found = opened(tmp_path)
    for source, part in ((found.train, "train"), (found.val, "val")):
        first, other = (f"{part}-{n}.tar" for n in range(2))
        assert [source.name(n) for n in range(len(source))] == [
            *(f"{first}/{name}.jpg" for name in ("dog/0", "dog/1", "cat/0")),
            *(f"{other}/{name}.jpg" for name in ("cat/7", "dog/7", "cat/8", "dog/8")),
        ]
    drawn = opened(tmp_path / "train-*.tar")
    for source in (drawn.train, drawn.val):
        names = [source.name(n) for n in range(len(source))]
        assert names == [name for name in map(found.train.name, range(7)) if name in names]


def test_parts_by_folders_of_shards_and_in_them(tmp_path):
    tarred(tmp_path / "a" / "train" / "0.tar", in_folders(PETS))
    tarred(tmp_path / "a" / "val" / "0.tar", in_folders(PETS))
    assert len(opened(tmp_path / "a").val) == 10
    parts = [(f"./photos/{part}/{name}", data) for part in ("train", "Val", "raw") for name, data in in_folders(PETS)]
    inside = opened(tarred(tmp_path / "b.tar", parts))
    assert (len(inside.train), len(inside.val), inside.classes) == (10, 10, ("cat", "dog"))
    assert inside.train.name(0) == "b.tar/photos/train/cat/0.jpg"
    assert inside.notes["beside"].endswith("10 images in other folders")
    told = [(f"{part}/{name}", data) for part in ("train", "val") for name, data in with_classes([0, 1] * 5)]
    assert len(opened(tarred(tmp_path / "c.tar", told)).val) == 10


def test_a_class_may_be_called_train(tmp_path):
    assert opened(tarred(tmp_path / "a.tar", in_folders({"bus": 4, "train": 4}))).classes == ("bus", "train")
    parts = [
        (f"{part}/{name}", data) for part in ("train", "test") for name, data in in_folders({"bus": 4, "train": 4})
    ]
    found = opened(tarred(tmp_path / "b.tar", parts))
    assert (len(found.train), len(found.val), found.classes) == (8, 8, ("bus", "train"))


def test_beside_train_and_val_others_are_left_alone_and_told(tmp_path):
    for part in ("train", "val", "test", "extra"):
        tarred(tmp_path / f"{part}-0.tar", in_folders(PETS))
    found = opened(tmp_path)
    assert found.split.startswith("what is called val")
    assert found.notes["beside"] == f"not looked at in {tmp_path}: extra-0.tar, test-0.tar"


def test_a_test_part_without_classes_is_left_alone(tmp_path):
    tarred(tmp_path / "train-0.tar", with_classes([0, 1] * 5))
    tarred(tmp_path / "test-0.tar", [("0.jpg", jpeg()), ("0.cls", b"-1"), ("1.jpg", jpeg()), ("1.cls", b"-1")])
    found = opened(tmp_path)
    assert (len(found.train), len(found.val)) == (8, 2) and found.notes["beside"].endswith("test-0.tar")


def test_other_data_without_a_train_part_is_held_out_whole(tmp_path):
    tarred(tmp_path / "val-0.tar", in_folders(PETS))
    assert len(opened(tmp_path, before=Before(None, True)).val) == 10
    tarred(tmp_path / "test-0.tar", in_folders(PETS))
    with pytest.raises(SetupError, match=r"\bval and test\b.*\btrain\b"):
        opened(tmp_path)


def test_a_split_is_made_as_for_folders_and_remembered(tmp_path):
    path = tarred(tmp_path / "a.tar", in_folders({"cat": 10, "dog": 20}))
    found = opened(path)
    assert np.bincount(found.val.labels).tolist() == [2, 4] and found.split.startswith("0.2 of each class of ")
    rows = found.split_table().splitlines()
    assert rows[0] == "file,label,split" and len(rows) == 31
    held = frozenset(row.split(",")[0] for row in rows if row.endswith(",val"))
    tarred(path, in_folders({"cat": 10, "dog": 20, "eel": 5}))
    again = opened(path, before=Before(held))
    assert {again.val.name(n) for n in range(len(again.val))} == held


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (None, "", ("0", "1", "2", "3")),
        ("classes.txt", "a\n\nb\nc\nd\ne\n", tuple("abcde")),
    ],
)
def test_classes_that_are_numbers(tmp_path, name, text, wanted):
    tarred(tmp_path / "train-0.tar", with_classes([0, 3, 0, 3]))
    tarred(tmp_path / "val-0.tar", with_classes([1]))
    if name:
        (tmp_path / name).write_text(text)
    found = opened(tmp_path)
    assert found.classes == wanted
    assert (found.train.labels.tolist(), found.val.labels.tolist()) == ([0, 3, 0, 3], [1])


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("classes.txt", "a\nb\n", r"classes.txt names 2 classes \(a, b\), and a sample has the class 3"),
        ("classes.json", "[]", "classes.json is not read: .*classes.txt"),
    ],
)
def test_lists_of_names_that_do_not_fit(tmp_path, name, text, told):
    tarred(tmp_path / "train-0.tar", with_classes([0, 3, 0, 3]))
    (tmp_path / name).write_text(text)
    with pytest.raises(SetupError, match=told):
        opened(tmp_path)


def test_classes_that_are_names(tmp_path):
    members = [
        (f"{n}.{kind}", data)
        for n in range(10)
        for kind, data in (("jpg", jpeg(n)), ("cls", b"dog" if n % 2 else b"a cat"))
    ]
    found = opened(tarred(tmp_path / "a.tar", members))
    assert found.classes == ("a cat", "dog")
    assert opened(tarred(tmp_path / "b.tar", [*members, ("x.jpg", jpeg()), ("x.cls", b"7")])).classes == (
        "7",
        "a cat",
        "dog",
    )


def test_folders_that_are_numbers_are_names(tmp_path):
    assert opened(tarred(tmp_path / "a.tar", in_folders({"10": 3, "9": 3}))).classes == ("10", "9")


def test_samples_without_a_class(tmp_path):
    members = [*with_classes([0, 1] * 4), ("cat/x.jpg", jpeg()), ("y.jpg", jpeg()), ("y.cls", b"-1")]
    path = tarred(tmp_path / "a.tar", members)
    with pytest.raises(SetupError, match=r"\b2 .*a\.tar/cat/x\.jpg.*data\.on_error=skip"):
        opened(path)
    found = opened(path, "data.on_error=skip")
    assert len(found.train) + len(found.val) == 8 and "2 samples" in found.notes["left out"]


def test_nothing_tells_the_classes(tmp_path):
    with pytest.raises(SetupError, match=r"\.cls beside"):
        opened(tarred(tmp_path / "a.tar", [("0.jpg", jpeg()), ("1.jpg", jpeg())]), "data.on_error=skip")
    with pytest.raises(SetupError, match=r"\.cls beside"):
        opened(tarred(tmp_path / "b.tar", [("train/0.jpg", jpeg()), ("val/1.jpg", jpeg())]))


def test_one_class_and_none(tmp_path):
    with pytest.raises(SetupError, match="'cat'"):
        opened(tarred(tmp_path / "a.tar", in_folders({"cat": 3})))
    with pytest.raises(SetupError, match=r"b\.tar.*\b1 .*\.txt"):
        opened(tarred(tmp_path / "b.tar", [("a.txt", b"x")]))


def test_a_class_that_nothing_trains(tmp_path):
    tarred(tmp_path / "train-0.tar", in_folders(PETS))
    tarred(tmp_path / "val-0.tar", in_folders({"eel": 1}))
    with pytest.raises(SetupError, match="'eel'"):
        opened(tmp_path)


def test_one_stray_number_does_not_make_a_million_classes(tmp_path):
    path = tarred(tmp_path / "a.tar", with_classes([*range(10)] * 3 + [1048000]))
    says = r"11 classes are in use, and the number 1,048,000 \(1 sample\) makes them 1,048,001; correct it, or name all"
    with pytest.raises(SetupError, match=says):
        opened(path)
    (tmp_path / "classes.txt").write_text("".join(f"{n}\n" for n in range(2000)))
    tarred(path, with_classes([*range(10)] * 3 + [1999]))
    assert len(opened(path).classes) == 2000
    assert len(opened(tarred(tmp_path / "b" / "b.tar", with_classes([0, 3, 900] * 3))).classes) == 901  # of ImageNet


def test_a_cut_shard_stops_or_is_counted(tmp_path):
    tarred(tmp_path / "a-0.tar", in_folders(PETS))
    cut = tarred(tmp_path / "a-1.tar", in_folders(PETS, 10))
    whole = cut.read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SetupError, match=r"a-1\.tar.*\b\d samples .*data\.on_error=skip"):
        opened(tmp_path)
    found = opened(tmp_path, "data.on_error=skip")
    assert 10 < len(found.train) + len(found.val) < 20 and "a-1.tar" in found.notes["left out"]
    cut.write_bytes(whole)
    assert len(opened(tmp_path).train) == 16, "the index of the cut one is not taken for the whole one"


def test_what_is_no_tar(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(SetupError, match=r"a\.tar: .*not a tar"):
        opened(tmp_path)
    tarred(tmp_path / "b.tar", in_folders(PETS))
    assert "a.tar: " in opened(tmp_path, "data.on_error=skip").notes["left out"]
    (tmp_path / "c.tar").write_bytes(b"")
    (tmp_path / "a.tar").unlink()
    with pytest.raises(SetupError, match=r"c\.tar: .*empty"):
        opened(tmp_path)


def test_a_folder_that_is_called_like_a_tar_and_a_link_to_nothing(tmp_path):
    tarred(tmp_path / "b.tar", in_folders(PETS))
    (tmp_path / "c.tar").symlink_to("gone")
    with pytest.raises(SetupError, match=r"c\.tar.*No such file"):
        opened(tmp_path)
    (tmp_path / "c.tar").unlink()
    os.mkfifo(tmp_path / "c.tar")
    with pytest.raises(SetupError, match=r"c\.tar .*not a file"):
        opened(tmp_path)
