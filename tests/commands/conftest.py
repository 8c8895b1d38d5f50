"""A stand-in for the processes of trials."""

import pytest

from tests.commands.trials.stand_in import Machine
from trainer.commands.trials import engine
from trainer.processes import resources


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = Machine()
    monkeypatch.setattr(engine.family, "started", found.started)
    monkeypatch.setattr(engine, "MOMENT", 0.0)
    monkeypatch.setattr(resources, "cores", lambda: 2)
    return found
