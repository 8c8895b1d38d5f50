"""Random generators of a user's data set: their numbers belong to a sample, whichever process reads
it.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from tests.command_line import python
from tests.data.loading import epoch, photo_sets, same
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
    return (
        generator.random_sample()
        if isinstance(generator, np.random.RandomState)
        else generator.random()
    )


class Jitter(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


class Transformed:
    def __init__(self, transform):
        self.transform, self.samples = transform, [(n, n) for n in range(5000)]


WAYS = {
    "attribute": lambda generator: Transformed(generator),
    "transforms": lambda generator: Subset(
        Transformed(nn.Sequential(nn.Identity(), Jitter(generator))), [0]
    ),
    "dictionary": lambda generator: Transformed({"train": [(None, Jitter(generator))]}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_generator_is_found_seeded_and_restored(way, kind):
    one = KINDS[kind]()
    two = KINDS[kind]()
    actual = Generators(WAYS[way](one))
    other = Generators(WAYS[way](two))
    assert [*actual] == [one]
    drawn(two)
    untouched = drawn(KINDS[kind]())
    with actual.restored():
        actual.seed(2**63 + 5)
        other.seed(2**63 + 5)
        first = drawn(one)
        assert first == drawn(two) != untouched
        actual.seed(6)
        assert drawn(one) != first
    assert drawn(one) == untouched


def test_several_draw_different_numbers_and_a_new_one_is_seen():
    data = Transformed([KINDS["numpy"](), KINDS["numpy"]()])
    actual = Generators(data)
    actual.seed(1)
    first = [drawn(generator) for generator in data.transform]
    data.transform[0] = KINDS["numpy"]()
    actual.seed(1)
    assert [drawn(generator) for generator in data.transform] == first
    assert first[0] != first[1]
    assert not [*Generators(data.samples)]


class Noisy(Transformed):
    """Images that a generator of their own makes darker."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full(
            (3, 20, 30),
            int(200 * drawn(self.transform)),
            dtype=torch.uint8,
        ), index


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_any_number_of_readers_see_the_same_images(loading, kind):
    collected = []
    for workers in (0, 2):
        sets = photo_sets()
        sets.train.items = Noisy(KINDS[kind]())
        loader = loading(sets, f"data.workers={workers}")
        collected.append([*epoch(loader, 0), *epoch(loader, 1)])
    assert same(*collected)
    assert len({float(x.mean()) for images, _ in collected[0] for x in images}) > 30, (
        "and others for each sample and epoch"
    )


SCRIPT = """
import torch
from trainer.processes import fork_server

class Counted:  # what is pickled is a tensor that nobody has
    def __reduce__(self):
        return sum, (torch.arange(1000),)

def draw(generator, counted, answer):
    answer.send((torch.rand((), generator=generator).item(), int(counted)))

if __name__ == "__main__":
    context, generator = fork_server.start_server(), torch.Generator().manual_seed(3)
    ours, theirs = context.Pipe()
    fork_server.start_process(context.Process(target=draw, args=(generator, Counted(), theirs)))
    theirs.close()
    assert ours.recv() == (torch.rand((), generator=generator).item(), 499500)
"""


@pytest.mark.slow
def test_one_of_torch_reaches_the_workers_of_a_script(tmp_path):
    """The state of a torch generator is in shared memory, like any tensor that is pickled, and must
    exist until the workers have it.
    """
    (tmp_path / "draws.py").write_text(SCRIPT)
    completed = python(tmp_path / "draws.py", cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
