"""Samples as pictures: what a model gets turned back, and held-out samples read anew."""

from dataclasses import replace

import pytest
import torch

from trainer.data import Loader, Shard, as_pictures, held_out_pictures, open_datasets
from trainer.data.sets import TensorSpec
from trainer.recipe import load
from trainer.training.setup import task_of


@pytest.mark.parametrize("words", [["data.name=digits"], ["data.name=synthetic", "data.image_size=32"]])
def test_a_batch_turned_back_is_the_images_it_was_made_of(words):
    recipe = load("digits", *words, "batch_size=32", "augment.crop=none", "augment.hflip=0")
    data = open_datasets(recipe)
    loader = Loader(data, recipe, task_of(recipe, data), Shard(), torch.device("cpu"))
    batch = next(loader.evaluation())
    shown = as_pictures(data, batch.inputs)
    assert torch.equal(shown, data.val.images[: len(shown)].permute(0, 2, 3, 1))
    assert torch.equal(shown[:3], held_out_pictures(data, [0, 1, 2])), "the same samples, by their places"


def test_what_is_no_image_has_no_picture():
    data = open_datasets(load("digits"))
    plain = replace(data, plain=TensorSpec((5,), torch.float32))
    assert as_pictures(plain, torch.zeros(2, 5)) is None and held_out_pictures(plain, [0]) is None
    assert as_pictures(data, torch.empty(0)) is None, "a rank that reads no images"
    assert held_out_pictures(data, []) is None


def test_photos_are_cut_as_for_evaluation(tmp_path):
    from PIL import Image

    for part in ("train", "val"):
        for name, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
            (tmp_path / part / name).mkdir(parents=True)
            for n in range(4):
                Image.new("RGB", (90 + n, 70), colour).save(tmp_path / part / name / f"{n}.png")
    data = open_datasets(load("finetune", f"data.root={tmp_path}", "data.image_size=32"))
    shown = held_out_pictures(data, [0, 7])
    assert shown.shape == (2, 32, 32, 3)
    assert shown[0, 16, 16].tolist() == [0, 0, 250] and shown[1, 16, 16].tolist() == [250, 0, 0]
