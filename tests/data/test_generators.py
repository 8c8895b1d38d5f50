"""Generators of a data set's own: their draws belong to a sample, whoever reads it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from tests.command_line import python
from tests.data.test_loaders import epoch, loading, photo_sets, same
from trainer.data.generators import Generators

__all__ = ["loading"]  # the fixture
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


class Noisy(Transformed):
    """Images that a generator of their own makes darker."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((3, 20, 30), int(200 * drawn(self.transform)), dtype=torch.uint8), index


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_any_number_of_readers_see_the_same_images(loading, kind):
    found = []
    for workers in (0, 2):
        sets = photo_sets()
        sets.train.items = Noisy(KINDS[kind]())
        loader = loading(sets, f"data.workers={workers}")
        found.append([*epoch(loader, 0), *epoch(loader, 1)])
    assert same(*found)
    assert len({float(x.mean()) for images, _ in found[0] for x in images}) > 30, "and others for each sample and epoch"


SCRIPT = """
import torch
from trainer.processes import fork_server

class Counted:  # what is pickled is a tensor that nobody has
    def __reduce__(self):
        return sum, (torch.arange(1000),)

def draw(generator, counted, answer):
    answer.send((torch.rand((), generator=generator).item(), int(counted)))

if __name__ == "__main__":
    context, generator = fork_server.context(), torch.Generator().manual_seed(3)
    ours, theirs = context.Pipe()
    fork_server.start(context.Process(target=draw, args=(generator, Counted(), theirs)))
    theirs.close()
    assert ours.recv() == (torch.rand((), generator=generator).item(), 499500)
"""


@pytest.mark.slow
def test_one_of_torch_reaches_the_workers_of_a_script(tmp_path):
    """Its state is shared memory, as any tensor that pickling makes, which has to last until they have it."""
    (tmp_path / "draws.py").write_text(SCRIPT)
    done = python(tmp_path / "draws.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
