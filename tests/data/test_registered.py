"""Data sets of the user's own: what they may bring, and what is said of the rest."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as vision

from tests.data.photos.test_decoding import exif
from trainer import tasks
from trainer.commands.predict.labelling import Preparation
from trainer.data import (
    Datasets,
    LabelledSource,
    Loader,
    Shard,
    TensorSet,
    datasets,
    open_datasets,
    register_dataset,
    registered,
)
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import held_out
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.tasks import Task, register_task


def opened(*words):
    return open_datasets(load(None, *words))


@pytest.fixture
def names(monkeypatch):
    monkeypatch.setattr(registered, "registered", copy.copy(registered.registered))
    registered.registered.clear()
    monkeypatch.setattr(datasets, "registered", registered.registered)


def pair(count, size=5, channels=3):
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8), torch.arange(count) % 2


def test_users_bring_tensors(names):
    register_dataset("mine")(lambda data: (pair(8), pair(4), ["a", "b"]))
    found = opened("data.name=mine")
    assert isinstance(found, Datasets) and found.classes == ("a", "b") and found.image_size == 5
    assert (len(found.train), len(found.val)) == (8, 4) and len(found.mean) == 3


def test_users_bring_map_style_sets(names):
    items = [(Image.new("L", (20, 10)), 1), (torch.zeros(3, 6, 7, dtype=torch.uint8), 0)]
    register_dataset("mine")(lambda data: (items, items, ("a", "b")))
    found = opened("data.name=mine")
    assert found.image_size == 224 and found.train.read(0, 3)[0].shape == (3, 10, 20)
    assert found.train.read(1, 1)[0].shape == (1, 6, 7) and found.train.where(1) == "mine, training set: item 1"
    assert not isinstance(found.train, LabelledSource)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "must return"),
        ((pair(8), [], ("a", "b")), "must both be"),
        (([(1, 2)], [], ("a", "b")), "length above 0"),
        ((pair(8), pair(4), ("a",)), "labels must be 0 to 0"),
        (((pair(8, channels=4)[0], pair(8)[1]), pair(4), ("a", "b")), "must be uint8"),
        ((pair(8), (pair(4)[0].float(), pair(4)[1]), ("a", "b")), r"must be uint8 .*found torch.float32"),
        (((torch.zeros(8, 5), pair(8)[1]), (torch.zeros(4, 6), pair(4)[1]), ("a", "b")), r"float32 \(5,\), held-out"),
        (
            ((pair(8)[0], pair(7)[1]), pair(4), ("a", "b")),
            r"must be as many, and at least 1, found \(8, 3, 5, 5\) and \(7,\)",
        ),
        (((pair(8)[0][..., :3], pair(8)[1]), pair(4), ("a", "b")), "not square"),
    ],
)
def test_a_users_set_that_does_not_fit_is_explained(names, made, message):
    register_dataset("mine")(lambda data: made)
    with pytest.raises(RecipeError, match=message):
        opened("data.name=mine")


@pytest.mark.parametrize(
    ("shape", "size"), [((32, 64), 32), ((64, 32), 40), ((96, 130), 80), ((96, 96), 80), ((30, 30), 80), ((9, 9), 9)]
)
def test_arrays_are_cut_as_photos_and_as_their_weights_say(names, shape, size):
    """By torchvision: the shorter side resized, the middle cut out; and as prediction prepares each of them."""
    images = torch.randint(0, 256, (6, 3, *shape), dtype=torch.uint8)
    register_dataset("mine")(lambda data: ((images, torch.arange(6) % 2),) * 2 + ("ab",))
    found = opened("data.name=mine", f"data.image_size={size}")
    wanted = vision.center_crop(vision.resize(images, [size], antialias=True), [size, size])
    assert torch.equal(found.train.images, wanted) and torch.equal(found.val.images, wanted)
    how = Preparation.of(found)
    for image, kept in zip(images, found.val.images, strict=True):
        assert torch.equal(held_out(Picture.of(image), how.image_size, how.shorter_side), kept)
    assert ("images" in found.notes) == (shape[0] != shape[1])


@pytest.mark.parametrize("name", ["digits", "mine"])
def test_a_name_is_taken_once(names, name):
    register_dataset("mine")(lambda data: None)
    with pytest.raises(RecipeError, match="taken"):
        register_dataset(name)


def test_an_unknown_name_gets_the_nearest(names):
    register_dataset("flowers")(lambda data: None)
    with pytest.raises(RecipeError, match=r"data\.name=flowers\b"):
        opened("data.name=flower")


def test_inputs_that_are_no_images_stay_as_they_are(names):
    register_dataset("mine")(
        lambda data: ((torch.arange(12.0).view(4, 3).double(), torch.arange(4) % 2),) * 2 + ("ab",)
    )
    found = opened("data.name=mine")
    assert isinstance(found.train, TensorSet) and found.train.inputs.dtype == torch.float32
    assert found.plain.shape == (3,) and found.inputs == found.plain and (found.channels, found.image_size) == (3, 3)
    example = found.example(5)
    assert example.shape == (5, 3) and example.zeros(torch.device("cpu"), 2).inputs.shape == (2, 3)


def test_items_that_are_no_images(names):
    items = [(np.ones(6, np.int32), 0.5), (np.zeros(6, np.int32), 2), (np.zeros(5, np.int32), 1)]
    register_dataset("mine")(lambda data: (items, items, ["x"]))
    found = opened("data.name=mine", "task.name=regression")
    assert found.plain.shape == (6,) and found.plain.dtype == torch.int32 and found.targets.shape == (1,)
    inputs, target = found.train.read(0, 3)
    assert inputs.tolist() == [1] * 6 and target.tolist() == [0.5]
    with pytest.raises(ValueError, match=r"int32 \(5,\).*int32 \(6,\)"):
        found.train.read(2, 3)


def test_an_items_label_is_held_against_the_names(names):
    items = [(torch.zeros(3, 6, 6, dtype=torch.uint8), label) for label in (0, 1, 7)]
    register_dataset("mine")(lambda data: (items, items, "ab"))
    found = opened("data.name=mine")
    assert found.train.read(1, 3)[1] == 1
    with pytest.raises(ValueError, match=r"\b7\b.*\b0 to 1\b"):
        found.train.read(2, 3)


class Mine:
    """A source of photos of the user's own."""

    def __init__(self, labels, tells):
        self.answers = labels
        if tells:
            self.labels = np.array(labels)

    def __len__(self):
        return len(self.answers)

    def where(self, index):
        return f"mine {index}"

    def read(self, index, channels):
        return torch.zeros(channels, 8, 8, dtype=torch.uint8), self.answers[index]


