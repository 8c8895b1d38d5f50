"""Sets of a program that name other classes, or the same in another order: matched by name, or refused."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from tests.command_line import BARE
from tests.data.photo_folders import coloured
from tests.data.test_items import Rows, opened
from trainer import train
from trainer.errors import RecipeError

ABC = ("ant", "bee", "cow")
COLOURS = {"ant": (200, 30, 30), "bee": (30, 200, 30), "cow": (30, 30, 200)}


def rows(*names, classes=None, **more):
    """Items of these classes, numbered as their set numbers them, whose pixel tells the class."""
    classes = list(classes or ABC)
    items = [(torch.full((3, 8, 8), ABC.index(name), dtype=torch.uint8), classes.index(name)) for name in names]
    return Rows(items, classes=classes, **more)


def right(source, classes):
    """Whether each item's target is the class that its pixel tells."""
    items = [source.read(n, 3) for n in range(len(source))]
    return [classes[target] == ABC[int(image[0, 0, 0])] for image, target in items]


NESTED = Subset(ConcatDataset([rows("cow"), Subset(rows("cow", "bee", classes=["cow", "bee"]), [1, 0])]), [2, 0, 1])
FEATURES = Rows(
    [{"image": torch.full((3, 8, 8), n, dtype=torch.uint8), "label": 2 - n} for n in range(3)],
    features={"label": SimpleNamespace(names=["cow", "bee", "ant"])},
)
TO_INDEX = rows("bee", "cow", classes=["cow", "bee"])
TO_INDEX.classes = ["bee", "cow"]
TO_INDEX.class_to_idx = {"bee": 1, "cow": 0}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (rows(*ABC), rows("bee", "cow", classes=["bee", "cow"])),
        (rows(*ABC), rows(*ABC, classes=["cow", "ant", "bee"])),
        (rows(*ABC), NESTED),
        (rows(*ABC), FEATURES),
        (rows(*ABC), TO_INDEX),
        (ConcatDataset([rows("bee", "cow", classes=["bee", "cow"]), rows(*ABC)]), rows(*ABC)),
        (Subset(ConcatDataset([rows("ant", classes=["ant"]), rows("cow", classes=["cow"])]), [1, 0]), rows("ant")),
    ],
)
def test_classes_are_matched_by_name(first, second):
    if isinstance(first, Subset):
        second = rows("ant", "cow", classes=["cow", "ant"])
    found = opened(first, second)
    for source in (found.train, pickle.loads(pickle.dumps(found.val))):
        assert all(right(source, found.classes)) and len(source)


def test_of_sets_in_memory_too():
    images = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    first, second = TensorDataset(images, torch.arange(3)), TensorDataset(images, 2 - torch.arange(3))
    first.classes, second.classes = ABC, ABC[::-1]
    found = opened(first, Subset(second, [2, 0]))
    assert found.val.labels.tolist() == found.val.images[:, 0, 0, 0].tolist() == [2, 0]
    named = opened((images, torch.arange(3)), second, ABC)
    assert named.val.labels.tolist() == [0, 1, 2] and named.classes == ABC


def test_the_same_sets_are_left_alone():
    """Also where two classes have one name, and where names for people stand in for the sets' own."""
    crane = ("crane", "bee", "crane")
    found = opened(rows(*ABC, classes=ABC), rows(*ABC, classes=ABC), ["A", "B", "C"])
    assert found.classes == ("A", "B", "C") and all(type(part.items) is Rows for part in (found.train, found.val))
    first, second = rows(*ABC), rows(*ABC)
    first.classes = second.classes = list(crane)
    assert opened(first, second).classes == crane


def test_two_forms_of_a_name_are_one_class():
    first, second = rows(*ABC), rows(*ABC)
    first.classes, second.classes = ["\u00e9", "bee", "e\u0301"], ["bee", "\u00e9"]
    found = opened(first, second)
    assert found.classes == ("\u00e9", "bee") and [found.train.read(n, 3)[1] for n in range(3)] == [0, 1, 0]
    assert [found.val.read(n, 3)[1] for n in range(2)] == [1, 0]


CHANGED = rows("bee", classes=["bee", "cow"], target_transform=lambda label: label + 1)
CRANES = rows("bee")
CRANES.classes = ["bee", "crane", "crane"]


@pytest.mark.parametrize(
    ("first", "second", "names", "says"),
    [
        (rows(*ABC), rows("ant", classes=["ant", "eel"]), None, "'eel'"),
        (rows(*ABC), CHANGED, None, "target_transform"),
        (rows(*ABC), CRANES, None, "one name"),
        (rows(*ABC), ConcatDataset([Rows([(torch.zeros(3, 8, 8), 0)]), TO_INDEX]), None, "names none"),
        (rows(*ABC), rows(*ABC), ["cow", "ant", "bee"], "cow, ant, bee"),
    ],
)
def test_what_cannot_be_matched_is_refused(first, second, names, says):
    with pytest.raises(RecipeError, match=says):
        opened(first, second, names)


def test_classes_in_rows_of_several_are_not_put_in_another_order():
    first, second = (Rows([(torch.zeros(3, 8, 8), torch.ones(2))], classes=names) for names in (["a", "b"], ["b", "a"]))
    with pytest.raises(RecipeError, match="several"):
        opened(first, second, None, "task.name=multilabel")


def test_a_number_that_its_set_does_not_name_is_told():
    odd = rows("bee", classes=["bee", "cow"])
    odd.items.append((odd.items[0][0], 2))
    with pytest.raises(ValueError, match=r"\b2\b.*\b2 classes\b"):
        opened(rows(*ABC), odd).val.read(1, 3)


def test_training_scores_a_set_of_some_classes_by_their_names(tmp_path):
    """Of torchvision's own, the numbers of `val` are one too low."""
    for part, names, count in (("train", ABC, 12), ("val", ABC[1:], 6)):
        for name in names:
            for n in range(count):
                coloured(tmp_path / part / name / f"{n}.png", COLOURS[name], (16, 16), seed=n)
    sets = tuple(ImageFolder(str(tmp_path / part)) for part in ("train", "val"))
    assert sets[1].targets[0] == 0 and sets[0].class_to_idx["bee"] == 1
    words = [*BARE, "mode=single", "threads=1", "epochs=4", "batch_size=6", "augment.crop=none"]
    words += ["schedule.warmup_epochs=0", "optimizer.lr=0.02", f"output={tmp_path / 'run'}", "logging.progress=false"]
    assert train("digits", *words, data=sets)["val_top1"] > 0.9
