"""A stand-in for the processes of trials."""

import pytest

from tests.commands.trials.stand_in import Machine
from trainer.commands.trials import engine, report
from trainer.processes import resources


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    actual = Machine()
    monkeypatch.setattr(engine.family, "run_command", actual.started)
    monkeypatch.setattr(engine, "MOMENT", 0.0)
    monkeypatch.setattr(resources, "count_cores", lambda: 2)
    others = lambda self: 1.5 * (actual.ran[-1:] != [] and actual.ran[-1] in actual.busy)  # noqa: E731
    monkeypatch.setattr(report.OtherProcesses, "cores", others)
    return actual
