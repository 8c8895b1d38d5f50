"""Shards as they are published: what trains, what is held out, what classes are called, and what is
wrong.
"""

import errno
import os
import re

import numpy as np
import pytest

from tests.data.archives.making import in_folders, jpeg, opened, tarred, with_classes
from tests.data.photo_folders import names_of
from trainer.data.archives.opening import part_of, shards_of
from trainer.data.folders.layout import Before
from trainer.errors import SetupError

PETS = {"cat": 5, "dog": 5}


@pytest.fixture
def folder(tmp_path):
    for name in (
        "train/a-000.tar",
        "train/a-001.tar",
        "val/b-000.tar",
        "x [1].tar",
        "notes.txt",
        ".hidden.tar",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("root", "wanted"),
    [
        ("", ["x [1].tar", "train/a-000.tar", "train/a-001.tar", "val/b-000.tar"]),
        ("/*/*.tar", ["train/a-000.tar", "train/a-001.tar", "val/b-000.tar"]),
        ("/**/b*.tar", ["val/b-000.tar"]),
    ],
)
def test_data_root_may_be_a_file_a_folder_or_a_pattern(folder, root, wanted):
    assert [os.path.relpath(path, folder) for path in shards_of(f"{folder}{root}")] == wanted


def test_missing_files_are_refused(folder):
    for root, message in {
        "/nothing": "names no shards: type a folder",
        "/notes.txt": "notes.txt is no shard",
    }.items():
        with pytest.raises(SetupError, match=re.escape(message)):
            shards_of(f"{folder}{root}")
    (folder / "train" / "a.parquet").touch()
    with pytest.raises(SetupError, match=r"\.tar and \.parquet") as error:
        shards_of(str(folder))
    word = str(error.value).split("'")[1]
    assert len(shards_of(word.removeprefix("data.root="))) == 4


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("imagenet1k-train-000000.tar", "train"),
        ("imagenet_val_03.tar", "val"),
        ("data/validation-00000-of-00014.parquet", "val"),
        ("train/x-val-000.tar", "val"),
        ("trainval.tar", None),
    ],
)
def test_parts_by_name(path, part):
    assert part_of(path) == part


def test_parts_by_the_names_of_shards(tmp_path):
    for n in range(3):
        tarred(tmp_path / f"pets-train-{n:06}.tar", in_folders(PETS, n))
    tarred(tmp_path / "pets-val-000000.tar", in_folders({"cat": 2, "dog": 1}))
    datasets = opened(tmp_path)
    assert (len(datasets.train), len(datasets.val), datasets.classes) == (30, 3, ("cat", "dog"))
    assert "val" in datasets.holdout and datasets.holdout_table is None
    assert datasets.notes["classes"].startswith("cat 15 + 2, dog 15 + 1 ")
    assert datasets.train.where(7) == f"{tmp_path}/pets-train-000000.tar/dog/2.jpg"
    only = opened(tmp_path / "pets-train-*.tar")
    assert (len(only.train), len(only.val)) == (24, 6)
    assert only.holdout_table is not None


def test_images_are_read_from_shard_to_shard(tmp_path):
    """Folders may be classes, and the members of a tar may be in any order."""
    tarred(tmp_path / "train-0.tar", in_folders({"dog": 2, "cat": 1}))
    tarred(
        tmp_path / "train-1.tar",
        [(f"{name}/{n}.jpg", jpeg(n)) for n in (7, 8) for name in ("cat", "dog")],
    )
    tarred(tmp_path / "val-0.tar", in_folders({"dog": 1, "cat": 1}))
    source = opened(tmp_path).train
    assert names_of(source) == [
        *(f"train-0.tar/{name}.jpg" for name in ("dog/0", "dog/1", "cat/0")),
        *(f"train-1.tar/{name}.jpg" for name in ("cat/7", "dog/7", "cat/8", "dog/8")),
    ]


@pytest.mark.parametrize(
    "parts", [("train", "val"), ("photos/train", "photos/Val", "photos/raw"), ("val", "raw")]
)
@pytest.mark.parametrize("told", [False, True])
def test_parts_within_a_tar_are_refused_and_no_classes(tmp_path, parts, told):
    members = with_classes([0, 1] * 5) if told else in_folders(PETS)
    path = tarred(
        tmp_path / "a.tar", [(f"./{part}/{name}", data) for part in parts for name, data in members]
    )
    with pytest.raises(SetupError, match=r"\b[vV]al\b.*\btar -C photos/val -cf val\.tar"):
        opened(path)
    with pytest.raises(SetupError, match=r"\btrain, val: .*tar -C"):
        opened(tarred(tmp_path / "b.tar", [("train/0.jpg", jpeg()), ("val/1.jpg", jpeg())]))


