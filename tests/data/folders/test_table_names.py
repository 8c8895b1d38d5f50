"""How tables name images: what one reading makes right is read so, and the rest is told with what to type."""

import pytest
from PIL import Image

from trainer.data import open_datasets
from trainer.errors import SetupError
from trainer.recipe import load

KINDS = ("cat", "dog")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Images in class folders, and once more side by side."""
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        for n in range(4):
            for name in (f"photos/{kind}/{n}.jpg", f"flat/{kind}{n}.jpg"):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (n * 20, 0, 0)).save(tmp_path / name)
    return tmp_path


def opened(root, written, header="file,label", row="{file},{kind}"):
    """The images of a table that writes each kind and number so."""
    rows = [row.format(file=written.format(kind, n), kind=kind) for kind in KINDS for n in range(4)]
    with open("labels.csv", "w") as file:
        file.write("\n".join([header, *rows]))
    return open_datasets(load(None, "data.name=imagefolder", f"data.root={root}", "data.labels=labels.csv"))


@pytest.mark.parametrize(
    ("root", "written", "told"),
    [
        ("flat", "{}{}.jpg", None),
        ("flat", "{}{}", "names have no suffix: cat0 is cat0.jpg"),
        ("flat", "flat/{}{}.jpg", "flat/ is left out before each path"),
        ("flat", "C:\\pics\\{}{}.jpg", "C:/pics/ is left out before each path"),
        ("flat", "/home/someone/{}{}.jpg", "/home/someone/ is left out before each path"),
        ("flat", "pics/{}{}", "pics/cat0 is cat0.jpg"),
        ("photos", "photos/{}/{}.jpg", "photos/ is left out before each path"),
        ("photos", "{}\\{}.jpg", None),
        ("photos", "{}/{}", "names have no suffix: cat/0 is cat/0.jpg"),
    ],
)
def test_one_reading_makes_all_rows_right(home, root, written, told):
    found = opened(root, written)
    assert found.classes == KINDS and len(found.train) + len(found.val) == 8
    assert found.notes.get("labels") == told


def test_swapped_columns(home):
    found = opened("flat", "{}{}.jpg", "label,file", "{kind},{file}")
    assert found.classes == KINDS and "column file " in found.notes["labels"]


@pytest.mark.parametrize(
    ("root", "written", "says"),
    [
        (".", "{}{}.jpg", r"cat0.jpg is not there .*: change its path, .* such as flat/cat0.jpg$"),
        ("photos/cat", "{}/{}.jpg", r"photos/cat/cat/0.jpg is not there .* such as 0.jpg$"),
        ("flat", "{}{}.png", r"cat0.png is not there .* such as cat0.jpg$"),
        ("flat", "{}9.jpg", r"\(8 of 8 rows name .*: change its path, or remove the line; .* such as cat0.jpg"),
    ],
)
def test_what_was_found_and_what_to_type(home, root, written, says):
    with pytest.raises(SetupError, match=f"labels.csv, line 2: .*{says}"):
        opened(root, written)


def test_an_id_of_two_images_is_not_guessed(home):
    Image.new("RGB", (8, 8)).save("flat/dog3.png")
    with pytest.raises(SetupError, match=r"line 9: flat/dog3 "):
        opened("flat", "{}{}")


def test_two_columns_of_images(home):
    with pytest.raises(SetupError, match="columns image and mask "):
        opened("flat", "{}{}.jpg", "kind,image,mask", "{kind},{file},{file}")


def test_a_missing_image_does_not_make_another_column_the_images(home):
    """A mask that is there for each row is still a mask."""
    for n in range(4):
        (home / "flat" / f"dog{n}.jpg").rename(home / "flat" / f"mask{n}.jpg")
    rows = [f"cat{n}.jpg,mask{n}.jpg,{KINDS[n % 2]}" for n in range(4)]
    (home / "flat" / "cat2.jpg").unlink()
    (home / "masks.csv").write_text("\n".join(["image,mask,kind", *rows]))
    with pytest.raises(SetupError, match=r"masks\.csv, line 4: flat/cat2\.jpg "):
        open_datasets(load(None, "data.name=imagefolder", "data.root=flat", "data.labels=masks.csv"))


def test_a_folder_without_images(home):
    (home / "empty").mkdir()
    with pytest.raises(SetupError, match=r"\bempty .*\bno images"):
        opened("empty", "{}x{}.jpg")
