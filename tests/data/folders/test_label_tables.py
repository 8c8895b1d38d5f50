"""Labels from a CSV: the ways people write one, what is wrong with others, and a run from the command line."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.command_line import QUIET, ok, result
from trainer.data import open_datasets
from trainer.errors import RecipeError, SetupError
from trainer.recipe import load

NAMES = [f"{part}/{n}.png" for part in ("train", "val") for n in range(4)]


@pytest.fixture
def photos(tmp_path):
    for number, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20,) * 3).save(tmp_path / name)
    (tmp_path / "other").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "other" / "2.png")
    return tmp_path


def opened(folder, text, *words):
    (folder / "labels.csv").write_text(text, encoding="utf-8-sig")
    return open_datasets(load(None, "data.name=imagefolder", f"data.root={folder}", "data.labels=labels.csv", *words))


def table(header, cells, names=NAMES):
    return "\n".join([header, *(f"{name},{cell}" for name, cell in zip(names, cells, strict=True))]) + "\n"


def test_one_class_an_image(photos):
    found = opened(photos, table("file,label", ["cat", "dog", "cat", "dog"] * 2))
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


def test_one_column_of_0_and_1_is_one_class(photos):
    found = opened(photos, table("file,defect", ["0", "1"] * 4), "task.name=multilabel")
    assert found.classes == ("defect",) and found.train.labels.tolist() == [[0], [1], [0], [1]]


def test_a_class_that_only_held_out_images_have_is_known_to_multilabel(photos):
    found = opened(photos, table("file,labels", ["cat"] * 4 + ["cat;bird"] * 4), "task.name=multilabel")
    assert found.classes == ("bird", "cat") and found.val.labels.tolist() == [[1, 1]] * 4


def test_paths_as_find_prints_them(photos):
    cells = ["cat", "dog"] * 4
    assert len(opened(photos, table("file,label", cells, [f"./{name}" for name in NAMES])).val) == 4


def test_numbers(photos):
    found = opened(photos, table("file,age,height", [f"{n},{n / 2}" for n in range(8)]), "task.name=regression")
    assert found.classes == ("age", "height") and found.val.labels.tolist() == [[4, 2], [5, 2.5], [6, 3], [7, 3.5]]


def test_a_column_may_say_the_split_and_the_table_may_lie_elsewhere(photos, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "mine.csv"
    cells = [f"{part},{n % 2}" for n, part in enumerate(["train", "TRAIN", "Validation", "test", "val", "train"])]
    other.write_text(table("path,Split,kind", cells, NAMES[:6]))
    found = open_datasets(load(None, "data.name=imagefolder", f"data.root={photos}", f"data.labels={other}"))
    assert (len(found.train), len(found.val)) == (3, 2) and found.classes == ("0", "1")
    assert str(other) in found.split and re.search(r"\b1 rows? of .*\btest\b", found.notes["beside"])


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("", [], "needs a header and rows .* such as file,label"),
        ("file\ntrain/0.png\n", [], "needs a header and rows"),
        (table("file,label", ["cat", "dog", "cat", "dog,x"] * 2), [], "line 5: 3 cells, and the header has 2"),
        (
            table("file,label", ["cat", "dog", "cat", "dog"] * 2).replace("val/2", "other/2"),
            [],
            "line 8: nothing says whether",
        ),
        (table("file,label", ["cat", "dog"] * 2, NAMES[:4]), [], "no row of split val"),
        (table("file,label", ["cat"] * 4 + ["cow"] * 4), [], "line 6: no training image has the class 'cow'"),
        (table("file,label", ["cat", "dog"] * 4).replace("0.png", "9.png"), [], "line 2: .*train/9.png is not there"),
        (
            table("file,a,b", ["1,0"] * 8),
            [],
            "a column with each image's class; its other columns are a, b",
        ),
        (table("file,age", ["young"] * 8), ["task.name=regression"], "line 2: young are not all numbers"),
        (table("file,a,b", ["1,2"] * 8), ["task.name=multilabel"], "labels must be 0 or 1, found 1 to 2"),
        (table("file,age", ["1", "nan"] * 4), ["task.name=regression"], "line 3: nan are not all numbers"),
        (table("file,label", ["cat", ""] * 4), [], "line 3: train/1.png has no class"),
        (table("file,label", ["cat"] * 8), [], "1 class names are given, and a classifier needs at least 2"),
    ],
)
def test_what_is_no_table(photos, text, words, says):
    with pytest.raises((SetupError, RecipeError), match=says):
        opened(photos, text, *words)


def test_tables_that_cannot_be_read(photos):
    words = ["data.name=imagefolder", f"data.root={photos}"]
    with pytest.raises(SetupError, match=r"nowhere\.csv .*No such file"):
        open_datasets(load(None, *words, "data.labels=nowhere.csv"))
    (photos / "odd.csv").write_bytes(np.arange(128, 256, dtype=np.uint8).tobytes())
    with pytest.raises(SetupError, match=r"odd\.csv .*read"):
        open_datasets(load(None, *words, "data.labels=odd.csv"))
    with pytest.raises(SetupError, match=r"type data\.root="):
        open_datasets(load(None, "data.name=imagefolder", "data.labels=odd.csv"))
    with pytest.raises(RecipeError, match=r"data\.name=imagefolder"):
        open_datasets(load(None, "data.name=digits", "data.labels=odd.csv"))


CATS = ["cat", "dog"] * 4


def test_a_table_without_a_header_loses_no_image(photos):
    found = opened(photos, table("", CATS).lstrip())
    assert len(found.train) == 4 and found.train.labels.tolist() == [0, 1, 0, 1]
    assert "header" in found.notes["labels"] and "line 1 " in found.notes["labels"]
    found = opened(photos, table("", ["cat;dog", ""] * 4).lstrip(), "task.name=multilabel")
    assert found.train.labels.tolist() == [[1, 1], [0, 0]] * 2
    with pytest.raises(SetupError, match=r"line 1 .*\bfile,a,b\b"):
        opened(photos, table("", ["1,2"] * 8).lstrip(), "task.name=regression")


def test_an_image_has_one_line(photos):
    """Else it might be held out under one label, and trained on under another."""
    text = table("file,label", CATS)
    found = opened(photos, f"{text}./val/0.png,cat\nval/1.png,dog\n")
    assert (len(found.train), len(found.val)) == (4, 4)
    assert found.notes["labels"] == "2 repeated lines left out"
    with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bline 2\b.*\bcat\b"):
        opened(photos, f"{text}train/0.png,dog\n")
    with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bcat;dog$"):
        opened(photos, f"{text}train/0.png,dog\n", "task.name=multilabel")
    with pytest.raises(SetupError, match=r"line 10: train/0\.png .*\bline 2\b.*\bval\b"):
        parts = [f"cat,{part}" for part in ("val", "train") * 4]
        opened(photos, table("file,label,split", parts) + "train/0.png,cat,train\n")


def test_rows_repeated_for_training_are_trained_on_as_often(photos):
    """A way to see rare classes more often; where nothing divides the images, a copy might be held out."""
    found = opened(photos, table("file,label", CATS) + "train/0.png,cat\n" * 2)
    assert found.train.labels.tolist() == [0, 1, 0, 1, 0, 0] and len(found.val) == 4 and "labels" not in found.notes
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 20, 40, 60, 0, 0]
    parts = [
        f"{kind},{part}"
        for kind, part in zip(CATS, ["train", "val"] * 2 + ["train", "train", "val", "val"], strict=True)
    ]
    again = "train/0.png,cat,train\ntrain/1.png,dog,val\n"
    found = opened(photos, table("file,label,split", parts) + again)
    assert (len(found.train), len(found.val)) == (5, 4)
    assert found.notes["labels"] == "1 repeated line left out"
    for name in NAMES:
        (photos / "flat").mkdir(exist_ok=True)
        (photos / name).rename(photos / "flat" / name.replace("/", "-"))
    flat = [f"flat/{name.replace('/', '-')}" for name in NAMES]
    found = opened(photos, table("file,label", CATS, flat) + f"{flat[0]},cat\n")
    assert len(found.train) + len(found.val) == 8


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "index"])
def test_the_index_of_pandas_is_not_looked_at(photos, name):
    rows = [f"{n},{file},{label}" for n, (file, label) in enumerate(zip(NAMES, CATS, strict=True))]
    found = opened(photos, "\n".join([f"{name},file,label", *rows]))
    assert found.classes == ("cat", "dog") and len(found.val) == 4
    assert "column file " in found.notes["labels"]
    rows = [f"{n},{file},{n / 2}" for n, file in enumerate(NAMES, 1)]
    found = opened(photos, "\n".join([f"{name},file,height", *rows]), "task.name=regression")
    assert found.classes == ("height",) and found.val.labels.tolist() == [[2.5], [3], [3.5], [4]]


def test_a_split_that_counts_the_rows_is_no_index(photos):
    rows = [f"{n},{file},{label},1" for n, (file, label) in enumerate(zip(NAMES, CATS, strict=True))]
    with pytest.raises(SetupError, match=r"line 2: .*\btrain/0\.png\b"):
        opened(photos, "\n".join(["split,file,label,other", *rows]))


def test_columns_in_another_order(photos):
    """And one that counts is a value where its name does not say otherwise."""
    rows = [f"{n},{file}" for n, file in enumerate(NAMES)]
    found = opened(photos, "\n".join(["age,file", *rows]), "task.name=regression")
    assert found.classes == ("age",) and found.train.labels.tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators(photos, separator):
    found = opened(photos, table("file,label", CATS).replace(",", separator))
    assert found.classes == ("cat", "dog") and len(found.train) == 4 and "labels" not in found.notes
    text = table("file|height", [f"{n},5" for n in range(8)]).replace(",", "|", 1).replace("png,", "png|")
    found = opened(photos, text.replace("|", separator), "task.name=regression")
    assert found.train.labels.tolist() == [[0.5], [1.5], [2.5], [3.5]]  # a decimal comma


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (["999", "1,250"] * 4, "line 3: the comma of 1,250 in price may stand"),
        (["999", "1,250,000"] * 4, "line 3: the comma of 1,250,000 in price"),
        (["0.5", "2,5"] * 4, "line 3: the comma of 2,5 in price"),
        (["1.250,5", "7"] * 4, "line 2: the comma of 1.250,5 in price"),
        (["5"] * 4 + ["-1,250"] * 4, "line 6: the comma of -1,250 in price"),
        (["x,y", "1.5"] * 4, "line 2: x,y are not all numbers"),
        (["0,125", "1,250"] * 4, None),
        (["1,5", "1,250"] * 4, None),
    ],
)
def test_a_comma_between_thousands_is_not_taken_for_a_decimal_one(photos, separator, cells, says):
    text = "\n".join(["file,price".replace(",", separator), *map(separator.join, zip(NAMES, cells, strict=True))])
    if says is None:
        found = opened(photos, text, "task.name=regression").train.labels
        assert found.tolist() == [[float(cell.replace(",", "."))] for cell in cells[:4]]
        return
    with pytest.raises(SetupError, match=says):
        opened(photos, text, "task.name=regression")


def test_measures_are_no_classes(photos):
    says = "age holds 4 different numbers for 4 images, such as 1.5: .*=regression; .* as words, such as class-1.5"
    with pytest.raises(SetupError, match=says):
        opened(photos, table("file,age", [f"{n / 2}" for n in range(8)]))
    assert opened(photos, table("file,dose", ["0.5", "1.0"] * 4)).classes == ("0.5", "1.0")
    words = [f"class-{n / 2}" for n in range(4)] * 2
    assert opened(photos, table("file,age", words)).classes == tuple(words[:4])
    assert opened(photos, table("file,digit", ["0", "1", "2", "3"] * 2)).classes == ("0", "1", "2", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(["mode=ddp", "nproc=2"], marks=pytest.mark.full("each rank reads images, as one does below")),
        ["mode=pipeline", "nproc=2", "pipeline.microbatches=2"],
    ],
    ids=["ddp", "pipeline"],
)
def test_large_photos_of_a_table_are_learned_by_workers(mode, tmp_path):
    """Photos with up to two labels, read as they are needed, on ranks that read images and ranks that do not."""
    rows = []
    for part, count in (("train", 24), ("val", 9)):
        (tmp_path / "photos" / part).mkdir(parents=True)
        for n in range(count):
            pixels = np.zeros((80, 100, 3), np.uint8)
            pixels[..., 0] = 255 * (n % 2)
            pixels[..., 2] = 255 * (n % 3 == 0)
            Image.fromarray(pixels).save(tmp_path / "photos" / part / f"{n}.jpg")
            rows.append(f"{part}/{n}.jpg," + ";".join(["red"] * (n % 2) + ["blue"] * (n % 3 == 0)))
    (tmp_path / "photos" / "labels.csv").write_text("\n".join(["file,labels", *rows]))
    words = ["data.name=imagefolder", f"data.root={tmp_path / 'photos'}", "data.labels=labels.csv", "data.workers=1"]
    words += ["task.name=multilabel", "model.name=cnn_gn", "data.image_size=72", "batch_size=8", "epochs=8"]
    words += ["optimizer.name=adamw", "optimizer.lr=0.01", *mode, *QUIET, "save.every_epochs=8"]
    ok(*words, f"output={tmp_path / 'run'}")
    found = result(tmp_path / "run")
    assert found["best_f1"] > 0.9 and found["data"]["val_samples"] == 9 and "val_top1" not in found
    told = ok("evaluate", f"checkpoint={tmp_path / 'run'}").stdout
    assert "F1 " in told and "on 9 held-out images" in told


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["cat|animal", "dog|animal"], r"'cat\|animal' looks like .* with \| between them: write cat;animal,"),
        (["cat|animal", "dog"], r"with \| between them"),
        (
            ['"cat, animal"', '"dog, animal"'],
            "with a comma between them: write cat;animal, or a column of 0 and 1 for each",
        ),
        (["cat animal", "dog animal", "cat", "dog"], "with a blank between them: write cat;animal"),
        (["haze primary", "clear primary", "haze", "clear", "haze clear"], "write haze;primary"),
    ],
)
def test_another_separator_between_classes_is_no_part_of_their_names(photos, labels, says):
    cells = (labels * 8)[:8]
    with pytest.raises(SetupError, match=says):
        opened(photos, table("file,labels", cells), "task.name=multilabel")
    meant = [cell.strip('"').replace(", ", ";").replace("|", ";").replace(" ", ";") for cell in cells]
    names = tuple(sorted({name for cell in meant for name in cell.split(";")}))
    assert opened(photos, table("file,labels", meant), "task.name=multilabel").classes == names


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["golden retriever", "siamese cat"], ("golden retriever", "siamese cat")),
        (['"crane, bird"', "dog"], ("crane, bird", "dog")),
        (["a, b;c", "c"], None),
    ],
)
def test_names_with_blanks_and_commas_are_names(photos, labels, names):
    cells = [f'"{label}"' if "," in label and '"' not in label else label for label in labels]
    found = opened(photos, table("file,labels", cells * 4), "task.name=multilabel")
    assert found.classes == (names or ("a, b", "c"))
    shown = ", ".join(
        f"{name} {int(n)} + {int(m)}"
        for name, n, m in zip(found.classes, found.train.labels.sum(0), found.val.labels.sum(0), strict=True)
    )
    assert found.notes["classes"] == f"{shown} (training + held out)"


def test_several_classes_where_one_is_learned_are_told(photos):
    with pytest.raises(SetupError, match=r"'cat;animal' .*task\.name=multilabel"):
        opened(photos, table("file,labels", ["cat;animal", "dog;animal"] * 4))
    assert opened(photos, table("file,labels", ["a;b", "c"] * 4)).classes == ("a;b", "c")


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("TRUE", "FALSE"), ("1.0", "0.0")])
def test_columns_of_true_and_false_are_classes(photos, yes, no):
    """As pandas.get_dummies and R write them."""
    found = opened(photos, table("file,cat,dog", [f"{yes},{no}", f"{yes},{yes}"] * 4), "task.name=multilabel")
    assert found.classes == ("cat", "dog") and found.train.labels.tolist() == [[1, 0], [1, 1]] * 2
    found = opened(photos, table("file,defect", [yes, no] * 4), "task.name=multilabel")
    assert found.classes == ("defect",) and found.train.labels.tolist() == [[1], [0], [1], [0]]


def test_columns_are_chosen_by_name(photos):
    rows = [f"{9 - n},cat{n % 2},{n / 2},{name},{name}" for n, name in enumerate(NAMES)]
    text = "\n".join(["row,Breed,weight,thumb,photo", *rows])
    with pytest.raises(SetupError, match=r"\bthumb and photo\b.*data\.image_column=thumb\b"):
        opened(photos, text)
    words = "data.image_column=photo"
    says = r"its other columns are row, Breed, weight, thumb: data.label_column=row"
    with pytest.raises(SetupError, match=says):
        opened(photos, text, words)
    found = opened(photos, text, words, "data.label_column=breed")
    assert found.classes == ("cat0", "cat1") and found.train.labels.tolist() == [0, 1, 0, 1]
    assert "column photo names" in found.notes["labels"]
    found = opened(photos, text, words, "data.label_column=[weight,row]", "task.name=regression")
    assert found.classes == ("weight", "row") and found.val.labels.tolist() == [[2, 5], [2.5, 4], [3, 3], [3.5, 2]]
    with pytest.raises(SetupError, match=r"data\.label_column=kind .*\brow, Breed, weight"):
        opened(photos, text, words, "data.label_column=kind")
    with pytest.raises(SetupError, match=r"data\.image_column=file .*\brow, Breed, weight"):
        opened(photos, text, "data.image_column=file")
    with pytest.raises(SetupError, match=r"numbers.*data\.label_column=\[row,Breed\]"):
        opened(photos, text, words, "task.name=regression")
    with pytest.raises(RecipeError, match=r"data\.label_column .*data\.labels="):
        open_datasets(load(None, "data.name=imagefolder", f"data.root={photos}", "data.label_column=breed"))


def test_the_likeliest_column_is_the_one_to_type(photos):
    with pytest.raises(SetupError, match=r"\bcolour, label, x\b.*data\.label_column=label\b"):
        opened(photos, table("file,colour,label,x", ["red,cat,1", "blue,dog,2"] * 4))


@pytest.mark.parametrize(
    "text",
    [
        table("file|label", CATS).replace(",", "|"),
        "sep=;\r\n" + table("file,label", CATS).replace(",", ";").replace("\n", "\r\n"),
        '"","file","label"\n' + "".join(f'"{n + 1}","{name}","{CATS[n]}"\n' for n, name in enumerate(NAMES)),
        table("file,label", CATS).replace("\n", "\r\n") + "\r\n,\r\n\r\n",
        table("file;label", CATS).replace(",", ";").replace("\n", "\r"),
    ],
    ids=["pipes", "Excel's first line", "R", "Excel's empty lines", "old Macintosh"],
)
def test_tables_as_programs_write_them(photos, text):
    found = opened(photos, text)
    assert found.classes == ("cat", "dog") and found.train.labels.tolist() == [0, 1, 0, 1] and len(found.val) == 4


def test_images_that_no_line_names_are_counted(photos):
    """Of the folders that lines name images of: others may be for something else."""
    found = opened(photos, table("file,label", CATS[:5], NAMES[:5]))
    assert found.notes["labels"].startswith("3 images ")
    assert "labels" not in opened(photos, table("file,label", CATS)).notes


def test_a_held_out_image_counts_once_however_often_it_stands_there(photos):
    """And under whatever spelling."""
    again = "".join(f"{name},{cat}\n" for name, cat in zip(NAMES[4:] * 2, CATS[4:] * 2, strict=True))
    found = opened(photos, table("file,label", CATS) + again + "val/../val/1.png,dog\nval//0.png,cat\n")
    assert len(found.val) == 4 and found.notes["labels"].startswith("10 repeated lines left out")
