"""Items and sets as users of torch, torchvision and Hugging Face have them."""

import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from trainer.data import ImageSet, TensorSet
from trainer.data.datasets import open_datasets
from trainer.data.items import as_input, split_item
from trainer.data.photos.photo_reader import private_draws, seed_draws
from trainer.data.registered import registered
from trainer.errors import RecipeError
from trainer.processes import pickling
from trainer.recipe import load

PIXELS = torch.randint(
    0,
    256,
    (12, 1, 6, 6),
    dtype=torch.uint8,
)
LABELS = torch.arange(12) % 3


class Rows:
    """A map-style set of whatever items."""

    def __init__(self, items, **attributes):
        self.items = items
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def opened(train, val, names=None, *words):
    with registered.lent("mine", lambda data: (train, val, names)):
        return open_datasets(load(None, "data.name=mine", "model.name=cnn", *words))


@pytest.mark.parametrize(
    "item",
    [
        (5, 1),
        [5, 1],
        {"image": 5, "label": 1},
        {"img": 5, "fine_label": 1, "coarse_label": 3},
        {"pixel_values": 5, "labels": 1},
    ],
)
def test_an_item_is_an_input_and_a_target(item):
    assert split_item(item) == (5, 1)


@pytest.mark.parametrize(
    ("item", "line"),
    [
        ((1, 2, 3), r"\(input, target\), .*\btuple of 3$"),
        (torch.zeros(3), "found Tensor"),
        (
            {"picture": 1, "label": 2},
            r"\bimage, .*\bdictionary\b.*\bpicture, label$",
        ),
    ],
)
def test_invalid_items_are_refused(item, line):
    with pytest.raises(ValueError, match=line):
        split_item(item)


@pytest.mark.parametrize(
    ("found", "shape"),
    [
        (np.zeros((5, 7, 3), np.uint8), (3, 5, 7)),
        (np.zeros((5, 7), np.uint8), (1, 5, 7)),
        (torch.zeros(3, 5, 7, dtype=torch.uint8), (3, 5, 7)),
        (torch.zeros(5, 7, 1, dtype=torch.uint8), (1, 5, 7)),
        (np.zeros((5, 7)), (5, 7)),
        ([[0.5, 1.0]], (1, 2)),
    ],
)
def test_arrays_become_tensors_with_channels_first(found, shape):
    assert as_input(found).shape == shape


TWO = [(torch.zeros(3, 6, 6, dtype=torch.uint8), 1), (torch.zeros(3, 6, 6, dtype=torch.uint8), 0)]


@pytest.mark.parametrize(
    ("part", "words", "names"),
    [
        (Rows(TWO, classes=["cat", "dog"]), [], ("cat", "dog")),
        (Subset(Rows(TWO, classes=["cat", "dog"]), [0]), [], ("cat", "dog")),
        (ConcatDataset([Rows(TWO, classes=["cat", "dog"])]), [], ("cat", "dog")),
        (Rows(TWO, features={"label": SimpleNamespace(names=["a", "b"])}), [], ("a", "b")),
        (Rows(TWO, targets=[0, 2]), [], ("0", "1", "2")),
        (TensorDataset(PIXELS, LABELS), [], ("0", "1", "2")),
        ((PIXELS, torch.zeros(12, 4)), ["task.name=multilabel"], ("0", "1", "2", "3")),
        ((PIXELS, torch.zeros(12)), ["task.name=regression"], ("0",)),
    ],
)
def test_class_names_of_a_data_set_are_used(part, words, names):
    assert opened(part, part, None, *words).classes == names


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            Rows(TWO),
            r"data\.name=mine\b.*\bclasses\b.*: data=\(train_set, val_set, 10\)",
        ),
        (
            (PIXELS, LABELS / 2),
            r"\bfloat32; .*: task\.name=regression$",
        ),
    ],
)
def test_missing_class_names_are_numbers(part, line):
    with pytest.raises(RecipeError, match=line):
        opened(part, part)


ABC = ["a", "b", "c"]
REVERSED = ["c", "b", "a"]


def three(classes, **more):
    """Return items of three classes, whose pixels encode the class."""
    items = []
    for number, name in enumerate(ABC):
        pixels = torch.full((3, 6, 6), number, dtype=torch.uint8)
        items.append((pixels, classes.index(name)))
    return Rows(items, classes=classes, **more)


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (three(ABC), three(REVERSED), None),
        (three(ABC), Rows(TWO, features={"label": SimpleNamespace(names=["b", "c"])}), 3),
        (ConcatDataset([three(ABC), Subset(three(REVERSED), [0])]), three(ABC), None),
        (three(ABC), three(ABC), REVERSED),
        (Rows(TWO), three(REVERSED), ABC),
    ],
)
def test_sets_that_number_their_classes_differently_are_refused(first, second, names):
    with pytest.raises(RecipeError, match=r"\(a, b, c\) and \([bc], .*target_transform"):
        opened(first, second, names)


