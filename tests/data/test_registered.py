"""Data sets of the user: supported features, and messages for the others."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as vision

from tests.data.loading import opened
from trainer import tasks
from trainer.commands.predict.labelling import Preparation
from trainer.data import (
    DataShare,
    LabelledSource,
    Loader,
    TensorSet,
    register_dataset,
)
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import prepare_for_evaluation
from trainer.data.registered import registered
from trainer.errors import RecipeError
from trainer.recipe import load
from trainer.tasks import Task, register_task


def pair(count, size=5, channels=3):
    return torch.randint(
        0,
        256,
        (count, channels, size, size),
        dtype=torch.uint8,
    ), torch.arange(count) % 2


def test_users_bring_map_style_sets():
    items = [(Image.new("L", (20, 10)), 1), (torch.zeros(3, 6, 7, dtype=torch.uint8), 0)]
    datasets = opened((items, items, ("a", "b")))
    assert datasets.image_size == 224
    assert datasets.train.read(0, 3)[0].shape == (3, 10, 20)
    assert datasets.train.read(1, 1)[0].shape == (1, 6, 7)
    assert datasets.train.where(1) == "mine, training set: item 1"
    assert not isinstance(datasets.train, LabelledSource)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "must return"),
        ((pair(8), [], ("a", "b")), r"\btrain\b.*\bval\b.*\bpairs\b"),
        ((pair(8), pair(4), ("a",)), r"\blabels\b.*\b0 to 0\b"),
        (((pair(8, channels=4)[0], pair(8)[1]), pair(4), ("a", "b")), "must be uint8"),
        (
            (pair(8), (pair(4)[0].float(), pair(4)[1]), ("a", "b")),
            r"must be uint8 .*found torch.float32",
        ),
        (
            ((torch.zeros(8, 5), pair(8)[1]), (torch.zeros(4, 6), pair(4)[1]), ("a", "b")),
            r"float32 \(5,\), held-out",
        ),
        (
            ((pair(8)[0], pair(7)[1]), pair(4), ("a", "b")),
            r"\(8, 3, 5, 5\) and \(7,\)",
        ),
        (((pair(8)[0][..., :3], pair(8)[1]), pair(4), ("a", "b")), "not square"),
    ],
)
def test_a_users_set_that_does_not_fit_is_explained(made, message):
    with pytest.raises(RecipeError, match=message):
        opened(made)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((32, 64), 32), ((64, 32), 40), ((96, 130), 80), ((96, 96), 80), ((30, 30), 80), ((9, 9), 9)],
)
def test_arrays_are_cut_as_photos_and_as_their_weights_say(shape, size):
    """torchvision resizes the shorter side and crops the center, like prediction does."""
    images = torch.randint(
        0,
        256,
        (6, 3, *shape),
        dtype=torch.uint8,
    )
    datasets = opened(((images, torch.arange(6) % 2),) * 2 + ("ab",), f"data.image_size={size}")
    expected = vision.center_crop(vision.resize(images, [size], antialias=True), [size, size])
    assert torch.equal(datasets.train.images, expected)
    assert torch.equal(datasets.val.images, expected)
    how = Preparation.of(datasets)
    for image, kept in zip(images, datasets.val.images, strict=True):
        assert torch.equal(
            prepare_for_evaluation(
                Picture.of(image),
                how.image_size,
                how.shorter_side,
            ),
            kept,
        )
    assert ("images" in datasets.notes) == (shape[0] != shape[1])


@pytest.mark.parametrize("name", ["digits", "mine"])
def test_a_name_is_taken_once(name):
    with registered.lent("mine", lambda data: None), pytest.raises(RecipeError, match="taken"):
        register_dataset(name)


def test_inputs_that_are_no_images_stay_as_they_are():
    datasets = opened(
        ((torch.arange(12.0).view(4, 3).double(), torch.arange(4) % 2),) * 2 + ("ab",)
    )
    assert isinstance(datasets.train, TensorSet) and datasets.train.inputs.dtype == torch.float32
    assert datasets.plain.shape == (3,)
    assert datasets.inputs == datasets.plain
    assert (datasets.channels, datasets.image_size) == (3, 3)
    example = datasets.example(5)
    assert example.shape == (5, 3)
    assert example.batch(torch.device("cpu"), 2).inputs.shape == (2, 3)


def test_items_that_are_no_images():
    items = [(np.ones(6, np.int32), 0.5), (np.zeros(6, np.int32), 2), (np.zeros(5, np.int32), 1)]
    datasets = opened((items, items, ["x"]), "task.name=regression")
    assert datasets.plain.shape == (6,)
    assert datasets.plain.dtype == torch.int32
    assert datasets.targets.shape == (1,)
    inputs, target = datasets.train.read(0, 3)
    assert inputs.tolist() == [1] * 6 and target.tolist() == [0.5]
    with pytest.raises(ValueError, match=r"int32 \(5,\).*int32 \(6,\)"):
        datasets.train.read(2, 3)


def test_the_label_of_an_item_is_checked_against_the_names():
    items = [(torch.zeros(3, 6, 6, dtype=torch.uint8), label) for label in (0, 1, 7)]
    datasets = opened((items, items, "ab"))
    assert datasets.train.read(1, 3)[1] == 1
    with pytest.raises(ValueError, match=r"\b7\b.*\b0 to 1\b"):
        datasets.train.read(2, 3)


def test_dense_targets_lie_under_their_images(monkeypatch):
    """Images in memory are not cropped.

    Images of a program would be resized without their targets, so they are refused.
    """
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))
    register_task("own")(
        type(
            "Own",
            (Task,),
            {"loss": lambda self, outputs, targets: outputs.mean()},
        )
    )
    images = torch.randint(256, (8, 3, 80, 80), dtype=torch.uint8)
    targets = (images[:, 0] > 127).long()
    datasets = opened(((images, targets), (images, targets), ["x"]), "task.name=own")
    loader = Loader(
        datasets,
        load(None, "batch_size=4"),
        None,
        DataShare(),
        torch.device("cpu"),
    )
    for batches in (loader.training(0), loader.evaluation()):
        batch = next(batches)
        pixels = batch.inputs[:, 0] * datasets.std[0] + datasets.mean[0]
        assert (pixels * 255 > 127.5).long().equal(batch.targets)
    with pytest.raises(RecipeError, match=r"80 x 80, .*float tensors"):
        opened(([*zip(images, targets, strict=True)],) * 2 + (["x"],), "task.name=own")
    floats = opened(([*zip(images / 255, targets, strict=True)],) * 2 + (["x"],), "task.name=own")
    inputs, target = floats.train.read(3, 3)
    assert inputs.equal(images[3] / 255) and target.equal(targets[3])
