"""Labels from a CSV: the ways people write one, what is wrong with others, and a run from the
command line.
"""

import csv
import errno
import os
import re

import pytest
from PIL import Image

from tests.command_line import trainer
from trainer.data import open_datasets
from trainer.errors import RecipeError, SetupError
from trainer.recipe import load

CATS = ["cat", "dog"] * 4
NAMES = [f"{part}/{n}.png" for part in ("train", "val") for n in range(4)]


@pytest.fixture
def photos(tmp_path):
    for number, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new(
            "RGB",
            (8, 8),
            (number * 20,) * 3,
        ).save(tmp_path / name)
    (tmp_path / "other").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "other" / "2.png")
    return tmp_path


def found_in(folder, *words):
    return open_datasets(load(None, "data.name=imagefolder", f"data.root={folder}", *words))


def opened(folder, text, *words):
    (folder / "labels.csv").write_bytes(
        text if isinstance(text, bytes) else text.encode("utf-8-sig")
    )
    return found_in(folder, "data.labels=labels.csv", *words)


def table(header, cells, names=NAMES):
    return (
        "\n".join([header, *(f"{name},{cell}" for name, cell in zip(names, cells, strict=True))])
        + "\n"
    )


def test_one_class_an_image(photos):
    datasets = opened(photos, table("file,label", CATS))
    assert datasets.classes == ("cat", "dog")
    assert datasets.train.labels.tolist() == [0, 1, 0, 1]
    assert datasets.val.labels.tolist() == [0, 1, 0, 1]
    assert datasets.targets.shape == ()
    assert datasets.train.images[:, 0, 0, 0].tolist() == [0, 20, 40, 60]
    assert len(datasets.val) == 4


@pytest.mark.parametrize(
    "text",
    [
        table("file,labels", ["cat;dog", "", "dog", "cat ; bird"] * 2),
        table("file,bird,cat,dog", ["0,1,1", "0,0,0", "0,0,1", "1,1,0"] * 2),
        table("file,bird,cat,dog", ["0.0,1.0,1.0", " 0,0,0", "0,0,1 ", "1,1,0"] * 2) + "\n\n",
    ],
)
def test_several_classes_an_image(photos, text):
    datasets = opened(photos, text, "task.name=multilabel")
    assert datasets.classes == ("bird", "cat", "dog") and datasets.targets.shape == (3,)
    assert datasets.train.labels.tolist() == [
        [0, 1, 1],
        [0, 0, 0],
        [0, 0, 1],
        [1, 1, 0],
    ]


def test_multilabel_includes_classes_of_validation_images_alone(photos):
    datasets = opened(
        photos, table("file,labels", ["cat"] * 4 + ["cat;bird"] * 4), "task.name=multilabel"
    )
    assert datasets.classes == ("bird", "cat")
    assert datasets.val.labels.tolist() == [[1, 1]] * 4


def test_a_column_may_say_the_split_and_the_table_may_lie_elsewhere(photos, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "mine.csv"
    cells = [
        f"{part},{n % 2}"
        for n, part in enumerate(["train", "TRAIN", "Validation", "test", "val", "train"])
    ]
    other.write_text(table("path,Split,kind", cells, NAMES[:6]))
    actual = found_in(photos, f"data.labels={other}")
    assert (len(actual.train), len(actual.val)) == (3, 2)
    assert actual.classes == ("0", "1")
    assert str(other) in actual.holdout
    assert re.search(r"\b1 rows? of .*\btest\b", actual.notes["beside"])


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("", [], r"data\.labels=\S+ .*\bfile,label\b.*train/cat-1\.jpg"),
        (
            table("file,label", ["cat", "dog", "cat", "dog,x"] * 2),
            [],
            r"line 5: 3 cells\b.* 2$",
        ),
        (
            table("file,label", CATS).replace("val/2", "other/2"),
            [],
            r"line 8: .*\bother/2\.png .*`split`",
        ),
        (table("file,label", ["cat", "dog"] * 2, NAMES[:4]), [], r"labels\.csv .*\bsplit val\b"),
        (
            table("file,label", ["cat"] * 4 + ["cow"] * 4),
            [],
            r"line 6: .*\btraining\b.*'cow'$",
        ),
        (
            table("file,a,b", ["1,0"] * 8),
            [],
            r"labels\.csv .*\ba, b: data\.label_column=",
        ),
        (
            table("file,age", ["1", "nan"] * 4),
            ["task.name=regression"],
            r"line 3: nan .*data\.label_column=\[A,B\]",
        ),
        (table("file,label", ["cat", ""] * 4), [], r"line 3: train/1\.png .*\bno class$"),
        (table("", CATS).lstrip(), [], r"line 1 .*\bheader\b.*\bfile,label$"),
        (
            table("file,price", ["1,72"] * 8).replace(",", "\t", 1).replace("png,", "png\t"),
            ["task.name=regression"],
            r"line 2: 1,72 .*\bdot\b.*data\.label_column=\[A,B\]",
        ),
        (
            table("file,labels", ["cat|animal", "dog"] * 4),
            ["task.name=multilabel"],
            r"'cat\|animal': .* ; ",
        ),
        (
            table("file,labels", ["cat;animal", "dog;animal"] * 4),
            [],
            r"'cat;animal' .*task\.name=multilabel",
        ),
        (
            table("file,label", CATS, [f"photos/{name}" for name in NAMES]),
            [],
            r"line 2: .*photos/train/0\.png .*\bfile\b.*data\.root=.*data\.image_column=",
        ),
        (
            "label,file\n"
            + "".join(f"{kind},{name}\n" for kind, name in zip(CATS, NAMES, strict=True)),
            [],
            r"data\.image_column=",
        ),
        ("file,label\na.png,k\xe4tzchen".encode("latin-1"), [], r"\b0xe4\b.*\bUTF-8 \(Excel"),
        (table("file,label", CATS).encode("utf-16-le"), [], r"\bline 1 .*\bUTF-8 \(Excel"),
        (b'file,label\na.png,"' + b"x" * 200_000, [], rf"line 2: .*\({csv.field_size_limit()}\)"),
        (
            b"file;label\ntrain/0.png;cat\n",
            [],
            r"data\.labels=\S+ .*\bfile,label\b.*train/cat-1\.jpg",
        ),
    ],
)
def test_files_that_are_no_tables_are_answered_with_the_right_format(photos, text, words, says):
    with pytest.raises(SetupError, match=says):
        opened(photos, text, *words)


