"""Processes that measure at once: each calls one function on its task, and leaves the answer in a folder.

`python -m trainer.commands.trials.measuring MODULE:FUNCTION FOLDER RANK` is one of them.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.commands.trials.engine import failure_line
from trainer.errors import PeerError, in_one_line
from trainer.processes import family
from trainer.saving.files import writing


def answers(
    function: Callable[[Any, Path, int], Any], task: Any, count: int, folder: Path, log: Path | None = None,
    timeout: float = math.inf,
) -> list[Any]:  # fmt: skip
    """What `count` processes answer that call `function(task, folder, rank)` at the same time.

    Args:
        folder: is emptied first.
        log: what they print; None: this process's streams.

    Raises:
        PeerError: one of them failed, with its line, or they did not end within `timeout` seconds.
    """
    where = f"{function.__module__}:{function.__name__}"
    with ExitStack() as stack:
        with writing(folder.parent):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "task").write_bytes(pickle.dumps(task))
            output = None if log is None else stack.enter_context(log.open("w", encoding="utf-8"))
            if output is not None:
                print(where, file=output, flush=True)
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", __name__, where, str(folder)]
        family.at_once([[*command, str(rank)] for rank in range(count)], environment, output, timeout)
    files = [folder / str(rank) for rank in range(count)]
    found = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
    errors = [answer for answer in found if isinstance(answer, Exception)]
    if errors or len(found) < count:
        died = "a measuring process died" if log is None else failure_line(log, 1)
        raise PeerError(str(errors[0]) if errors else died)
    return found


def main(where: str, folder: Path, rank: int) -> None:
    family.die_with_parent()
    module, _, function = where.partition(":")
    try:
        task = pickle.loads((folder / "task").read_bytes())
        answer = getattr(importlib.import_module(module), function)(task, folder, rank)
    except Exception as error:
        answer = PeerError(in_one_line(error)[0])
    draft = folder / f".{rank}"
    draft.write_bytes(pickle.dumps(answer))
    draft.rename(folder / str(rank))
    sys.stdout.flush()
    os._exit(isinstance(answer, Exception))  # gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