def test_a_class_may_be_called_train_and_a_tar_may_lie_in_a_folder_of_its_part(tmp_path):
    assert opened(tarred(tmp_path / "a.tar", in_folders({"bus": 4, "train": 4}))).classes == (
        "bus",
        "train",
    )
    for part in ("train", "val"):
        pairs = [(f"{part}/{name}", data) for name, data in in_folders({"bus": 4, "train": 4})]
        tarred(tmp_path / "b" / part / "0.tar", pairs)
        messages = [(f"{part}/{name}", data) for name, data in with_classes([0, 1] * 4)]
        tarred(tmp_path / "c" / f"{part}.tar", messages)
    for root, classes in (("b", ("bus", "train")), ("c", ("0", "1"))):
        datasets = opened(tmp_path / root)
        assert (len(datasets.train), len(datasets.val), datasets.classes) == (8, 8, classes)


def test_other_splits_than_train_and_val_are_ignored_and_reported(tmp_path):
    for part in ("train", "val", "test", "extra"):
        tarred(tmp_path / f"{part}-0.tar", in_folders(PETS))
    datasets = opened(tmp_path)
    assert {name.partition("/")[0] for name in names_of(datasets.val)} == {"val-0.tar"}
    assert "val" in datasets.holdout.split()
    assert datasets.notes["beside"].endswith(f" {tmp_path}: extra-0.tar, test-0.tar")


def test_a_test_part_without_classes_holds_nothing_out(tmp_path):
    tarred(tmp_path / "train-0.tar", with_classes([0, 1] * 5))
    tarred(
        tmp_path / "test-0.tar",
        [
            ("0.jpg", jpeg()),
            ("0.cls", b"-1"),
            ("1.jpg", jpeg()),
            ("1.cls", b"-1"),
        ],
    )
    with pytest.raises(SetupError, match=rf"^{re.escape(str(tmp_path))}: .*\btest\b.*data\.root='"):
        opened(tmp_path, "data.on_error=skip")
    assert len(opened(tmp_path / "train-*.tar").train) == 8


def test_other_data_without_a_train_split_is_all_validation(tmp_path):
    tarred(tmp_path / "val-0.tar", in_folders(PETS))
    assert len(opened(tmp_path, before=Before(None, True)).val) == 10
    tarred(tmp_path / "test-0.tar", in_folders(PETS))
    with pytest.raises(SetupError, match=r"^data\.root=.*\bval\b.*\btest\b.*\btrain\b"):
        opened(tmp_path)


def test_a_split_is_made_as_for_folders_and_remembered(tmp_path):
    path = tarred(tmp_path / "a.tar", in_folders({"cat": 10, "dog": 20}))
    datasets = opened(path)
    assert np.bincount(datasets.val.labels).tolist() == [2, 4]
    assert re.match(r"0\.2 .*\(data\.val_fraction\)$", datasets.holdout)
    rows = datasets.holdout_table().splitlines()
    assert rows[0] == "file,label,split" and len(rows) == 31
    kept = frozenset(row.split(",")[0] for row in rows if row.endswith(",val"))
    tarred(path, in_folders({"cat": 10, "dog": 20, "eel": 5}))
    again = opened(path, before=Before(kept))
    assert {*names_of(again.val)} == kept


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", ("0", "1", "2", "3")), ("a\n\nb\nc\nd\ne\n", tuple("abcde")), ("a\nb\n", None)],
)
def test_classes_that_are_numbers(tmp_path, text, wanted):
    tarred(tmp_path / "train-0.tar", with_classes([0, 3, 0, 3]))
    tarred(tmp_path / "val-0.tar", with_classes([1]))
    if text:
        (tmp_path / "classes.txt").write_text(text)
    if wanted is None:
        with pytest.raises(SetupError, match=r"classes\.txt .*\b2 .*\(a, b\).*\b3$"):
            opened(tmp_path)
        return
    datasets = opened(tmp_path)
    assert datasets.classes == wanted
    assert (datasets.train.labels.tolist(), datasets.val.labels.tolist()) == ([0, 3, 0, 3], [1])