def swap(text, line, cell):
    """The table with another last cell in a line, counted from 1."""
    lines = text.split("\n")
    lines[line - 1] = f"{lines[line - 1].rpartition(',')[0]},{cell}"
    return "\n".join(lines)


PLAIN = table("file,label", CATS)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (swap(PLAIN, 5, '"dog'), 5, []),
        (swap(PLAIN, 9, '"dog'), 9, []),
        (swap(PLAIN, 5, 'dog"'), 5, []),
        (swap(PLAIN, 5, '"dog"s'), 5, []),
        (swap(swap(PLAIN, 4, '"cat'), 6, 'cat"'), 4, []),
        (swap(swap(PLAIN, 4, '"cat'), 6, '"cat'), 4, []),
        (PLAIN.replace("val/1", '"val/1'), 7, []),
        (
            swap(swap(table("file,label,note", ["cat,x", "dog,y"] * 4), 4, '"x'), 6, 'x"'),
            4,
            ["data.label_column=label"],
        ),
        (table("file,label,label", ["cat,dog"] * 8), 1, ["data.label_column=label"]),
        (table("file,cat,cat", ["0,1"] * 8), 1, ["task.name=multilabel"]),
        (swap(PLAIN, 5, "NaN"), 5, []),
        (swap(PLAIN, 5, "<NA>"), 5, []),
        (
            swap(table("file,labels", ["cat", "dog;cat"] * 4), 4, "cat;nan"),
            4,
            ["task.name=multilabel"],
        ),
        (swap(PLAIN, 5, "do\0g"), 5, []),
        (PLAIN + "\n" * 2000 + "train/0.png,\0", 2010, []),
        (swap(table("file,age", ["1.5"] * 8), 3, "1_000"), 3, ["task.name=regression"]),
    ],
)
def test_ambiguous_rows_are_refused_with_their_line(photos, text, line, words):
    with pytest.raises(SetupError, match=rf"line {line}\b"):
        opened(photos, text, *words)


def test_an_unclosed_quote_ends_the_command(photos):
    (photos / "labels.csv").write_text(swap(PLAIN, 5, '"dog'))
    words = [
        "recipe=digits",
        "mode=single",
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.labels=labels.csv",
    ]
    completed = trainer(*words, f"output={photos / 'run'}")
    assert completed.returncode == 3
    assert "labels.csv, line 5" in completed.stderr
    assert not (photos / "run").exists()


def test_quotes_that_have_one_reading_are_read(photos):
    text = PLAIN.replace("train/0.png,cat", '"train/0.png" , "cat" ').replace(",dog", ',"dog"')
    assert opened(photos, text).train.labels.tolist() == [0, 1, 0, 1]
    text = table("file,label,note", [f'{kind},"two ""lines""\nof a note, here"' for kind in CATS])
    assert opened(photos, text, "data.label_column=label").train.labels.tolist() == [0, 1, 0, 1]
    name = 'train/a\n"b".png'
    Image.new("RGB", (8, 8)).save(photos / name)
    assert len(opened(photos, PLAIN + '"train/a\n""b"".png",cat\n').train) == 5


@pytest.mark.parametrize("other", ["Cat", "cat\u200b", "ca t"])
def test_classes_that_look_alike_are_named(photos, other):
    datasets = opened(photos, table("file,label", ["cat", other] * 4))
    assert set(datasets.classes) == {"cat", other} and "cat" in datasets.notes["alike"]
    assert "alike" not in opened(photos, PLAIN).notes
    numbers = opened(photos, table("file,label", ["1", "1.0"] * 4))
    assert "1.0" in numbers.notes["alike"]
    columns = opened(photos, table(f"file,cat,{other}", ["0,1", "1,0"] * 4), "task.name=multilabel")
    assert "cat" in columns.notes["alike"]


