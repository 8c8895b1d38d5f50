"""The comparison's folder: chosen, held under a lock, and continued only as what it was."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import FolderInUseError, RecipeError
from trainer.saving import locks
from trainer.saving.files import usable_json
from trainer.saving.run_folder import write_atomically

FREE = ("repeats",)  # of what was asked, a continued comparison may change


@contextmanager
def claim(output: str | None, name: str, resume: bool, asked: dict[str, Any]) -> Iterator[Path]:
    """The comparison's folder, held under a lock.

    Raises:
        FolderInUseError: it holds another comparison, finished or alive.
        RecipeError: it is continued with other words.
        SetupError: it cannot be written.
    """
    stem = f"runs/compare-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(output).expanduser() if output else Path(stem)
    number = 1
    while not output and path.exists():
        number += 1
        path = Path(f"{stem}-{number}")
    lock = locks.hold(path, "run")
    try:
        before = previous(path).get("asked")
        before = before if isinstance(before, dict) else None
        used = before is not None or any((path / file).exists() for file in ("runs", "recipe.yaml", "result.json"))
        if used and not resume:
            raise FolderInUseError(f"{path} is used already: continue with resume=auto, or choose another output=")
        if used and before is None:
            raise FolderInUseError(f"{path} holds something else than a comparison; choose another output=")
        now = asked
        changed = [key for key in now if before and key not in FREE and before.get(key) != now[key]]
        if before and changed:
            key = changed[0]
            if key == "settings":
                raise RecipeError(
                    f"resume=auto: {path} compares another recipe, it was changed; choose another output="
                )
            raise RecipeError(
                f"resume=auto: {path} compares with {key} {before.get(key)}, not {now[key]}; "
                "put it back or choose another output="
            )
        write_atomically(path / "compare.json", json.dumps({**previous(path), "asked": now}, indent=2) + "\n")
        yield path
    finally:
        os.close(lock)


def previous(folder: Path) -> dict[str, Any]:
    """compare.json of an earlier part; empty where there is none."""
    return usable_json(folder / "compare.json")
