"""Ranks for a program: `python -m trainer` in a child; its output, questions and result come back to the caller."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from trainer.errors import KINDS, Interrupted, TrainerError
from trainer.launch import endings
from trainer.processes import family
from trainer.recipe import Recipe
from trainer.saving.run_folder import fresh_folder

CALLER = "TRAINER_CALLER"  # the socket of the calling program
WANTED = "TRAINER_CALLER_WANTS"  # which reports it wants
POLL = 0.2  # seconds between two checks whether the child lives
DRAIN = 1.0  # seconds that output may take to arrive after the child's end

Answer = Callable[[dict[str, Any]], dict[str, Any]]  # to a report of rank 0: what the program asks for


def train_in_children(
    recipe: Recipe,
    plugin: str | None = None,
    nproc: str | None = None,
    given: Mapping[str, bytes] | None = None,
    answer: Answer | None = None,
    wanted: str = "",
) -> dict[str, Any]:
    """Train a many-process mode from the Python API: `python -m trainer` in a child, its result.json as the answer.

    Args:
        plugin, nproc: as on the command line.
        given: files to be importable in the ranks, by name, such as the module that `plugin` names.
        answer: called in this thread with each report of rank 0; where it raises, the run ends, and this raises it.
        wanted: which reports rank 0 sends.

    Raises:
        TrainerError: of the kind that the child's exit code names, with its line. `Interrupted` after Ctrl-C.
    """
    folder = Path(recipe.output).expanduser() if recipe.output else fresh_folder(recipe)
    with tempfile.TemporaryDirectory(prefix="trainer-") as temporary, ExitStack() as closing:
        command = [sys.executable, "-m", "trainer", f"recipe={_written(recipe, folder, Path(temporary))}"]
        command += [f"{key}={value}" for key, value in (("nproc", nproc), ("plugin", plugin)) if value]
        variables = _environment(given or {}, Path(temporary, "modules of the caller"))
        server = closing.enter_context(_Server(Path(temporary, ".caller"), answer)) if answer is not None else None
        if server is not None:
            variables |= {CALLER: server.address, WANTED: wanted}
        redirected = sys.stdout is not sys.__stdout__  # a notebook's, say, which a child does not know
        stopped, printed, errors, code = False, None, None, Interrupted.code
        try:
            with family.started(
                command,
                leaves=lambda child: child.wait(),
                environment=variables,
                stdout=subprocess.PIPE if redirected else None,
                stderr=subprocess.PIPE,
            ) as child:
                errors = _Copy(child.stderr, lambda: sys.stderr)
                printed = _Copy(child.stdout, lambda: sys.stdout) if redirected else None
                try:
                    if server is not None:
                        server.serve(child)
                    child.wait()
                finally:
                    if server is not None:
                        server.close()  # rank 0 waits for no answer any more
        except KeyboardInterrupt:
            stopped = True
        if errors is not None:
            code = endings.public_code(child.returncode)
        for copy in filter(None, (printed, errors)):
            copy.join(DRAIN)
    if server is not None and server.raised is not None:
        raise server.raised
    if stopped and code != 0:
        raise Interrupted((errors.last if errors and code == Interrupted.code else "") or "stopped by Ctrl-C")
    if code == 0:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result
    assert errors is not None
    last = errors.last or errors.end or f"the training ended with exit code {code}"
    raise KINDS.get(code, TrainerError)(last)


def _written(recipe: Recipe, output: Path, home: Path) -> Path:
    """The recipe as a file below `home`, for a run in the folder `output`."""
    file = home / recipe.name / "recipe.yaml"  # a folder's name is its recipe's
    file.parent.mkdir()
    file.write_text(recipe.replace(output=str(output.absolute())).to_yaml(), encoding="utf-8")
    return file


def _environment(given: Mapping[str, bytes], modules: Path) -> dict[str, str]:
    """The child's: its ranks import from wherever this program does, and what is given, in a new folder."""
    modules.mkdir()
    for name, content in given.items():
        Path(modules, name).write_bytes(content)
    places = [str(modules), *(os.path.abspath(path) for path in sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


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


class _Server:
    """Receives the reports of a child's rank 0, and answers what its program asks for."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.answer = answer
        self.raised: BaseException | None = None
        self._peer: socket.socket | None = None
        try:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(path))
            self.address = str(path)
        except OSError:  # a path that is too long for one
            self._socket = socket.socket(socket.AF_INET)
            self._socket.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._socket.listen(1)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self, child: subprocess.Popen[str]) -> None:
        """Answer until the child has ended or hangs up."""
        while child.poll() is None:
            if select.select([self._socket], [], [], POLL)[0]:
                self._peer = self._socket.accept()[0]
                break
        if self._peer is None:
            return
        with self._peer.makefile("rwb") as wire:
            while child.poll() is None and self.raised is None:
                if not select.select([self._peer], [], [], POLL)[0]:
                    continue
                line = wire.readline()
                if not line:
                    return
                try:
                    reply = self.answer(json.loads(line))
                except Exception as error:
                    self.raised = error
                    reply = {"raised": f"{type(error).__name__}: {error}"}
                with suppress(OSError):  # rank 0 may be gone
                    wire.write(json.dumps(reply).encode() + b"\n")
                    wire.flush()

    def close(self) -> None:
        self._socket.close()
        if self._peer is not None:
            self._peer.close()


def connect(address: str) -> socket.socket:
    """In rank 0: the connection to the program."""
    host, _, port = address.rpartition(":")
    if host:
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection
