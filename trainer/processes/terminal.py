"""Output to the user's terminal: text without control characters, commands that the user can type,
styles, questions, and explanations of long waits.
"""

import errno
import io
import os
import shlex
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

from trainer.errors import Interrupted, RecipeError

# ANSI styles (SGR parameters) that are readable on light and on dark backgrounds.
BOLD = "1"
DIM = "2"
RED = "31"
GREEN = "1;32"
# Type of a function that prints a line, such as `say`.
Say = Callable[[str], None]
# Minimum width in characters of the last column of a wrapped line.
MIN_TEXT = 30
# Beginnings of commands. A line that contains one is not wrapped, so that it can be copied.
COMMANDS = ("python -m trainer", "pip install ", "torchrun ", "./launch.sh ")
# Number of seconds after which `explain_delay` prints.
PATIENCE = 5.0


def escape_control_characters(text: str) -> str:
    """Replace control characters by question marks.

    Text from outside, such as a folder's name, could otherwise move the cursor.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def localize_commands(text: str) -> str:
    """Replace control characters, and rewrite the commands in `text` to those that work here.

    The user types `./launch.sh` or `trainer` instead of `python -m trainer`, depending on how this
    program was installed. The Python of launch.sh is not on the shell's path, so commands that
    install packages name this Python by its path.
    """
    text = escape_control_characters(text)
    command = os.environ.get("TRAINER_COMMAND")
    if not command:
        return text
    text = text.replace("python -m trainer", command)
    # Environments created by uv do not contain pip, so uv installs into them.
    python = shlex.quote(sys.executable)
    if find_spec("pip"):
        install = f"{python} -m pip install"
    else:
        install = f"uv pip install --python {python}"
    return text.replace("pip install", install)


def terminal_width() -> int:
    """Return the number of columns of the terminal; without a terminal, `sys.maxsize`."""
    return shutil.get_terminal_size((sys.maxsize, 24)).columns


def fill(text: str, width: int, start: str = "", indent: int = 0) -> str:
    """Wrap `text` between words. Long words, such as paths, stay whole, so that they can be copied.

    Args:
        text: A text without line breaks.
        width: Maximum width of a line in characters, except for lines of a single long word.
        start: Beginning of the first line.
        indent: Number of spaces at the beginning of all other lines.
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def fit(text: str) -> str:
    """Wrap the lines of `text` that are wider than the terminal.

    Continuation lines are aligned with the last column of the line, which starts after the last
    double space in the first half of the terminal. If the column is narrower than
    `MIN_TEXT`, they are indented by 4 spaces. Lines that contain a command are not wrapped.
    """
    width = terminal_width()
    lines = []
    for line in text.split("\n"):
        if len(line) > width and not any(command in line for command in COMMANDS):
            column = line.rfind("  ", 0, width // 2)
            indent = 4
            if column >= 0 and width - column - 2 >= MIN_TEXT:
                indent = column + 2
            line = fill(line, width, indent=indent)
        lines.append(line)
    return "\n".join(lines)


def say(text: str, end: str = "\n") -> None:
    """Print `text`, rewritten by `localize_commands` and fitted to the terminal."""
    show(localize_commands(fit(text)) + end)


def show(text: str) -> None:
    """Print `text` as it is. If the reader of a pipe, such as `head`, has closed it, do nothing."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # Python flushes stdout at exit and would print an error, so stdout becomes /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ask_permission(command: str, what: str, question: str) -> bool:
    """Ask the user for permission, and return whether the answer is yes.

    Args:
        command: name of the command that asks.
        what: description of what the command is going to do.
        question: question, without the choices.

    Raises:
        RecipeError: stdin is not a terminal, so nobody can answer.
        Interrupted: the user pressed Ctrl-C.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise RecipeError(
            f"{command} asks before it deletes, but nobody can answer here: add yes=true"
        )
    print(what)
    try:
        return input(f"{question} y/N ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
    except KeyboardInterrupt:
        # End the line of the question, on which the cursor still is.
        print()
        raise Interrupted("stopped by Ctrl-C; nothing was done") from None


def name_installed_command(started: str) -> None:
    """Let messages name the installed command `trainer`, or its path if it is not on PATH.

    Args:
        started: path of the script that is running.
    """
    command = "trainer"
    if shutil.which(command) != started:
        command = shlex.quote(started)
    os.environ.setdefault("TRAINER_COMMAND", command)


def can_overwrite(stream: TextIO | None) -> bool:
    """Return whether lines of a stream can be overwritten.

    Args:
        stream: output stream. None if the user's program has closed it.
    """
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def add_style(text: str, style: str) -> str:
    """Add an ANSI style to a string for stdout.

    The string is unchanged if stdout does not show styles, or if NO_COLOR (no-color.org) is set.
    """
    if style and can_overwrite(sys.stdout) and not os.environ.get("NO_COLOR"):
        return f"\033[{style}m{text}\033[0m"
    return text


@contextmanager
def explain_delay(what: Callable[[], str]) -> Iterator[None]:
    """Print an explanation to stderr if the block takes longer than `PATIENCE` seconds.

    Args:
        what: function that returns the explanation. An empty string is not printed.
    """

    def explain() -> None:
        text = what()
        if text:
            print(f"trainer: {escape_control_characters(text)}", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, explain)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Terminal(io.FileIO):
    """Stream to a terminal. After the terminal has closed, output is discarded."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """Discard output to a closed terminal instead of raising an error.

    When the user closes a terminal, the run receives SIGHUP. The run still saves and prints then.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and not stream.closed and stream.isatty():
            buffer = io.BufferedWriter(_Terminal(number, "w", closefd=False))
            text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, text)
