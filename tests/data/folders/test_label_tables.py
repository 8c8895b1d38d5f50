"""Labels from a CSV: the ways people write one, what is wrong with others, and a run from the command line."""

import re

import pytest
from PIL import Image

from trainer.data import open_datasets
from trainer.errors import RecipeError, SetupError
from trainer.recipe import load

CATS = ["cat", "dog"] * 4
NAMES = [f"{part}/{n}.png" for part in ("train", "val") for n in range(4)]


@pytest.fixture
def photos(tmp_path):
    for number, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20,) * 3).save(tmp_path / name)
    (tmp_path / "other").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "other" / "2.png")
    return tmp_path


def found_in(folder, *words):
    return open_datasets(load(None, "data.name=imagefolder", f"data.root={folder}", *words))


def opened(folder, text, *words):
    (folder / "labels.csv").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8-sig"))
    return found_in(folder, "data.labels=labels.csv", *words)


def table(header, cells, names=NAMES):
    return "\n".join([header, *(f"{name},{cell}" for name, cell in zip(names, cells, strict=True))]) + "\n"


def test_one_class_an_image(photos):
    found = opened(photos, table("file,label", CATS))
    assert found.classes == ("cat", "dog") and found.train.labels.tolist() == [0, 1, 0, 1]
    assert found.val.labels.tolist() == [0, 1, 0, 1] and found.targets.shape == ()
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 20, 40, 60] and len(found.val) == 4


@pytest.mark.parametrize(
    "text",
    [
        table("file,labels", ["cat;dog", "", "dog", "cat ; bird"] * 2),
        table("file,bird,cat,dog", ["0,1,1", "0,0,0", "0,0,1", "1,1,0"] * 2),
        table("file,bird,cat,dog", ["0.0,1.0,1.0", " 0,0,0", "0,0,1 ", "1,1,0"] * 2) + "\n\n",
    ],
)
def test_several_classes_an_image(photos, text):
    found = opened(photos, text, "task.name=multilabel")
    assert found.classes == ("bird", "cat", "dog") and found.targets.shape == (3,)
    assert found.train.labels.tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 0]]


def test_a_class_that_only_held_out_images_have_is_known_to_multilabel(photos):
    found = opened(photos, table("file,labels", ["cat"] * 4 + ["cat;bird"] * 4), "task.name=multilabel")
    assert found.classes == ("bird", "cat") and found.val.labels.tolist() == [[1, 1]] * 4


def test_a_column_may_say_the_split_and_the_table_may_lie_elsewhere(photos, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "mine.csv"
    cells = [f"{part},{n % 2}" for n, part in enumerate(["train", "TRAIN", "Validation", "test", "val", "train"])]
    other.write_text(table("path,Split,kind", cells, NAMES[:6]))
    found = found_in(photos, f"data.labels={other}")
    assert (len(found.train), len(found.val)) == (3, 2) and found.classes == ("0", "1")
    assert str(other) in found.holdout and re.search(r"\b1 rows? of .*\btest\b", found.notes["beside"])


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("", [], "needs a header and rows .* such as file,label"),
        (table("file,label", ["cat", "dog", "cat", "dog,x"] * 2), [], "line 5: 3 cells, and the header has 2"),
        (table("file,label", CATS).replace("val/2", "other/2"), [], "line 8: nothing says whether"),
        (table("file,label", ["cat", "dog"] * 2, NAMES[:4]), [], "no row of split val"),
        (table("file,label", ["cat"] * 4 + ["cow"] * 4), [], "line 6: no training image has the class 'cow'"),
        (table("file,a,b", ["1,0"] * 8), [], "a column with each image's class; its other columns are a, b"),
        (table("file,age", ["1", "nan"] * 4), ["task.name=regression"], "line 3: nan are not all numbers"),
        (table("file,label", ["cat", ""] * 4), [], "line 3: train/1.png has no class"),
        (table("", CATS).lstrip(), [], "line 1 names an image: put a header above it"),
        (table("file,price", ["1,72"] * 8).replace(",", "\t", 1).replace("png,", "png\t"), ["task.name=regression"],
         "1,72 are not all numbers: write a dot before decimals"),
        (table("file,labels", ["cat|animal", "dog"] * 4), ["task.name=multilabel"], "write ; between classes"),
        (table("file,labels", ["cat;animal", "dog;animal"] * 4), [], r"'cat;animal' .*task\.name=multilabel"),
        (table("file,label", CATS, [f"photos/{name}" for name in NAMES]), [],
         r"line 2: .*photos/train/0\.png is not there: column file has paths below data\.root="),
        ("label,file\n" + "".join(f"{kind},{name}\n" for kind, name in zip(CATS, NAMES, strict=True)), [],
         r"data\.image_column="),
        ("file,label\na.png,k\xe4tzchen".encode("latin-1"), [], "save it as UTF-8"),
        (table("file,label", CATS).encode("utf-16-le"), [], "save it as UTF-8"),
        (b'file,label\na.png,"' + b"x" * 200_000, [], "field larger than field limit"),
        (b"file;label\ntrain/0.png;cat\n", [], "needs a header and rows with commas or tabs"),
    ],
)  # fmt: skip
def test_what_is_no_table_says_what_to_type(photos, text, words, says):
    with pytest.raises(SetupError, match=says):
        opened(photos, text, *words)


