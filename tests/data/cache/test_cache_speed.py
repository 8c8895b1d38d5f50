"""Where the time of a photo goes, by stand-ins that take a known time."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.data.cache import stored as module
from trainer.data.cache.stored import measure_reading
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.recipe import load

RECIPE = load(None, "augment.crop=resized")


@pytest.fixture
def folder(tmp_path):
    for number in range(6):
        Image.fromarray(np.full((60, 80, 3), number, np.uint8)).save(tmp_path / f"{number}.jpg")
    return PhotoFolder(tmp_path, [f"{number}.jpg" for number in range(6)], np.zeros(6))


def test_decoding_and_transforming_are_told_apart(folder, monkeypatch):
    opened = module.open_encoded

    def slow(decode):
        def decoded(factor):
            time.sleep(0.02)
            return decode(factor)

        return decoded

    def open_slowly(*given):
        picture = opened(*given)
        return replace(picture, decode=slow(picture.decode))

    monkeypatch.setattr(module, "open_encoded", open_slowly)
    apply = module.PhotoDraws.apply

    def apply_slowly(*given):
        time.sleep(0.05)
        return apply(*given)

    monkeypatch.setattr(module.PhotoDraws, "apply", apply_slowly)
    found = measure_reading(folder, RECIPE, 32, 3)
    assert found.decode >= 0.02 and found.transform >= 0.05 and found.cached >= 0.05
    assert found.read < 0.02 and found.whole == found.read + found.decode + found.transform


def test_it_leaves_no_trace_and_leaves_out_what_cannot_be_read(folder, tmp_path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for number in range(6):
        assert measure_reading(folder, load(None, "augment.crop=resized", "augment.auto=rand"), 32, 3).whole > 0
        (tmp_path / f"{number}.jpg").write_bytes(b"no image")
    assert measure_reading(folder, RECIPE, 32, 3) is None
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
