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

from trainer.errors import RecipeError
from trainer.recipe.recipe_files import MAX_ALIASES, MAX_BYTES, stored
from trainer.recipe.text import nearest
from trainer.saving import locks
from trainer.saving.files import read, read_json, why

Status = Literal["running", "completed", "stopped", "failed", "killed"]
ENDED: dict[Any, Status] = {"completed": "completed", "preempted": "stopped", "failed": "failed"}
LATEST = ("result.json", "steps.csv", "recipe.yaml", ".lock")  # files with the time at which a run last did something


@dataclass(frozen=True)
class RunSummary:
    """A run's folder at a glance."""

    path: Path  # as the user knows it
    status: Status
    changed: float  # when it was last written, in seconds since 1970
    size: int  # bytes of its files, links not followed
    note: str  # what is wrong with it; empty for a sound run
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

    def figure(self, *keys: str) -> float | None:
        """A number in result.json, by its keys from the outside in; None where there is none."""
        value: Any = self.result
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return finite(value)


def finite(value: Any) -> float | None:
    """A number, where it is one."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def look(path: Path) -> RunSummary | None:
    """The run in a folder; None where there is none, or it cannot be read. What is wrong with it is in its note."""
    try:
        names = {*os.listdir(path)}
    except OSError:
        return None
    notes: list[str] = []
    result = _read(path / "result.json", names, notes)
    recipe = _read(path / "recipe.yaml", names, notes)
    logged = bool(names & {"steps.csv", "checkpoints"}) or any(".tfevents." in name for name in names)
    # A journal is there as soon as a run begins; older runs have none.
    begun = "journal.jsonl" in names or ("recipe.yaml" in names and logged)
    if not begun and not {"mode", "status", "steps"} <= result.keys():
        return None
    ended = ENDED.get(result["status"], "killed") if isinstance(result.get("status"), str) else "killed"
    status: Status = "running" if locks.is_held(path) else ended
    size, times = 0, [0.0]
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                found = os.lstat(os.path.join(folder, name))
                size += found.st_size
                times += [found.st_mtime] * (folder == str(path) and name in LATEST)
    return RunSummary(path, status, max(times) or time.time(), size, "; ".join(notes), result, recipe)


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
        return {**stored(json.loads(tree))}
    except (yaml.YAMLError, RecursionError, TypeError):
        notes.append(f"{file.name}: it holds no YAML")
    except (OSError, ValueError) as error:
        notes.append(f"{file.name}: {why(error)}")
    return {}


def named(name: str, home: Path) -> RunSummary:
    """The run that a user means: a path, or a name below `home`. Raises RecipeError where there is none."""
    try:
        typed = Path(name).expanduser()
        there = [path for path in (typed, home / typed) if os.path.lexists(path)] if name else []
    except (OSError, ValueError, RuntimeError):
        there = []
    for path in there:
        if (run := look(path)) is not None:
            return run
    if there:
        raise RecipeError(
            f"{there[0]} is no run's folder, or cannot be read: python -m trainer runs lists those below ./runs"
        )
    guess = nearest(Path(name).name, os.listdir(home) if home.is_dir() else ())
    hint = f"did you mean {guess}?" if guess else "python -m trainer runs lists those below ./runs"
    raise RecipeError(f"'{name[:120]}' is not there, nor {home}/{name[:120]}: {hint}")