def sets(labels, tells):
    parts = Mine(labels, tells), Mine(labels, tells)
    return Datasets("mine", *parts, ("a", "b"), 3, 8, (0.5,) * 3, (0.25,) * 3, False, "val")


@pytest.mark.parametrize("tells", [True, False])
def test_a_source_of_ones_own_has_the_targets_that_the_task_wants(names, tells):
    register_dataset("mine")(lambda data: sets([0, 1, 1], tells))
    assert opened("data.name=mine").train.read(1, 3)[1] == 1
    several = opened("data.name=mine", "task.name=multilabel")
    assert several.train.read(1, 3)[1].tolist() == [0, 1] and several.targets.shape == (2,)
    assert isinstance(several.train, LabelledSource) is tells
    register_dataset("values")(lambda data: sets([[0.5, 1], [0.7, 2]], tells))
    found = opened("data.name=values", "task.name=regression")
    assert found.train.read(1, 3)[1].tolist() == pytest.approx([0.7, 2]) and found.targets.dtype == torch.float32


def test_items_of_whole_numbers_and_others_are_others(names, monkeypatch):
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))
    register_task("own")(type("Own", (Task,), {"loss": lambda self, outputs, targets: outputs.mean()}))
    items = [(torch.zeros(3, 6, 6, dtype=torch.uint8), target) for target in (0, 0.25, [1.0, 2.0])]
    register_dataset("mine")(lambda data: (items, items, ["x"]))
    found = opened("data.name=mine", "task.name=own")
    assert found.targets.dtype == torch.float32 and found.train.read(1, 3)[1].item() == 0.25
    with pytest.raises(ValueError, match=r"float32 \(2,\).*float32 \(\)"):
        found.train.read(2, 3)


@pytest.mark.parametrize("size", [12, 80])
def test_dense_targets_lie_under_their_images(names, monkeypatch, size):
    """Neither is resized or cropped, however large they are."""
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))
    register_task("own")(type("Own", (Task,), {"loss": lambda self, outputs, targets: outputs.mean()}))
    image = torch.randint(256, (3, size, size), dtype=torch.uint8)
    items = [(image, (image[0] > 127).long())] * 8
    register_dataset("mine")(lambda data: (items, items, ["x"]))
    recipe = load(None, "data.name=mine", "task.name=own", "batch_size=4", "data.workers=0")
    found = open_datasets(recipe)
    loader = Loader(found, recipe, None, Shard(), torch.device("cpu"))
    for batches in (loader.training(0), loader.evaluation()):
        batch = next(batches)
        pixels = batch.inputs[:, 0] * found.std[0] + found.mean[0]
        assert (pixels * 255 > 127.5).long().equal(batch.targets)
    tagged = Image.fromarray(image.permute(1, 2, 0).numpy())
    tagged.getexif().update(exif(6))
    register_dataset("tagged")(lambda data: ([*items, (tagged, items[0][1])], items, ["x"]))
    with pytest.raises(ValueError, match="exif_transpose"):  # nobody knows whether the target is turned already
        opened("data.name=tagged", "task.name=own").train.read(8, 3)
    other = [*items, (image[:, :-1], torch.zeros(size, size).long())]
    register_dataset("odd")(lambda data: (other, items, ["x"]))
    with pytest.raises(RecipeError, match="squares of one size"):
        opened("data.name=odd", "task.name=own")
    with pytest.raises(RecipeError, match="squares of one size"):
        opened("data.name=mine", "task.name=own", f"data.image_size={size + 1}")