def test_tables_that_cannot_be_read(photos):
    with pytest.raises(SetupError, match=r"nowhere\.csv .*No such file"):
        found_in(photos, "data.labels=nowhere.csv")
    with pytest.raises(SetupError, match=r"type data\.root="):
        open_datasets(load(None, "data.name=imagefolder", "data.labels=odd.csv"))
    with pytest.raises(RecipeError, match=r"data\.name=imagefolder"):
        open_datasets(load(None, "data.name=digits", "data.labels=odd.csv"))
    with pytest.raises(RecipeError, match="1 class names are given, and a classifier needs at least 2"):
        opened(photos, table("file,label", ["cat"] * 8))
    with pytest.raises(RecipeError, match="labels must be 0 or 1, found 1 to 2"):
        opened(photos, table("file,a,b", ["1,2"] * 8), "task.name=multilabel")


def test_an_image_has_one_line(photos):
    """Else it might be held out under one label, and trained on under another."""
    text = table("file,label", CATS)
    for line in ("./train/0.png,cat", "train\\0.png,dog"):
        with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bline 2\b.*: keep one"):
            opened(photos, f"{text}{line}\n")
    with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bcat;dog$"):
        opened(photos, f"{text}train/0.png,dog\n", "task.name=multilabel")


def test_measures_are_no_classes(photos):
    says = "age holds 4 different numbers for 4 images, such as 1.5: .*=regression; .* as words, such as class-1.5"
    with pytest.raises(SetupError, match=says):
        opened(photos, table("file,age", [f"{n / 2}" for n in range(8)]))
    assert opened(photos, table("file,dose", ["0.5", "1.0"] * 4)).classes == ("0.5", "1.0")
    words = [f"class-{n / 2}" for n in range(4)] * 2
    assert opened(photos, table("file,age", words)).classes == tuple(words[:4])
    assert opened(photos, table("file,digit", ["0", "1", "2", "3"] * 2)).classes == ("0", "1", "2", "3")


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("TRUE", "FALSE"), ("1.0", "0.0")])
def test_columns_of_true_and_false_are_classes(photos, yes, no):
    """As pandas.get_dummies and R write them."""
    found = opened(photos, table("file,cat,dog", [f"{yes},{no}", f"{yes},{yes}"] * 4), "task.name=multilabel")
    assert found.classes == ("cat", "dog") and found.train.labels.tolist() == [[1, 0], [1, 1]] * 2
    found = opened(photos, table("file,defect", [yes, no] * 4), "task.name=multilabel")
    assert found.classes == ("defect",) and found.train.labels.tolist() == [[1], [0], [1], [0]]


@pytest.mark.parametrize("separator", ["\t", ","])
def test_separators_empty_lines_and_ends_of_lines(photos, separator):
    text = "\n" + table("file,label", CATS).replace("\n", "\r\n").replace(",", separator) + "\r\n\r\n"
    found = opened(photos, text)
    assert found.classes == ("cat", "dog") and found.train.labels.tolist() == [0, 1, 0, 1]


def test_columns_are_chosen_by_name(photos):
    rows = [f"{9 - n},cat{n % 2},{n / 2},{name}" for n, name in enumerate(NAMES)]
    text = "\n".join(["row,Breed,weight,photo", *rows])
    with pytest.raises(SetupError, match=r"line 2: .*data\.image_column="):
        opened(photos, text)
    words = "data.image_column=photo"
    with pytest.raises(SetupError, match=r"row, Breed, weight: data\.label_column=NAME"):
        opened(photos, text, words)
    found = opened(photos, text, words, "data.label_column=Breed")
    assert found.classes == ("cat0", "cat1") and found.train.labels.tolist() == [0, 1, 0, 1]
    found = opened(photos, text, words, "data.label_column=[weight,row]", "task.name=regression")
    assert found.classes == ("weight", "row") and found.val.labels.tolist() == [[2, 5], [2.5, 4], [3, 3], [3.5, 2]]
    for given in (["data.label_column=kind", words], ["data.image_column=file"]):
        with pytest.raises(SetupError, match=rf"{given[0]} .*\brow, Breed, weight"):
            opened(photos, text, *given)
    with pytest.raises(RecipeError, match=r"data\.label_column .*data\.labels="):
        found_in(photos, "data.label_column=breed")