def test_classes_that_are_names(tmp_path):
    members = with_classes(["a cat", "dog"] * 5)
    assert opened(tarred(tmp_path / "a.tar", members)).classes == ("a cat", "dog")
    others = opened(tarred(tmp_path / "b.tar", [*members, *with_classes([7], first=10)]))
    assert others.classes == ("7", "a cat", "dog")
    assert opened(tarred(tmp_path / "c.tar", in_folders({"10": 3, "9": 3}))).classes == ("10", "9")


def test_samples_without_a_class(tmp_path):
    members = [
        *with_classes([0, 1] * 4),
        ("cat/x.jpg", jpeg()),
        ("y.jpg", jpeg()),
        ("y.cls", b"-1"),
    ]
    members += [("notes.txt", b"x")]
    path = tarred(tmp_path / "a.tar", members)
    with pytest.raises(SetupError, match=r"\b2 .*a\.tar/cat/x\.jpg.*data\.on_error=skip"):
        opened(path)
    datasets = opened(path, "data.on_error=skip")
    assert len(datasets.train) + len(datasets.val) == 8
    assert re.search(r"\b2\b", datasets.notes["left out"])
    assert datasets.notes["ignored"] == "1 other file (.txt)"


def test_archives_without_classes_or_with_a_single_one_are_refused(tmp_path):
    with pytest.raises(SetupError, match=r"\.cls file"):
        opened(
            tarred(tmp_path / "a.tar", [("0.jpg", jpeg()), ("1.jpg", jpeg())]), "data.on_error=skip"
        )
    with pytest.raises(SetupError, match="two classes"):
        opened(tarred(tmp_path / "a.tar", in_folders({"cat": 3})))
    with pytest.raises(SetupError, match=r"\b1 .*\.txt.*two|two.*\b1 .*\.txt"):
        opened(tarred(tmp_path / "b.tar", [("a.txt", b"x")]))


def test_a_class_that_nothing_trains(tmp_path):
    tarred(tmp_path / "train-0.tar", in_folders(PETS))
    tarred(tmp_path / "val-0.tar", in_folders({"eel": 1}))
    with pytest.raises(SetupError, match="'eel'"):
        opened(tmp_path)


def test_one_stray_number_does_not_make_a_million_classes(tmp_path):
    path = tarred(tmp_path / "a.tar", with_classes([*range(10)] * 3 + [1048000]))
    says = r"\b11 classes\b.*\b1,048,000 \(1 sample\).*\b1,048,001\b.*classes\.txt"
    with pytest.raises(SetupError, match=says):
        opened(path)
    with pytest.raises(SetupError, match=r"\b11 classes\b.*\b1,000,000,001\b.*classes\.txt"):
        opened(tarred(tmp_path / "c" / "a.tar", with_classes([*range(10), 10**4200])))
    (tmp_path / "classes.txt").write_text("".join(f"{n}\n" for n in range(2000)))
    tarred(path, with_classes([*range(10)] * 3 + [1999]))
    assert len(opened(path).classes) == 2000
    # Names of ImageNet.
    assert (
        len(opened(tarred(tmp_path / "b" / "b.tar", with_classes([0, 3, 900] * 3))).classes) == 901
    )


def test_a_cut_shard_stops_and_leaves_no_index_behind(tmp_path):
    tarred(tmp_path / "a-0.tar", in_folders(PETS))
    cut = tarred(tmp_path / "a-1.tar", in_folders(PETS, 10))
    whole = cut.read_bytes()
    facts = os.stat(cut)
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SetupError, match=r"a-1\.tar.*\bcut\b.*data\.root="):
        opened(tmp_path, "data.on_error=skip")
    cut.write_bytes(whole)
    os.utime(cut, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert len(opened(tmp_path).train) == 16


def test_paths_that_are_no_files_are_refused(tmp_path):
    tarred(tmp_path / "b.tar", in_folders(PETS))
    (tmp_path / "c.tar").symlink_to("gone")
    with pytest.raises(SetupError, match=rf"c\.tar .*\({os.strerror(errno.ENOENT)}\)"):
        opened(tmp_path)
    (tmp_path / "c.tar").unlink()
    os.mkfifo(tmp_path / "c.tar")
    with pytest.raises(SetupError, match=r"c\.tar .*\(.*\bfile\)$"):
        opened(tmp_path)
