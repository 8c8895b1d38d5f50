"""Items and sets as users of torch, torchvision and Hugging Face have them."""

import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, random_split

from trainer.data import ImageSet, TensorSet
from trainer.data.datasets import open_datasets
from trainer.data.items import as_input, names_of, pair
from trainer.data.photos.photo_reader import private_draws, seed_draws
from trainer.data.registered import registered
from trainer.errors import RecipeError
from trainer.processes import pickling
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel, Regression

PIXELS, LABELS = torch.randint(0, 256, (12, 1, 6, 6), dtype=torch.uint8), torch.arange(12) % 3


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
    assert pair(item) == (5, 1)


@pytest.mark.parametrize(
    ("item", "line"),
    [
        ((1, 2, 3), r"an item must be \(input, target\), .*found tuple of 3"),
        (torch.zeros(3), "found Tensor"),
        ({"picture": 1, "label": 2}, "a dictionary needs one of image, .*found picture, label"),
    ],
)
def test_what_is_no_item(item, line):
    with pytest.raises(ValueError, match=line):
        pair(item)


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


@pytest.mark.parametrize(
    ("part", "kind", "names"),
    [
        (Rows([], classes=["cat", "dog"]), Classification, ("cat", "dog")),
        (Subset(Rows([0], classes=["cat", "dog"]), [0]), Classification, ("cat", "dog")),
        (ConcatDataset([Rows([0], classes=["cat", "dog"])]), Classification, ("cat", "dog")),
        (Rows([], features={"label": SimpleNamespace(names=["a", "b"])}), Classification, ("a", "b")),
        (Rows([], num_classes=2), Classification, ("0", "1")),
        (Rows([0, 0, 0], targets=[0, 2, 1]), Classification, ("0", "1", "2")),
        (TensorDataset(PIXELS, LABELS), Classification, ("0", "1", "2")),
        (Rows([(0, 1), (0, torch.tensor(3))]), Classification, ("0", "1", "2", "3")),
        (Rows([(0, torch.zeros(4))]), Multilabel, ("0", "1", "2", "3")),
        (Rows([(0, 0.5)], classes=["not", "these"]), Regression, ("0",)),
    ],
)
def test_names_that_a_set_tells(part, kind, names):
    assert names_of(part, kind, "it") == names


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (Rows([(0, 1)] * 10_001), r"10,001 items are too many to count them: .*data=\(train_set, val_set, 10\)"),
        (Rows([(0, 0.5)]), "classes are whole numbers from 0, found float32; to predict numbers: task.name=regression"),
        (Rows([7]), r"its items cannot be read \(ValueError: an item must be"),
    ],
)
def test_names_that_nothing_tells(part, line):
    with pytest.raises(RecipeError, match=line):
        names_of(part, Classification, "it")


def test_sets_in_memory_are_tensors():
    whole = TensorDataset(PIXELS, LABELS)
    train, val = random_split(whole, [8, 4])
    found = opened(train, val)
    assert isinstance(found.train, ImageSet) and found.classes == ("0", "1", "2")
    assert torch.equal(found.val.labels, LABELS[torch.tensor(val.indices)])
    arrays = (PIXELS[:, 0].numpy(), LABELS.numpy())
    assert torch.equal(opened(arrays, arrays, 3).train.images, PIXELS)
    floats = TensorDataset(PIXELS / 255, LABELS)
    assert isinstance(opened(floats, floats).train, TensorSet)


def test_dictionaries_as_hugging_face_has_them():
    images = [Image.fromarray(pixels[0].numpy()) for pixels in PIXELS]
    items = Rows([{"image": image, "label": int(label)} for image, label in zip(images, LABELS, strict=True)])
    found = opened(items, items, ["a", "b", "c"])
    assert (found.channels, found.image_size) == (1, 6)
    image, label = found.train.read(4, 1)
    assert torch.equal(image, PIXELS[4]) and label == 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("train", "line"),
    [
        (Stream(), r"its training set must have items and a length, found Stream: .* list\(\.\.\.\)"),
        (DataLoader(TensorDataset(PIXELS, LABELS)), "its training set is a DataLoader: give the data set, loader.data"),
        (Rows([]), "its training set must have a length above 0"),
        (3, "its training set must have items and a length, found int"),
    ],
)
def test_sets_that_cannot_be_read_by_number(train, line):
    with pytest.raises(RecipeError, match=line):
        opened(train, Rows([(0, 1)]), 2)


def drawn(seed, epoch, sample):
    with private_draws():
        seed_draws(seed, epoch, sample)
        return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_what_an_item_draws_depends_on_seed_epoch_and_sample_alone():
    torch.manual_seed(3)
    before = torch.rand(1).item(), random.getstate()
    torch.manual_seed(3)
    random.setstate(before[1])
    assert drawn(0, 1, 5) == drawn(0, 1, 5)
    several = {drawn(0, 1, 5), drawn(1, 1, 5), drawn(0, 2, 5), drawn(0, 1, 6)}
    assert len(several) == 4 and all(len({row[n] for row in several}) == 4 for n in range(3))
    assert torch.rand(1).item() == before[0] and random.getstate() == before[1]


def test_items_whose_class_no_module_holds_travel_by_value(monkeypatch):
    class Nowhere(Rows):
        pass

    found = opened(Nowhere([(torch.zeros(2), 0), (torch.ones(2), 1)]), Rows([(torch.ones(2), 1)]), 2).train
    monkeypatch.setattr(pickling, "arrived", False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a test runner's may have none
    with pytest.raises(AttributeError):
        pickle.dumps(found)
    monkeypatch.setattr(pickling, "arrived", True)
    again = pickle.loads(pickle.dumps(found))
    assert again.read(1, 3)[0].tolist() == [1, 1] and again.where(1) == found.where(1)
    with pytest.raises(RecipeError, match="mode=single"):
        pickle.dumps(opened(Rows([(torch.zeros(2), 0)], lock=threading.Lock()), Rows([(torch.ones(2), 1)]), 2).train)


def test_one_stray_number_does_not_make_a_million_classes():
    labels = torch.tensor([0, 1, 2] * 3 + [5, 1, 1_048_000])
    says = r"4 classes are in use, and the number 1,048,000 .* makes them 1,048,001; if so, give their number"
    with pytest.raises(RecipeError, match=says.replace("4", "[45]", 1)):
        opened((PIXELS, labels), (PIXELS, LABELS))
    assert len(opened((PIXELS, labels), (PIXELS, LABELS), 1_048_001).classes) == 1_048_001


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.int16])
def test_pixels_of_other_types_are_inputs_as_they_are_or_told(dtype):
    """No image of ours is made of them by cutting bits off."""
    pixels = np.random.default_rng(0).integers(0, 4096, (12, 1, 6, 6)).astype(dtype)
    found = opened((pixels, LABELS), (pixels, LABELS))
    assert found.plain is not None and found.train.inputs.numpy().tolist() == pixels.tolist()
