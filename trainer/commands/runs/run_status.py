"""What a folder is and how its run stands: read with limits, never trusted, never a traceback.

And that on a page: what ran, its results, where its time went, what to type next.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trainer.errors import RecipeError
from trainer.recipe.loading import load_stored, words_of
from trainer.recipe.recipe_files import MAX_ALIASES, MAX_BYTES, stored
from trainer.recipe.schema import validated
from trainer.recipe.text import nearest
from trainer.saving import locks
from trainer.saving.files import read, read_json, why
from trainer.saving.journal import JOURNAL, START, STEPS, goodput_of, read_journal
from trainer.telemetry import readable

Status = Literal["running", "completed", "stopped", "failed", "killed"]
ENDED: dict[Any, Status] = {"completed": "completed", "preempted": "stopped", "failed": "failed"}
LATEST = ("result.json", "steps.csv", "recipe.yaml", ".lock")  # files with the time at which a run last did something
ADVICE = {
    "failed": "fix the error, then type the same command again; resume=auto continues from a checkpoint",
    "killed": "no process uses the folder and no end was recorded: it was killed, or ended before it began",
}
ENDS, LEAST = 10, 5e-4  # of attempts, that are shown; and the least share of a run's time


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


def show(run: RunSummary) -> str:
    """What `runs show` prints."""
    lines = [(title, value) for title, value in (*_what(run), *_figures(run)) if value]
    width = max(len(title) for title, _ in lines) + 1
    page = [readable.plain(str(run.path))]
    page += [readable.titled(readable.plain(title), readable.plain(value), width=width) for title, value in lines]
    page += ["", *(f"  {readable.plain(command)}" for command in _next(run))]
    return "\n".join(page) + "\n"


def _what(run: RunSummary) -> Iterator[tuple[str, str]]:
    error = run.result.get("error")
    yield "status", run.status + (f": {error}" if error else "")
    yield "", ADVICE.get(run.status, "")
    yield "note", run.note
    with suppress(RecipeError, TypeError, ValueError):  # a damaged one, of which the note tells
        stored = load_stored(run.recipe, str(run.path / "recipe.yaml"))
        yield "words", shlex.join(words_of(validated(stored.to_dict(), str(run.result.get("recipe")))))
    facts = _section(run.result, "facts") or {"mode": run.mode, "model": run.model}  # killed early it has none
    yield from ((str(title), str(text)) for title, text in facts.items() if title != "folder" and text)


def _figures(run: RunSummary) -> Iterator[tuple[str, str]]:
    result = run.result
    epochs, steps, ended_by = run.figure("epochs"), run.figure("steps"), result.get("ended_by")
    if epochs is not None and steps is not None:
        took = readable.duration(run.figure("seconds"))
        yield "trained", f"{readable.counted(round(epochs), 'epoch')}, {steps:,.0f} steps, {took}"
    yield "ended by", ended_by if isinstance(ended_by, str) and ended_by != "epochs" else ""
    yield from _time_spent(run)
    if run.best:
        metric, value = run.best
        at = run.figure("best_epoch")
        yield "best", f"{metric} {readable.score(metric, value)}" + (f" in epoch {at:.0f}" if at is not None else "")
    last = {key.removeprefix("val_"): finite(value) for key, value in result.items() if key.startswith("val_")}
    yield "last", ", ".join(f"{key} {readable.score(key, value)}" for key, value in last.items() if value is not None)
    yield "speed", f"{readable.number(run.speed)} images/s" if run.speed is not None else ""
    peaks = [size for size in map(finite, _section(result, "peak_memory_bytes").values()) if size is not None]
    yield "memory", f"{readable.as_size(max(peaks))} on the device with the most" if peaks else ""
    verdict = _section(result, "verdict").get("sentence")
    yield from _titled("verdict", str(verdict or "").splitlines())
    for sentence in _section(result, "warnings").values() if not verdict else ():  # which begins with them
        yield "warning", str(sentence)
    versions = _section(result, "versions")
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _time_spent(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Goodput, what else the time went into, and how each attempt ended, by the journal."""
    goodput = goodput_of(*read_journal(run.path / JOURNAL), over=run.status != "running")
    if goodput is None:
        return
    attempts = readable.counted(goodput.attempts, "attempt")
    yield "goodput", f"{goodput.fraction:.1%} of {readable.duration(goodput.wall_s)}, in {attempts}"
    lost: dict[str, float] = {}
    for part, spent in goodput.seconds.items():
        if part != STEPS:
            name = "start-up" if part.startswith(START) else part
            lost[name] = lost.get(name, 0.0) + spent
    rows = [
        (readable.duration(spent), f"{spent / goodput.wall_s:.1%}", part)
        for part, spent in sorted(lost.items(), key=lambda item: -item[1])
        if spent >= LEAST * goodput.wall_s
    ]
    ends = [(end["time"][:19].replace("T", " "), f"step {end['step']}", end["cause"]) for end in goodput.ends]
    if len(ends) > ENDS:
        ends = [*ends[: ENDS // 2], ("...", "", f"{len(ends) - ENDS} more"), *ends[-ENDS // 2 :]]
    yield from _titled("lost", readable.table(rows, {0, 1}) if rows else ())
    yield from _titled("ends", readable.table(ends) if ends else ())
    yield from _titled("", goodput.notes)


def _titled(title: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """A title beside the first of some lines."""
    for number, line in enumerate(lines):
        yield "" if number else title, line


def _next(run: RunSummary) -> Iterator[str]:
    """What one can type now."""
    path = shlex.quote(str(run.path))
    resumable = (run.path / "checkpoints").is_dir() and (run.path / "recipe.yaml").is_file()
    if resumable and run.status in ("stopped", "failed", "killed"):
        yield f"python -m trainer recipe={path} output={path} resume=auto"
    if any((run.path / f"{name}.safetensors").is_file() for name in ("last", "best")):
        yield f"python -m trainer evaluate checkpoint={path}"
        yield f"python -m trainer predict {path} photo.jpg"


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = tree.get(key)
    return section if isinstance(section, Mapping) else {}
