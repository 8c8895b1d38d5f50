"""Generators of a data set's own: their draws belong to a sample, whoever reads it."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from tests.command_line import QUIET, ok
from trainer.data.generators import Generators

KINDS = {
    "numpy": lambda: np.random.default_rng(0),
    "philox": lambda: np.random.Generator(np.random.Philox(0)),
    "state": lambda: np.random.RandomState(0),
    "random": lambda: random.Random(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}


def drawn(generator):
    """A number of any kind of generator."""
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random_sample() if isinstance(generator, np.random.RandomState) else generator.random()


class Jitter(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


class Transformed:
    def __init__(self, transform):
        self.transform, self.samples = transform, [(n, n) for n in range(5000)]


WAYS = {
    "attribute": lambda generator: Transformed(generator),
    "transforms": lambda generator: Subset(Transformed(nn.Sequential(nn.Identity(), Jitter(generator))), [0]),
    "dictionary": lambda generator: Transformed({"train": [(None, Jitter(generator))]}),
    "closure": lambda generator: Transformed(lambda x: x * drawn(generator)),
    "partial": lambda generator: Transformed(functools.partial(np.multiply, generator)),
    "method": lambda generator: Transformed(Jitter(generator).forward),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_and_seeded_and_left_as_it_was(way, kind):
    one, two = KINDS[kind](), KINDS[kind]()
    found, other = Generators(WAYS[way](one)), Generators(WAYS[way](two))
    assert [*found] == [one]
    drawn(two)
    untouched = drawn(KINDS[kind]())
    with found.restored():
        found.seed(2**63 + 5)
        other.seed(2**63 + 5)
        first = drawn(one)
        assert first == drawn(two) != untouched
        found.seed(6)
        assert drawn(one) != first
    assert drawn(one) == untouched


def test_several_draw_different_numbers_and_a_new_one_is_seen():
    data = Transformed([KINDS["numpy"](), KINDS["numpy"]()])
    found = Generators(data)
    found.seed(1)
    first = [drawn(generator) for generator in data.transform]
    data.transform[0] = KINDS["numpy"]()
    found.seed(1)
    assert [drawn(generator) for generator in data.transform] == first and first[0] != first[1]
    assert not [*Generators(data.samples)]


DATA = """
import os
import random
import numpy as np
import torch
from trainer import register_dataset

class Noise:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, image):
        return (image * self.generator.random()).astype(np.uint8)

class Items(torch.utils.data.Dataset):
    def __init__(self, count, log):
        self.count, self.log = count, log
        self.transforms = [Noise(np.random.default_rng(0)), Noise(random.Random(0))]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1) * 4
        for transform in self.transforms:
            image = transform(image)
        if self.log and (torch.utils.data.get_worker_info() or os.environ["READER"] == "main"):
            with open("reads", "a") as file:
                file.write(f"{index} {image.tobytes().hex()}\\n")
        return torch.from_numpy(image.copy()).permute(2, 0, 1), index % 3

register_dataset("noisy")(lambda data: (Items(48, True), Items(6, False), tuple("abc")))
"""


@pytest.mark.slow
def test_any_number_of_readers_see_the_same_images(tmp_path):
    (tmp_path / "noisy.py").write_text(DATA)
    words = ["recipe=digits", "plugin=noisy", "data.name=noisy", "model.name=cnn", "batch_size=12", "epochs=2", *QUIET]
    reads = []
    for mode, reader in (("mode=single data.workers=0", "main"), ("mode=ddp nproc=2 data.workers=2", "worker")):
        ok(*words, *mode.split(), f"output={reader}", cwd=tmp_path, env={"READER": reader})
        lines = (tmp_path / "reads").read_text().splitlines()
        (tmp_path / "reads").unlink()
        reads.append(lines)
    one, many = map(set, reads)
    assert len(many) == 2 * 48 and many <= one
