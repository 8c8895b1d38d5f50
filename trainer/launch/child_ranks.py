"""Start ranks for a Python program: run `python -m trainer` in a child and return its result."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trainer.errors import KINDS, Interrupted, TrainerError
from trainer.launch import endings
from trainer.processes import early, family, interrupts
from trainer.recipe import Recipe, format_typed
from trainer.saving.run_folder import choose_folder

# Maximum number of seconds to wait for the last output of a child that has exited.
DRAIN_SECONDS = 5.0


def train_in_children(
    recipe: Recipe,
    plugin: str | None,
    nproc: str | None,
    modules: Mapping[str, bytes],
    check: Path | None,
) -> dict[str, Any]:
    """Train in a mode that uses several processes, for a caller of the Python API.

    Args:
        recipe: recipe of the run.
        plugin: value of the argument plugin=, if any.
        nproc: value of the argument nproc=, if any.
        modules: contents of Python files by file name, which ranks can import. One of them may be
            the module `plugin`.
        check: temporary run folder of a run with check=true; None for any other run.

    Returns:
        The contents of the run's result.json.

    Raises:
        TrainerError: the training failed. The exit code of the child determines the subclass
            (`Interrupted` after Ctrl-C), and the message is the line that the child printed.
    """
    folder = check or choose_folder(recipe)
    with tempfile.TemporaryDirectory(prefix="trainer-") as temporary:
        # The folder of recipe.yaml must have the recipe's name, because the child names the recipe
        # after this folder.
        file = Path(temporary, recipe.name, "recipe.yaml")
        file.parent.mkdir()
        with_output = recipe.replace(output=str(folder.absolute()))
        file.write_text(with_output.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "trainer", f"recipe={file}", *format_typed(recipe)]
        if nproc:
            command.append(f"nproc={nproc}")
        if plugin:
            command.append(f"plugin={plugin}")
        if check:
            command.append(f"check={check}")
        module_folder = Path(temporary, "modules of the caller")
        module_folder.mkdir()
        for name, content in modules.items():
            Path(module_folder, name).write_bytes(content)
        # Ranks import from the same directories as this process.
        search_path = [str(module_folder), *map(os.path.abspath, sys.path)]
        # A child does not inherit a `sys.stdout` that was replaced, as in a notebook. The child's
        # output is then copied to `sys.stdout`.
        is_redirected = sys.stdout is not sys.__stdout__
        with (
            family.run_command(
                command,
                environment={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
                stdout=subprocess.PIPE if is_redirected else None,
                stderr=subprocess.PIPE,
            ) as child,
            _signals_sent_to(child),
        ):
            errors = _Copy(child.stderr, lambda: sys.stderr)
            printed = _Copy(child.stdout, lambda: sys.stdout)
            child.wait()
        code = endings.public_code(child.returncode)
        for copy in (printed, errors):
            copy.join(DRAIN_SECONDS)
    if code == 0:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result
    if code == Interrupted.code and not errors.last:
        raise Interrupted("stopped by Ctrl-C")
    raise KINDS.get(code, TrainerError)(
        errors.last or errors.end or f"the training ended with exit code {code}"
    )


def _signals_sent_to(child: subprocess.Popen[str]) -> AbstractContextManager[None]:
    """Return a context manager that forwards signals to the child, which saves and exits.

    Only this process counts how often Ctrl-C was pressed.
    """
    ctrl_c = early.CtrlC(interrupts.ctrl_c_routes())

    def send(number: int, frame: FrameType | None) -> None:
        if ctrl_c.is_second(number):
            number = interrupts.SECOND_CTRL_C
        child.send_signal(number)

    return interrupts.install_handler(interrupts.stop_signals(), send)


class _Copy(threading.Thread):
    """Thread that copies the output of a child, except its error line, which the caller raises."""

    def __init__(self, source: IO[str] | None, target: Callable[[], Any]) -> None:
        """Start the thread.

        Args:
            source: output of the child. None if the child writes to the output of this process, so
                that there is nothing to copy.
            target: returns the stream to write to.
        """
        super().__init__(name="output", daemon=True)
        self.source = source
        self.target = target
        # Last line in which the child reported how it ended.
        self.last = ""
        # Last line of any kind, because a killed child does not report how it ended.
        self.end = ""
        self.start()

    def run(self) -> None:
        for line in self.source or ():
            self.end = line.strip() or self.end
            if line.startswith("trainer: "):
                self.last = self.end.removeprefix("trainer: ").removeprefix("error: ")
            if not line.startswith("trainer: error: "):
                # A closed pipe or notebook must not end the training.
                with suppress(OSError, ValueError, AttributeError):
                    self.target().write(line)
                    self.target().flush()
