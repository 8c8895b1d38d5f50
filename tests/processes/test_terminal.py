"""The commands that launch.sh asks the user to type work there."""

import os
import subprocess
import sys

import pytest

from trainer.processes import terminal

TOLD = "4 .HEIC files: pip install pillow-heif; python -m trainer runs lists runs"


@pytest.mark.parametrize(
    ("pip", "install"), [(object(), "{} -m pip install"), (None, "uv pip install --python {}")]
)
def test_commands_of_launch_sh(pip, install, monkeypatch):
    monkeypatch.setenv("TRAINER_COMMAND", "./launch.sh")
    monkeypatch.setattr(terminal, "find_spec", lambda name: pip)
    install = install.format(sys.executable)
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
    program = folder / "trainer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(os, "environ", {"PATH": str(folder) if on_path else "/nowhere"})
    terminal.name_installed_command(str(program))
    command = "trainer" if on_path else f"'{program}'"
    assert terminal.localize_commands("python -m trainer runs") == f"{command} runs"


def test_a_closed_pipe_is_no_error():
    """`python -m trainer evaluate RUN | head -1` ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "from trainer.processes.terminal import say\nfor _ in range(3): say('line')"
    completed = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (completed.returncode, completed.stderr) == (0, b"")
