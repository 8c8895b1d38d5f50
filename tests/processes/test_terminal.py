"""The commands that launch.sh asks the user to type work there."""

import os
import sys

import pytest

from trainer.processes import terminal

TOLD = "4 .HEIC files: pip install pillow-heif; python -m trainer runs lists runs"


@pytest.mark.parametrize(
    ("pip", "install"), [(object(), "{} -m pip install"), (None, "uv pip install --python {}")]
)
def test_commands_of_launch_sh(pip, install, monkeypatch):
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    monkeypatch.delenv("TRAINER_TENSORBOARD", raising=False)
    monkeypatch.setattr(terminal, "find_spec", lambda name: pip)
    install = install.format(sys.executable)
    assert (
        terminal.localize_commands("python -m tensorboard.main --logdir x")
        == "./launch.sh tensorboard --logdir x"
    )
    assert (
        terminal.localize_commands(TOLD)
        == f"4 .HEIC files: {install} pillow-heif; ./launch.sh runs lists runs"
    )
    monkeypatch.delenv("TRAINER_COMMAND")
    assert terminal.localize_commands(TOLD) == TOLD


@pytest.mark.parametrize("on_path", [True, False])
def test_an_installed_program_is_started_by_its_name(on_path, monkeypatch, tmp_path):
    folder = tmp_path / "a venv"
    folder.mkdir()
    for name in ("trainer", "python"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(os, "environ", {"PATH": str(folder) if on_path else "/nowhere"})
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    terminal.name_installed_command(str(folder / "trainer"))
    lines = terminal.localize_commands(
        "python -m trainer runs | python -m tensorboard.main --logdir runs"
    ).split(" | ")
    home = "" if on_path else f"'{folder}/"
    end = "" if on_path else "'"
    assert lines == [
        f"{home}trainer{end} runs",
        f"{home}python{end} -m tensorboard.main --logdir runs",
    ]
