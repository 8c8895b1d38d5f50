"""State of the run in a folder, and the page that shows it.

Files of a run are not trusted: their size is limited, and damage is described instead of causing a
traceback. The page shows the arguments of the run, its results, where its time went, and commands
to type next.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from trainer.errors import RecipeError
from trainer.recipe.loading import format_arguments, load_stored
from trainer.recipe.recipe_files import LOADER, MAX_ALIASES, MAX_BYTES, remove_passwords
from trainer.recipe.schema import validated
from trainer.recipe.text import find_nearest
from trainer.saving import locks
from trainer.saving.files import Json, describe_error, measure_size, read, read_json
from trainer.saving.journal import JOURNAL, START, STEPS, compute_goodput, read_journal
from trainer.telemetry.readable import (
    escape_control_characters,
    format_count,
    format_duration,
    format_number,
    format_score,
    format_size,
    format_table,
    format_titled,
)

# Lines of the page as pairs (title, text). An empty title continues the topic of the line above.
Lines = Iterator[tuple[str, str]]
Status = Literal["running", "completed", "stopped", "failed", "killed"]
# Directory in which training creates run folders by default.
HOME = Path("runs")
ENDED: dict[Any, Status] = {"completed": "completed", "preempted": "stopped", "failed": "failed"}
# Files whose modification times show when a run was last active.
LATEST = ("result.json", "steps.csv", "recipe.yaml", ".lock")
ADVICE = {
    "failed": (
        "fix the error, then type the same command again; resume=auto continues from a checkpoint"
    ),
    "killed": (
        "no process uses the folder and no end was recorded: it was killed, or ended before it "
        "began"
    ),
}
# The page shows how attempts ended for at most this number of the most recent finished attempts.
ENDS = 10
# Kinds of lost time below this fraction of the run's time are not shown.
LEAST = 5e-4


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run folder.

    Attributes:
        path: Path of the run folder; it may be relative or a link.
        status: State of the run.
        changed: Time at which a file in `LATEST` was last modified, in seconds since 1970; the
            current time if there is no such file.
        size: Total size of the files in bytes; links are not followed.
        note: Description of damage; empty for a sound run.
        result: Content of result.json; empty if the file is missing or damaged.
        recipe: Content of recipe.yaml as plain values, not validated; empty if the file is missing
            or damaged.
    """

    path: Path
    status: Status
    changed: float
    size: int
    note: str
    result: Json
    recipe: Json

    @property
    def mode(self) -> str | None:
        return _read_text(self.result.get("mode") or self.recipe.get("mode"))

    @property
    def model(self) -> str | None:
        return _read_text(_read_section(self.recipe, "model").get("name"))

    @property
    def best(self) -> str | None:
        """Main metric of the task and its best value so far, as text."""
        return next(iter(_format_scores(self.result, "best_")), None)

    @property
    def speed(self) -> float | None:
        """Images per second over all devices.

        The speed is None if it was not measured, or if its standard deviation exceeds its mean.
        """
        speed = self.figure("throughput", "samples_per_sec")
        std = self.figure("throughput", "std")
        if speed is not None and (std or 0.0) <= speed:
            return speed
        return None

    def figure(self, *keys: str) -> float | None:
        """Return the number in result.json at the nested `keys`; None if there is no such number.

        For example, `figure("throughput", "std")` reads `result["throughput"]["std"]`.
        """
        value: Any = self.result
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return as_finite_number(value)


