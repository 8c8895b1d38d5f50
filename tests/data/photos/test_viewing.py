"""Samples as pictures: what a model gets turned back."""

from dataclasses import replace

import pytest
import torch

from trainer.data import DataShare, Loader, as_pictures, open_datasets
from trainer.data.sets import TensorSpec
from trainer.recipe import load
from trainer.training.setup import task_of


@pytest.mark.parametrize("words", [["data.name=digits"], ["data.name=synthetic", "data.image_size=32"]])
def test_a_batch_turned_back_is_the_images_it_was_made_of(words):
    recipe = load("digits", *words, "batch_size=32", "augment.crop=none", "augment.hflip=0")
    data = open_datasets(recipe)
    loader = Loader(data, recipe, task_of(recipe, data), DataShare(), torch.device("cpu"))
    batch = next(loader.evaluation())
    shown = as_pictures(data, batch.inputs)
    assert torch.equal(shown, data.val.images[: len(shown)].permute(0, 2, 3, 1))


def test_what_is_no_image_has_no_picture():
    data = open_datasets(load("digits"))
    plain = replace(data, plain=TensorSpec((5,), torch.float32))
    assert as_pictures(plain, torch.zeros(2, 5)) is None
    assert as_pictures(data, torch.empty(0)) is None, "a rank that reads no images"
