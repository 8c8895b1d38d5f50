"""Texts for the user's terminal: without signs that would change it, and with the commands that work here."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec


def plain(text: str) -> str:
    """A text as one may print it: what would move the cursor, as in a folder's name, becomes a question mark."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def as_typed(text: str) -> str:
    """A plain text whose commands are those that work here.

    launch.sh brings a Python of its own, which a shell finds under no name: it is started by `./launch.sh`, and what is
    installed goes into its environment.
    """
    text, command = plain(text), os.environ.get("TRAINER_COMMAND")
    if not command:
        return text
    board = os.environ.get("TRAINER_TENSORBOARD", f"{command} tensorboard")
    text = text.replace("python -m trainer", command).replace("python -m tensorboard.main", board)
    return text.replace("pip install", _install())


def _install() -> str:
    """What installs into this Python's environment; one that uv made has no pip."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
