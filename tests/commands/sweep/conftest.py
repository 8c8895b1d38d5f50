"""A stand-in for the runs' processes, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.sweep.stand_in import Machine
from trainer.commands.sweep import trial_runner
from trainer.processes import resources


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.chdir(tmp_path)
    made = Machine()
    monkeypatch.setattr(trial_runner.family, "started", made.started)
    monkeypatch.setattr(trial_runner, "MOMENT", 0.0)
    monkeypatch.setattr(resources, "cores", lambda: 2)
    return made
