"""What a folder is and how its run stands: read with limits, never trusted, never a traceback."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trainer.errors import RecipeError, SetupError
from trainer.recipe.recipe_files import MAX_ALIASES, MAX_BYTES, stored
from trainer.recipe.text import misspelt
from trainer.saving import locks
from trainer.saving.files import read, read_json, why

Status = Literal["running", "completed", "stopped", "failed", "killed"]
ENDED: dict[Any, Status] = {"completed": "completed", "preempted": "stopped", "failed": "failed"}
OTHERS = {"compare.json": "a comparison", "predict.json": "predictions", "predictions.part": "predictions"}
FOREIGN = "no files of a run"
MAX_FILES = 20_000  # of a folder, that are counted for its size
LATEST = ("result.json", "steps.csv", "recipe.yaml", ".lock")  # files with the time at which a run last did something


@dataclass(frozen=True)
class RunSummary:
    """A folder at a glance."""

    path: Path  # as the user knows it
    kind: Literal["run", "other"]  # `run`, or what else it is
    note: str = ""  # what is wrong with it, or what it is instead of a run; empty for a sound run
    status: Status | None = None  # None where it is no run
    changed: float | None = None  # when it was last written, in seconds since 1970
    size: int | None = None  # bytes; None where they were not asked for
    more: bool = False  # whether there are more bytes than were counted
    result: Mapping[str, Any] = field(default_factory=dict)  # what result.json holds; empty where it cannot be used
    recipe: Mapping[str, Any] = field(default_factory=dict)  # what recipe.yaml holds, as plain values and unchecked

    @property
    def mode(self) -> str | None:
        return _text(self.result.get("mode") or self.recipe.get("mode"))

    @property
    def model(self) -> str | None:
        section = self.recipe.get("model")
        return _text(section.get("name")) if isinstance(section, Mapping) else None

    @property
    def best(self) -> tuple[str, float] | None:
        """The task's metric and its best value so far."""
        for key, value in self.result.items():
            if key.startswith("best_") and key != "best_epoch" and (number := finite(value)) is not None:
                return key.removeprefix("best_"), number
        return None

    @property
    def speed(self) -> float | None:
        """Images a second over all devices; None where they scatter more than their size."""
        speed, std = self.figure("throughput", "samples_per_sec"), self.figure("throughput", "std")
        return speed if speed is not None and (std or 0.0) <= speed else None

    @property
    def peak_memory(self) -> float | None:
        """Bytes on the device with the most."""
        peaks = self.result.get("peak_memory_bytes")
        sizes = map(finite, peaks.values()) if isinstance(peaks, Mapping) else ()
        return max((size for size in sizes if size is not None), default=None)

    @property
    def age(self) -> float | None:
        """Seconds since it was last written."""
        return None if self.changed is None else max(0.0, time.time() - self.changed)

    def figure(self, *keys: str) -> float | None:
        """A number in result.json, by its keys from the outside in; None where there is none."""
        value: Any = self.result
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return finite(value)

    def to_dict(self) -> dict[str, Any]:
        """For scripts: figures as they are, None for what is not known."""
        metric, best = self.best or (None, None)
        tree: dict[str, Any] = {
            "name": self.path.name,
            "path": str(self.path),
            "kind": self.kind,
            "status": self.status,
        }
        tree |= {"mode": self.mode, "model": self.model, "metric": metric, "best": best, "samples_per_sec": self.speed}
        tree |= {"age_seconds": self.age, "bytes": self.size, "bytes_complete": not self.more}
        return {**tree, "note": self.note or None}