def test_sets_that_are_renumbered_as_that_says_or_number_alike_are_taken():
    second = three(REVERSED)
    second.items = [
        (
            image,
            {
                0: 2,
                1: 1,
                2: 0,
            }[label],
        )
        for image, label in second.items
    ]
    second.classes, second.class_to_idx = ABC, {name: n for n, name in enumerate(ABC)}
    datasets = opened(three(ABC), second)
    assert [int(datasets.val.read(n, 3)[0][0, 0, 0]) for n in range(3)] == [
        datasets.val.read(n, 3)[1] for n in range(3)
    ]
    assert opened(
        three(ABC),
        three(ABC),
        ["A", "B", "C"],
    ).classes == ("A", "B", "C"), "names for people"
    crane = Rows(TWO, classes=["crane", "bee", "crane"])
    assert opened(crane, crane).classes == ("crane", "bee", "crane")


def test_sets_in_memory_are_tensors():
    whole = TensorDataset(PIXELS, LABELS)
    train, val = random_split(whole, [8, 4])
    datasets = opened(train, val)
    assert isinstance(datasets.train, ImageSet) and datasets.classes == ("0", "1", "2")
    assert torch.equal(datasets.val.labels, LABELS[torch.tensor(val.indices)])
    arrays = (PIXELS[:, 0].numpy(), LABELS.numpy())
    assert torch.equal(opened(arrays, arrays, 3).train.images, PIXELS)
    floats = TensorDataset(PIXELS / 255, LABELS)
    assert isinstance(opened(floats, floats).train, TensorSet)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "train", [Stream(), DataLoader(TensorDataset(PIXELS, LABELS)), Rows([]), 3]
)
def test_sets_that_cannot_be_read_by_number(train):
    with pytest.raises(
        RecipeError, match=rf"found {type(train).__name__}: .*loader\.dataset .* list\(\.\.\.\)"
    ):
        opened(train, Rows([(0, 1)]), 2)


def drawn(seed, epoch, sample):
    with private_draws():
        seed_draws(seed, epoch, sample)
        return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_random_numbers_of_an_item_depend_on_seed_epoch_and_sample_alone():
    torch.manual_seed(3)
    before = torch.rand(1).item(), random.getstate()
    torch.manual_seed(3)
    random.setstate(before[1])
    assert drawn(0, 1, 5) == drawn(0, 1, 5)
    several = {
        drawn(0, 1, 5),
        drawn(1, 1, 5),
        drawn(0, 2, 5),
        drawn(0, 1, 6),
    }
    assert len(several) == 4
    assert all(len({row[n] for row in several}) == 4 for n in range(3))
    assert torch.rand(1).item() == before[0]
    assert random.getstate() == before[1]


def test_items_whose_class_no_module_holds_travel_by_value(monkeypatch):
    class Nowhere(Rows):
        pass

    actual = opened(
        Nowhere([(torch.zeros(2), 0), (torch.ones(2), 1)]),
        Rows([(torch.ones(2), 1)]),
        2,
    ).train
    monkeypatch.setattr(pickling, "has_received_objects", False)
    # A test runner's may have none.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    with pytest.raises(AttributeError):
        pickle.dumps(actual)
    monkeypatch.setattr(pickling, "has_received_objects", True)
    again = pickle.loads(pickle.dumps(actual))
    assert again.read(1, 3)[0].tolist() == [1, 1]
    assert again.where(1) == actual.where(1)
    with pytest.raises(RecipeError, match="mode=single"):
        pickle.dumps(
            opened(
                Rows([(torch.zeros(2), 0)], lock=threading.Lock()),
                Rows([(torch.ones(2), 1)]),
                2,
            ).train
        )


def test_one_stray_number_does_not_make_a_million_classes():
    labels = torch.tensor([0, 1, 2] * 3 + [5, 1, 1_048_000])
    says = r"[45] classes .* 1,048,000 .* 1,048,001.* give their number"
    with pytest.raises(RecipeError, match=says):
        opened((PIXELS, labels), (PIXELS, LABELS))
    assert len(opened((PIXELS, labels), (PIXELS, LABELS), 1_048_001).classes) == 1_048_001


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.int16])
def test_pixels_of_other_types_are_used_unchanged_or_reported(dtype):
    """No pixel loses bits silently."""
    pixels = np.random.default_rng(0).integers(0, 4096, (12, 1, 6, 6)).astype(dtype)
    datasets = opened((pixels, LABELS), (pixels, LABELS))
    assert datasets.plain is not None
    assert datasets.train.inputs.numpy().tolist() == pixels.tolist()
