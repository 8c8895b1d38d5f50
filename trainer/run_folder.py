"""The run folder: chosen, claimed by one job at a time, and its files. Only rank 0 has one."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.recipe import Recipe
from trainer.world import job_id, place

STEP_COLUMNS = ("step", "epoch", "seconds", "train_loss", "lr", "samples_per_sec")


class RunFolder:
    """A folder held under a lock as long as this process lives.

    Attributes:
        path: the folder.
        resuming: whether the newest good checkpoint in it is to be continued.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Choose and claim the folder: `output`, or runs/<recipe>-<mode>-<time>.

        Raises:
            FolderInUseError: it holds another run, finished or alive.
            RecipeError: it is continued with a recipe that computes something else.
            SetupError: it cannot be written.
        """
        self.path = Path(recipe.output).expanduser() if recipe.output else fresh_folder(recipe)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SetupError(
                f"output={self.path} cannot be written ({error.strerror}); choose another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise FolderInUseError(f"{self.path} is in use by another run; choose another output=") from None
        try:
            self.resuming = self._claim(recipe)
        except BaseException:
            self.close()
            raise

    def _claim(self, recipe: Recipe) -> bool:
        """Whether the folder's run is to be continued; signs the lock with this job's name."""
        owner = os.pread(self._lock, 200, 0).decode(errors="replace")
        used = (self.path / "recipe.yaml").exists() or (self.path / "result.json").exists()
        restarted = place().restarts > 0 and owner == job_id()
        resuming = used and (recipe.resume == "auto" or restarted)
        if used and not resuming:
            raise FolderInUseError(
                f"{self.path} holds a run already: continue it with resume=auto, or choose another output="
            )
        if resuming:
            self._check_recipe(recipe)
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, job_id().encode(), 0)
        except OSError as error:
            raise SetupError(f"{self.path} cannot be written ({error.strerror}); choose another output=") from None
        return resuming

    def _check_recipe(self, recipe: Recipe) -> None:
        file = self.path / "recipe.yaml"
        if not file.exists():
            return
        changes = recipes.changed_keys(recipes.load(str(file)), recipe)
        if changes:
            listed = ", ".join(f"{key}: {old} there, {new} now" for key, (old, new) in list(changes.items())[:4])
            raise RecipeError(
                f"resume=auto: {self.path} was trained with another recipe ({listed}); "
                "put it back or choose another output="
            )

    def write_recipe(self, recipe: Recipe) -> None:
        """recipe.yaml, resolved and re-runnable; a continued run keeps the one it has."""
        if not (self.path / "recipe.yaml").exists():
            again = recipe.replace(output=None, resume=None)
            write_atomically(self.path / "recipe.yaml", again.to_yaml())

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.path / "result.json", json.dumps(result, indent=2, allow_nan=False, default=str) + "\n")

    def previous_result(self) -> dict[str, Any]:
        """What result.json holds from an earlier part of the run; empty where there is none."""
        try:
            found: dict[str, Any] = json.loads((self.path / "result.json").read_text())
            return found
        except (OSError, ValueError):
            return {}

    def known(self) -> dict[str, Any]:
        """What an earlier part of the run measured to choose how to run; empty where there is nothing."""
        try:
            found: dict[str, Any] = json.loads((self.path / "tuning.json").read_text())
            return found
        except (OSError, ValueError):
            return {}

    def remember(self, known: Mapping[str, Any]) -> None:
        """Keep it for later parts."""
        if known:
            write_atomically(self.path / "tuning.json", json.dumps(known, indent=2) + "\n")

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def fresh_folder(recipe: Recipe) -> Path:
    """Make runs/<recipe>-<mode>-<time>; a restart of the same job finds the one it had.

    Raises:
        SetupError: it cannot be made.
    """
    if place().restarts:
        for lock in Path("runs").glob(f"{recipe.name}-{recipe.mode}-*/.lock"):
            with suppress(OSError):
                if lock.read_text() == job_id():
                    return lock.parent
    stem = f"runs/{recipe.name}-{recipe.mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = Path(stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise SetupError(f"{path} cannot be made ({error.strerror}); choose a folder with output=") from None
    raise FolderInUseError(f"{stem} and 998 more exist already; choose a folder with output=")


class StepsFile:
    """steps.csv: one row a logged step. A resumed run drops the rows after its checkpoint."""

    def __init__(self, folder: Path, last_step: int) -> None:
        path = folder / "steps.csv"
        kept: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as old:
                kept = [row for row in csv.DictReader(old) if _whole(row) and int(row["step"]) <= last_step]
        temporary = path.with_suffix(".tmp")
        self._file = temporary.open("w", newline="")
        self._writer = csv.DictWriter(self._file, STEP_COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(kept)
        self.flush()
        temporary.replace(path)

    def add(self, row: Mapping[str, Any]) -> None:
        """A row; readers see it within about a second."""
        self._writer.writerow(row)
        if time.monotonic() - self._flushed > 1:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


def _whole(row: Mapping[str, Any]) -> bool:
    """Whether a row was written completely, or the process died within it."""
    return all(row.get(column) is not None for column in STEP_COLUMNS) and str(row["step"]).isdigit()


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
