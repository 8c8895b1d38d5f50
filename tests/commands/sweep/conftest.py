"""Two cores, wherever the tests run."""

import pytest

from trainer.processes import resources


@pytest.fixture
def machine(machine, monkeypatch):
    monkeypatch.setattr(resources, "cores", lambda: 2)
    return machine