def as_finite_number(value: Any) -> float | None:
    """Return a value as a float if it is a finite number, otherwise None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        return float(value)
    return None


def _format_scores(result: Json, prefix: str) -> list[str]:
    """Format the metrics of result.json whose keys start with `prefix`, for example "val_"."""
    scores = []
    for key, value in result.items():
        number = as_finite_number(value)
        if key.startswith(prefix) and key != "best_epoch" and number is not None:
            metric = key.removeprefix(prefix)
            scores.append(f"{metric} {format_score(metric, number)}")
    return scores


def _read_text(value: Any) -> str | None:
    if isinstance(value, str) and value:
        return value
    return None


def read_run(path: Path) -> RunSummary | None:
    """Return the run in a folder, or None if the folder has no run or cannot be read.

    Damage is described in the note of the run.
    """
    try:
        names = {*os.listdir(path)}
    except OSError:
        return None
    notes: list[str] = []
    result = _read(path / "result.json", names, notes)
    recipe = _read(path / "recipe.yaml", names, notes)
    has_events = any(".tfevents." in name for name in names)
    has_logged = has_events or bool(names & {"steps.csv", "checkpoints"})
    # A run writes its journal first; runs of older versions have none.
    has_started = "journal.jsonl" in names or ("recipe.yaml" in names and has_logged)
    if not has_started and not {"mode", "status", "steps"} <= result.keys():
        return None
    status = ENDED.get(str(result.get("status")), "killed")
    if locks.is_locked(path):
        status = "running"
    times = [0.0]
    for name in LATEST:
        with suppress(OSError):
            times.append(os.lstat(path / name).st_mtime)
    changed = max(times) or time.time()
    return RunSummary(path, status, changed, measure_size(path), "; ".join(notes), result, recipe)


def _read(file: Path, names: set[str], notes: list[str]) -> Json:
    if file.name not in names:
        return {}
    try:
        if file.suffix == ".json":
            return read_json(file)
        text = read(file, MAX_BYTES)
        if text.count(b"*") > MAX_ALIASES:
            raise ValueError("it holds no recipe")
        # The conversion to JSON turns dates of YAML into strings, and raises ValueError for an
        # object that contains itself.
        tree = json.dumps(yaml.load(text, LOADER), default=str)
        return {**remove_passwords(json.loads(tree))}
    except (yaml.YAMLError, RecursionError, TypeError):
        notes.append(f"{file.name}: it holds no YAML")
    except (OSError, ValueError) as error:
        notes.append(f"{file.name}: {describe_error(error)}")
    return {}


def find_run(name: str) -> RunSummary:
    """Return the run that a user names by a path or by a name below the folder `runs`.

    Raises:
        RecipeError: There is no such run.
    """
    paths = []
    # A path that is too long, contains a null byte or names an unknown user raises one of these
    # errors; such a path names no run.
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(name).expanduser()
        if name:
            paths = [path for path in (path, HOME / path) if os.path.lexists(path)]
    for path in paths:
        run = read_run(path)
        if run:
            return run
    hint = "python -m trainer runs lists those below ./runs"
    if paths:
        raise RecipeError(f"{paths[0]} is no run's folder, or cannot be read: {hint}")
    run_names = os.listdir(HOME) if HOME.is_dir() else ()
    guess = find_nearest(Path(name).name, run_names)
    if guess:
        hint = f"did you mean {guess}?"
    raise RecipeError(f"'{name[:120]}' is not there, nor {HOME}/{name[:120]}: {hint}")


def show(run: RunSummary) -> str:
    """Return the page that the command `runs show` prints for a run."""
    folder = run.path
    lines = [line for line in (*_describe(run), *_list_figures(run)) if line[1]]
    width = max(len(title) for title, _ in lines) + 1
    page = [escape_control_characters(str(folder))]
    for title, value in lines:
        shown_title = escape_control_characters(title)
        page.append(format_titled(shown_title, escape_control_characters(value), width))
    path = shlex.quote(str(folder))
    next_commands = []
    can_resume = (folder / "checkpoints").is_dir() and (folder / "recipe.yaml").is_file()
    if can_resume and run.status in ("stopped", "failed", "killed"):
        next_commands.append(f"recipe={path} output={path} resume=auto")
    weights = (folder / "last.safetensors", folder / "best.safetensors")
    if any(map(Path.is_file, weights)):
        next_commands.append(f"evaluate {path}")
        next_commands.append(f"predict {path} photo.jpg")
    page.append("")
    for command in next_commands:
        page.append(f"  python -m trainer {escape_control_characters(command)}")
    return "\n".join(page) + "\n"


def _describe(run: RunSummary) -> Lines:
    error = run.result.get("error")
    yield "status", f"{run.status}: {error}" if error else run.status
    yield "", ADVICE.get(run.status, "")
    yield "note", run.note
    # A recipe that is damaged, or invalid in this version, cannot be shown as arguments.
    with suppress(RecipeError, TypeError, ValueError):
        stored = load_stored(run.recipe, str(run.path / "recipe.yaml"))
        recipe = validated(stored.to_dict(), str(run.result.get("recipe")))
        yield "words", shlex.join(format_arguments(recipe))
    # A run that was killed early has not written its metadata into result.json.
    metadata = _read_section(run.result, "facts") or {"mode": run.mode, "model": run.model}
    for title, text in metadata.items():
        if title != "folder" and text:
            yield str(title), str(text)


def _list_figures(run: RunSummary) -> Lines:
    result = run.result
    epochs = run.figure("epochs")
    steps = run.figure("steps")
    if epochs is not None and steps is not None:
        yield (
            "trained",
            f"{format_count(round(epochs), 'epoch')}, {steps:,.0f} steps, "
            f"{format_duration(run.figure('seconds'))}",
        )
    ended_by = _read_text(result.get("ended_by"))
    if ended_by and ended_by != "epochs":
        yield "ended by", ended_by
    yield from _time_spent(run)
    best = run.best
    if best:
        epoch = run.figure("best_epoch")
        if epoch is not None:
            best += f" in epoch {epoch:.0f}"
        yield "best", best
    yield "last", ", ".join(_format_scores(result, "val_"))
    if run.speed is not None:
        yield "speed", f"{format_number(run.speed)} images/s"
    peaks = [as_finite_number(size) for size in _read_section(result, "peak_memory_bytes").values()]
    largest = max((size for size in peaks if size is not None), default=None)
    if largest is not None:
        yield "memory", f"{format_size(largest)} on the device with the most"
    verdict = _read_section(result, "verdict").get("sentence")
    if verdict:
        yield from _add_title("verdict", str(verdict).splitlines())
    else:
        # The sentence of a verdict contains the warnings, so they are shown only without a verdict.
        for warning in _read_section(result, "warnings").values():
            yield "warning", str(warning)
    versions = _read_section(result, "versions").items()
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions if version)


def _time_spent(run: RunSummary) -> Lines:
    """Yield what the journal says about the time of the run; nothing if it contains no attempt.

    The lines are, in this order: the goodput; the kinds of lost time, the largest first; the time,
    the step and the cause of the end of each of the last `ENDS` finished attempts; and notes on
    gaps and damage in the journal.
    """
    goodput = compute_goodput(*read_journal(run.path / JOURNAL), over=run.status != "running")
    if goodput is None:
        return
    yield (
        "goodput",
        f"{goodput.fraction:.1%} of {format_duration(goodput.wall_s)}, in "
        f"{format_count(goodput.attempts, 'attempt')}",
    )
    lost: dict[str, float] = {}
    for part, spent in goodput.seconds.items():
        if part != STEPS:
            name = "start-up" if part.startswith(START) else part
            lost[name] = lost.get(name, 0.0) + spent
    rows = []
    for part, spent in sorted(lost.items(), key=lambda item: -item[1]):
        share = spent / goodput.wall_s
        if share >= LEAST:
            rows.append((format_duration(spent), f"{share:.1%}", part))
    ends = []
    for end in goodput.ends[-ENDS:]:
        time_of_end = end["time"][:19].replace("T", " ")
        ends.append((time_of_end, f"step {end['step']}", end["cause"]))
    if rows:
        yield from _add_title("lost", format_table(rows, {0, 1}, sys.maxsize))
    if ends:
        yield from _add_title("ends", format_table(ends, (), sys.maxsize))
    yield from _add_title("", goodput.notes)


def _add_title(title: str, lines: Iterable[str]) -> Lines:
    """Yield each line as a pair: the first with `title`, all others with an empty title."""
    for number, line in enumerate(lines):
        yield "" if number else title, line


def _read_section(tree: Json, key: str) -> Json:
    section = tree.get(key)
    if isinstance(section, dict):
        return section
    return {}
