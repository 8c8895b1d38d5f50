"""The user's terminal: texts that are safe to print, commands that work here, waits that are explained."""

from __future__ import annotations

import errno
import io
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

from trainer.errors import Interrupted, RecipeError

BOLD, DIM, RED, GREEN = "1", "2", "31", "1;32"  # of SGR: they can be read on light and on dark
PATIENCE = 5.0  # seconds of silence until a wait is explained


def plain(text: str) -> str:
    """A text as one may print it: what would move the cursor, as in a folder's name, becomes a question mark."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def as_typed(text: str) -> str:
    """A plain text whose commands are those that work here.

    launch.sh brings a Python of its own, which a shell finds under no name: it is started by `./launch.sh`, and what is
    installed goes into its environment. What pip installed is started by `trainer`.
    """
    text, command = plain(text), os.environ.get("TRAINER_COMMAND")
    if not command:
        return text
    board = os.environ.get("TRAINER_TENSORBOARD", f"{command} tensorboard")
    text = text.replace("python -m trainer", command).replace("python -m tensorboard.main", board)
    python = shlex.quote(sys.executable)  # in an environment that uv made there is no pip
    install = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
    return text.replace("pip install", install)


def say(text: str, end: str = "\n") -> None:
    """Print a text, as it is safe and with the commands that work here."""
    print(as_typed(text), end=end, flush=True)


def agreed(command: str, what: str, question: str) -> bool:
    """Whether the user lets a command do `what`. Raises RecipeError where nobody can answer, Interrupted."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise RecipeError(f"{command} asks before it deletes, but nobody can answer here: add yes=true")
    print(what)
    try:
        return input(f"{question} y/N ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
    except KeyboardInterrupt:
        print()  # the line that was not ended
        raise Interrupted("stopped by Ctrl-C; nothing was done") from None


def name_installed_command(started: str) -> None:
    """Have texts tell to type `trainer`, or its path where a shell does not find it: `started` is what ran."""
    command = "trainer" if shutil.which("trainer") == started else shlex.quote(started)
    python = "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)
    os.environ.setdefault("TRAINER_COMMAND", command)
    os.environ.setdefault("TRAINER_TENSORBOARD", f"{python} -m tensorboard.main")


def rewrites(stream: TextIO | None) -> bool:
    """Whether a line of this stream can be replaced; a program may have closed its stream."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    """For stdout, where that shows styles and NO_COLOR (no-color.org) is not set."""
    shows = style and rewrites(sys.stdout) and not os.environ.get("NO_COLOR")
    return f"\033[{style}m{text}\033[0m" if shows else text


@contextmanager
def explain_delay(what: Callable[[], str], after: float = PATIENCE) -> Iterator[None]:
    """Within this block, one line on stderr after `after` seconds: what `what` then returns, unless it is empty."""

    def tell() -> None:
        text = what()
        if text:
            print(f"trainer: {plain(text)}", file=sys.stderr, flush=True)

    timer = threading.Timer(after, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Terminal(io.FileIO):
    """A terminal that may close while the step ends and is saved: what is written then goes nowhere."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """From now on no print and no progress bar fails when the terminal is closed; SIGHUP tells of it."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and not stream.closed and stream.isatty():
            buffer = io.BufferedWriter(_Terminal(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