def finite(value: Any) -> float | None:
    """A number, where it is one."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def look(path: Path, sized: bool = True) -> RunSummary:
    """What a folder is. Whatever is wrong with it is in its note."""
    try:
        return _look(path, sized)
    except (OSError, ValueError) as error:
        return RunSummary(path, "other", why(error))


def _look(path: Path, sized: bool) -> RunSummary:
    if path.is_symlink() and not path.exists():
        return RunSummary(path, "other", f"a link to {os.readlink(path)}, which is not there")
    with os.scandir(path) as entries:
        names = {entry.name for _, entry in zip(range(MAX_FILES), entries, strict=False)}
    known = (*OTHERS, *LATEST, "checkpoints")
    names |= {name for name in known if os.path.lexists(path / name)}  # of a huge folder too
    for name, kind in OTHERS.items():
        if name in names:
            return RunSummary(path, "other", kind)
    notes: list[str] = []
    result = _read(path / "result.json", names, notes)
    recipe = _read(path / "recipe.yaml", names, notes)
    if not _is_run(path, names, result):
        return RunSummary(path, "other", FOREIGN if names else "an empty folder")
    size, more = size_of(path) if sized else (None, False)
    if path.is_symlink():
        notes.insert(0, f"a link to {os.readlink(path)}")
    note, status, changed = "; ".join(notes), _status(path, result), _changed(path, names)
    return RunSummary(path, "run", note, status, changed, size, more, result, recipe)


def _read(file: Path, names: set[str], notes: list[str]) -> dict[str, Any]:
    if file.name not in names:
        return {}
    try:
        if file.suffix == ".json":
            return read_json(file)
        text = read(file, MAX_BYTES)
        if text.count(b"*") > MAX_ALIASES:
            raise ValueError("it holds no recipe")
        # Written as JSON, it has no dates and nothing that holds itself.
        tree = json.dumps(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), default=str)
        recipe = stored(json.loads(tree))
        if isinstance(recipe, dict):
            return recipe
        notes.append(f"{file.name}: it holds no recipe")
    except (yaml.YAMLError, RecursionError, TypeError):
        notes.append(f"{file.name}: it holds no YAML")
    except (OSError, ValueError) as error:
        notes.append(f"{file.name}: {why(error)}")
    return {}


def _is_run(path: Path, names: set[str], result: Mapping[str, Any]) -> bool:
    """Whether a run wrote here: its result, its recipe beside what it logs or saves, or its name in the lock.

    A lock that nobody holds, and nothing else, is of one that failed before it began.
    """
    if {"mode", "status", "steps"} <= result.keys():
        return True
    logged = bool(names & {"steps.csv", "checkpoints"}) or any(".tfevents." in name for name in names)
    if "recipe.yaml" in names and logged:
        return True
    try:
        begun = ".lock" in names and bool(read(path / ".lock", 1000))
    except OSError:
        return False
    return begun and (names != {".lock"} or locks.is_held(path))


def _status(path: Path, result: Mapping[str, Any]) -> Status:
    """By the lock, which ends with the process that holds it, and result.json."""
    if locks.is_held(path):
        return "running"
    status = result.get("status")
    return ENDED[status] if isinstance(status, str) and status in ENDED else "killed"


def _changed(path: Path, names: set[str]) -> float | None:
    times = []
    for name in LATEST if names & {*LATEST} else (".",):
        with suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times, default=None)


def size_of(path: Path) -> tuple[int, bool]:
    """Bytes of the files in a folder, links not followed, and whether there are more than were counted."""
    total = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            count += 1
            if count > MAX_FILES:
                return total, True
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total, False


def named(name: str, home: Path) -> RunSummary:
    """The run that a user means: a path, or a name below `home`.

    Raises:
        RecipeError: there is none; says what is there instead.
        SetupError: it is there and cannot be read.
    """
    try:
        typed = Path(name).expanduser()
        candidates = [typed] if typed.is_absolute() else [typed, home / typed]
        there = [path for path in candidates if os.path.lexists(path)]
    except (OSError, ValueError, RuntimeError):
        there = []
    if not name or not there:
        known = sorted(entry.name for entry in home.iterdir()) if home.is_dir() else []
        guess = misspelt(Path(name).name, known)
        hint = f"did you mean {guess}?" if guess else "python -m trainer runs lists those below ./runs"
        raise RecipeError(f"'{name[:120]}' is not there, nor {home}/{name[:120]}: {hint}")
    summaries = [look(path) for path in there]
    if found := [run for run in summaries if run.kind == "run"]:
        return found[0]
    path = there[0]
    if path.is_file():
        raise RecipeError(f"{path} is a file: give the run's folder, {path.parent}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise SetupError(f"{path} cannot be read ({summaries[0].note})")
    raise RecipeError(f"{path} holds no run ({summaries[0].note}): python -m trainer runs lists those below ./runs")
