"""Ranks for a program: `python -m trainer` in a child, whose output and result come back to the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trainer.errors import KINDS, Interrupted, TrainerError
from trainer.launch import endings
from trainer.processes import family
from trainer.recipe import Recipe
from trainer.saving.run_folder import fresh_folder

DRAIN = 5.0  # seconds that output may take to arrive after the child's end


def train_in_children(
    recipe: Recipe, plugin: str | None = None, nproc: str | None = None, given: Mapping[str, bytes] | None = None
) -> dict[str, Any]:
    """Train a many-process mode from the Python API: `python -m trainer` in a child, its result.json as the answer.

    Args:
        plugin, nproc: as on the command line.
        given: files to be importable in the ranks, by name, such as the module that `plugin` names.

    Raises:
        TrainerError: of the kind that the child's exit code names, with its line. `Interrupted` after Ctrl-C.
    """
    folder = Path(recipe.output).expanduser() if recipe.output else fresh_folder(recipe)
    with tempfile.TemporaryDirectory(prefix="trainer-") as temporary:
        file = Path(temporary, recipe.name, "recipe.yaml")  # a folder's name is its recipe's
        file.parent.mkdir()
        file.write_text(recipe.replace(output=str(folder.absolute())).to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "trainer", f"recipe={file}"]
        command += [f"{key}={value}" for key, value in (("nproc", nproc), ("plugin", plugin)) if value]
        modules = Path(temporary, "modules of the caller")
        modules.mkdir()
        for name, content in (given or {}).items():
            Path(modules, name).write_bytes(content)
        places = [str(modules), *(os.path.abspath(path) for path in sys.path)]  # ranks import from where we do
        redirected = sys.stdout is not sys.__stdout__  # a notebook's, say, which a child does not know
        stopped, printed, errors, code = False, None, None, Interrupted.code
        try:
            with family.started(
                command,
                leaves=lambda child: child.wait(),
                environment={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
                stdout=subprocess.PIPE if redirected else None,
                stderr=subprocess.PIPE,
            ) as child:
                errors = _Copy(child.stderr, lambda: sys.stderr)
                printed = _Copy(child.stdout, lambda: sys.stdout) if redirected else None
                child.wait()
        except KeyboardInterrupt:
            stopped = True
        if errors is not None:
            code = endings.public_code(child.returncode)
        for copy in filter(None, (printed, errors)):
            copy.join(DRAIN)
    if stopped and code != 0:
        raise Interrupted((errors.last if errors and code == Interrupted.code else "") or "stopped by Ctrl-C")
    if code == 0:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result
    assert errors is not None
    raise KINDS.get(code, TrainerError)(errors.last or errors.end or f"the training ended with exit code {code}")


class _Copy(threading.Thread):
    """Copies a child's output to ours until it ends, but for its error, which is raised."""

    def __init__(self, source: IO[str] | None, target: Callable[[], Any]) -> None:
        super().__init__(name="output", daemon=True)
        self.source, self.target = source, target
        self.last = ""  # the last line that the child printed of its end
        self.end = ""  # the last line of all, for a child that printed nothing of its end
        self.start()

    def run(self) -> None:
        for line in self.source or ():
            self.end = line.strip() or self.end
            if line.startswith("trainer: "):
                self.last = self.end.removeprefix("trainer: ").removeprefix("error: ")
            if not line.startswith("trainer: error: "):
                with suppress(OSError, ValueError, AttributeError):  # there may be nobody to read it
                    self.target().write(line)
                    self.target().flush()
