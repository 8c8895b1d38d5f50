"""A fixture for tests of loaders."""

import multiprocessing

import pytest

from tests.command_line import latest
from tests.data.loading import CPU
from trainer.data import DataShare, Loader
from trainer.recipe import load
from trainer.training.setup import create_task


@pytest.fixture
def loading():
    """Makes loaders, which are closed in the end."""
    created = []

    def loader_of(sets, *words, shard=None):
        recipe = load(None, *latest("batch_size=8", "data.workers=0", "timeout=30", *words))
        created.append(
            Loader(
                sets,
                recipe,
                create_task(recipe, sets),
                shard or DataShare(),
                CPU,
            )
        )
        return created[-1]

    yield loader_of
    for loader in created:
        loader.close()
    assert multiprocessing.active_children() == []