def test_a_column_is_found_in_both_forms_of_unicode(photos):
    text = table("file,e\u0301cole,other", [f"{kind},x" for kind in CATS])
    assert opened(photos, text, "data.label_column=\u00e9cole").classes == ("cat", "dog")
    datasets = opened(
        photos, table("file,e\u0301cole,b", ["0,1", "1,0"] * 4), "task.name=multilabel"
    )
    assert datasets.classes == ("\u00e9cole", "b")


def test_tables_that_cannot_be_read(photos):
    with pytest.raises(SetupError, match=rf"nowhere\.csv .*\({os.strerror(errno.ENOENT)}\)"):
        found_in(photos, "data.labels=nowhere.csv")
    with pytest.raises(SetupError, match=r"type data\.root="):
        open_datasets(load(None, "data.name=imagefolder", "data.labels=odd.csv"))
    with pytest.raises(RecipeError, match=r"data\.name=imagefolder"):
        open_datasets(load(None, "data.name=digits", "data.labels=odd.csv"))
    with pytest.raises(RecipeError, match=r"task\.name=classification: 1 class names\b.* 2$"):
        opened(photos, table("file,label", ["cat"] * 8))
    with pytest.raises(RecipeError, match=r"task\.name=multilabel: .*\b0 or 1\b.*\b1 to 2$"):
        opened(photos, table("file,a,b", ["1,2"] * 8), "task.name=multilabel")


def test_an_image_has_one_line(photos):
    """Else it might be held out under one label, and trained on under another."""
    text = table("file,label", CATS)
    for line in ("./train/0.png,cat", "train\\0.png,dog", f"{photos}/train/0.png,dog"):
        with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bline 2\b.*: keep one"):
            opened(photos, f"{text}{line}\n")
    with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bcat;dog$"):
        opened(photos, f"{text}train/0.png,dog\n", "task.name=multilabel")


def test_measures_are_no_classes(photos):
    says = (
        "age holds 4 different numbers for 4 images, such as 1.5: "
        ".*=regression; .* as words, such as class-1.5"
    )
    with pytest.raises(SetupError, match=says):
        opened(photos, table("file,age", [f"{n / 2}" for n in range(8)]))
    assert opened(photos, table("file,dose", ["0.5", "1.0"] * 4)).classes == ("0.5", "1.0")
    words = [f"class-{n / 2}" for n in range(4)] * 2
    assert opened(photos, table("file,age", words)).classes == tuple(words[:4])
    assert opened(photos, table("file,digit", ["0", "1", "2", "3"] * 2)).classes == (
        "0",
        "1",
        "2",
        "3",
    )


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("TRUE", "FALSE"), ("1.0", "0.0")])
def test_columns_of_true_and_false_are_classes(photos, yes, no):
    """pandas.get_dummies and R write such columns."""
    datasets = opened(
        photos, table("file,cat,dog", [f"{yes},{no}", f"{yes},{yes}"] * 4), "task.name=multilabel"
    )
    assert datasets.classes == ("cat", "dog")
    assert datasets.train.labels.tolist() == [[1, 0], [1, 1]] * 2
    datasets = opened(photos, table("file,defect", [yes, no] * 4), "task.name=multilabel")
    assert datasets.classes == ("defect",)
    assert datasets.train.labels.tolist() == [
        [1],
        [0],
        [1],
        [0],
    ]


@pytest.mark.parametrize("separator", ["\t", ","])
def test_separators_empty_lines_and_ends_of_lines(photos, separator):
    text = (
        "\n" + table("file,label", CATS).replace("\n", "\r\n").replace(",", separator) + "\r\n\r\n"
    )
    datasets = opened(photos, text)
    assert datasets.classes == ("cat", "dog")
    assert datasets.train.labels.tolist() == [0, 1, 0, 1]


def test_columns_are_chosen_by_name(photos):
    rows = [f"{9 - n},cat{n % 2},{n / 2},{name}" for n, name in enumerate(NAMES)]
    text = "\n".join(["row,Breed,weight,photo", *rows])
    with pytest.raises(SetupError, match=r"line 2: .*data\.image_column="):
        opened(photos, text)
    words = "data.image_column=photo"
    with pytest.raises(SetupError, match=r"row, Breed, weight: data\.label_column=NAME"):
        opened(photos, text, words)
    datasets = opened(photos, text, words, "data.label_column=Breed")
    assert datasets.classes == ("cat0", "cat1")
    assert datasets.train.labels.tolist() == [0, 1, 0, 1]
    datasets = opened(photos, text, words, "data.label_column=[weight,row]", "task.name=regression")
    assert datasets.classes == ("weight", "row")
    assert datasets.val.labels.tolist() == [
        [2, 5],
        [2.5, 4],
        [3, 3],
        [3.5, 2],
    ]
    for argument in (["data.label_column=kind", words], ["data.image_column=file"]):
        with pytest.raises(SetupError, match=rf"{argument[0]} .*\brow, Breed, weight"):
            opened(photos, text, *argument)
