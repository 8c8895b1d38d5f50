"""How the user started this program, and so what to type to start it again."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec


def as_typed(text: str) -> str:
    """A text whose commands are those that work here.

    launch.sh brings a Python of its own, which a shell finds under no name: it is started by `./launch.sh`, and what is
    installed goes into its environment.
    """
    command = os.environ.get("TRAINER_COMMAND")
    if not command:
        return text
    board = os.environ.get("TRAINER_TENSORBOARD", f"{command} tensorboard")
    text = text.replace("python -m trainer", command).replace("python -m tensorboard.main", board)
    return text.replace("pip install", _install())


def _install() -> str:
    """What installs into this Python's environment; one that uv made has no pip."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
