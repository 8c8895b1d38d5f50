"""A class has one name and one place, however its images are stored: in folders, a table, tars,
Parquet.
"""

import unicodedata

import numpy as np
import pytest

from tests.data.archives.making import in_folders, jpeg, opened, parquet, tarred, with_classes
from tests.data.photo_folders import names_of, photo
from tests.data.photo_folders import opened as opened_folder
from trainer.data.folders.layout import class_names
from trainer.errors import SetupError
from trainer.models import zoo

NFC = "\u00e9cole"
NFD = unicodedata.normalize("NFD", NFC)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({"a.tar": ["animal/indoor", "animal/ship"], "b.tar": ["ship/harbour"]}, "animal ship"),
        ({"a.tar": ["deep/er/animal/indoor", "deep/er/ship"]}, "animal ship"),
        ({"ant.tar": ["ant"], "bee.tar": ["bee"]}, "ant bee"),
        (
            {
                "train.tar": ["x_train/ant", "x_train/bee/old"],
                "val.tar": ["x_val/bee", "x_val/ant"],
            },
            "ant bee",
        ),
        ({"train.tar": ["ant", "bee"], "val.tar": ["bee"]}, "ant bee"),
    ],
)
def test_the_class_in_a_tar_is_the_outermost_folder_below_what_all_share(tmp_path, parts, wanted):
    for name, folders in parts.items():
        tarred(tmp_path / name, in_folders(dict.fromkeys(folders, 4)))
    datasets = opened(tmp_path)
    assert " ".join(datasets.classes) == wanted
    for source in (datasets.train, datasets.val):
        named = [name.partition(".tar/")[2].split("/") for name in names_of(source)]
        assert all(
            datasets.classes[label] in name
            for name, label in zip(named, source.labels, strict=True)
        )


def test_a_training_part_without_images(tmp_path):
    tarred(tmp_path / "train-0.tar", [("README", b"x")])
    tarred(tmp_path / "val-0.tar", in_folders({"ant": 2, "bee": 2}))
    with pytest.raises(SetupError, match=r"data\.root=.* no images"):
        opened(tmp_path)


def both_forms(root, kind):
    """Return an opened data set of two classes; one class is written in two ways."""
    names = [NFD, NFC, "zoo", NFC, NFD, "zoo"]
    if kind == "folders":
        for n, name in enumerate(names):
            photo(root / name / f"{n}.png")
        return opened_folder(root)
    if kind == "table":
        for n, _ in enumerate(names):
            photo(root / f"{n}.png")
        (root / "l.csv").write_text(
            "file,label\n" + "".join(f"{n}.png,{name}\n" for n, name in enumerate(names))
        )
        return opened_folder(root, "data.labels=l.csv")
    if kind == "tar":
        return opened(
            tarred(root / "a.tar", [(f"{name}/{n}.jpg", jpeg(n)) for n, name in enumerate(names)])
        )
    if kind == "cls":
        return opened(tarred(root / "a.tar", with_classes(names)))
    return opened(
        parquet(
            root / "a.parquet",
            [jpeg(n) for n in range(6)],
            names,
        )
    )


@pytest.mark.parametrize("kind", ["folders", "table", "tar", "cls", "parquet"])
def test_a_name_in_two_forms_is_one_class_and_reported(tmp_path, kind):
    actual = both_forms(tmp_path, kind)
    assert sorted(actual.classes) == sorted((NFC, "zoo"))
    labels = np.concatenate([actual.train.labels, actual.val.labels])
    assert np.bincount(labels)[actual.classes.index(NFC)] == 4
    assert len(labels) == 6
    assert NFC in actual.notes["names"]
    assert all(actual.train.read(n, 3)[0].shape[0] == 3 for n in range(len(actual.train))), (
        "paths stay as they are"
    )


def test_names_of_weights_in_the_other_form_are_known(tmp_path):
    from torch import nn, ones, zeros

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    weights = {"1.weight": ones(3, 4), "1.bias": ones(3)}
    state = {"classes": f'["x", "{NFD}", "y"]'}
    merged_state = zoo._merge_by_class(weights, state, model, (NFC, "new"), 2)
    assert merged_state["1.bias"].tolist()[0] == 1
    assert merged_state["1.bias"].shape == zeros(2).shape


def test_order_and_places():
    named = class_names(["b", NFD, "a"], [NFC, "c"])
    assert named.names == ["a", "b", NFC]
    assert named.places == {"b": 1, NFD: 2, "a": 0, NFC: 2}
