"""What a user of launch.sh is told to type is what works there."""

import sys

import pytest

from trainer.processes import terminal

TOLD = "4 .HEIC files: pip install pillow-heif; python -m trainer runs lists runs"


@pytest.mark.parametrize(("pip", "install"), [(object(), "{} -m pip install"), (None, "uv pip install --python {}")])
def test_commands_of_launch_sh(pip, install, monkeypatch):
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    monkeypatch.delenv("TRAINER_TENSORBOARD", raising=False)
    monkeypatch.setattr(terminal, "find_spec", lambda name: pip)
    install = install.format(sys.executable)
    assert terminal.as_typed("python -m tensorboard.main --logdir x") == "./launch.sh tensorboard --logdir x"
    assert terminal.as_typed(TOLD) == f"4 .HEIC files: {install} pillow-heif; ./launch.sh runs lists runs"


def test_elsewhere_they_stay(monkeypatch):
    monkeypatch.delenv("TRAINER_COMMAND", raising=False)
    assert terminal.as_typed(TOLD) == TOLD
