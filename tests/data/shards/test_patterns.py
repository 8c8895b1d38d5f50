"""What data.root means, and which part a name says."""

import re
import shlex

import pytest

from trainer.data.shards.patterns import part_of, shards_of
from trainer.errors import SetupError


@pytest.fixture
def folder(tmp_path):
    for name in ("train/a-000.tar", "train/a-001.tar", "val/b-000.tar", "x [1].tar", "notes.txt", ".hidden.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("root", "wanted"),
    [
        ("", ["x [1].tar", "train/a-000.tar", "train/a-001.tar", "val/b-000.tar"]),
        ("/train/*.tar", ["train/a-000.tar", "train/a-001.tar"]),
        ("/*/*.tar", ["train/a-000.tar", "train/a-001.tar", "val/b-000.tar"]),
        ("/**/b*.tar", ["val/b-000.tar"]),
        ("/x [1].tar", ["x [1].tar"]),
    ],
)
def test_what_data_root_means(folder, root, wanted):
    assert [str(path.relative_to(folder)) for path in shards_of(f"{folder}{root}")] == wanted


@pytest.mark.parametrize(
    ("root", "told"),
    [
        ("/nothing", "names no shards: type a folder, file or pattern"),
        ("/*.parquet", "names no shards"),
        ("/train/a-{000..001}.tar", "* stands for"),
        ("/[a.tar,b.tar]", "* stands for"),
        ("/notes.txt", "notes.txt is no shard"),
    ],
)
def test_what_is_not_there(folder, root, told):
    with pytest.raises(SetupError, match=re.escape(told)):
        shards_of(f"{folder}{root}")


def test_a_folder_of_two_kinds_says_what_to_type(folder, monkeypatch):
    (folder / "train" / "a.parquet").touch()
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(SetupError, match=r"\.tar and \.parquet"):
        shards_of("~/train")
    with pytest.raises(SetupError, match=r"\.tar and \.parquet") as error:
        shards_of(str(folder))
    word = shlex.split(str(error.value).partition(": ")[2])[0]
    assert len(shards_of(word.removeprefix("data.root="))) == 4


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("imagenet1k-train-000000.tar", "train"),
        ("imagenet_val_03.tar", "val"),
        ("data/validation-00000-of-00014.parquet", "val"),
        ("Test-0.tar", "test"),
        ("train/000.tar", "train"),
        ("training/x/000.tar", "train"),
        ("train/x-val-000.tar", "val"),
        ("trainval.tar", None),
        ("contest-0.tar", None),
        ("test-tubes/0.tar", None),
        ("0.tar", None),
    ],
)
def test_parts_by_name(path, part):
    assert part_of(path) == part
