"""One run on a page: what ran, its results, the files in its folder, what to type next."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.commands.runs.run_status import RunSummary, finite, size_of
from trainer.errors import RecipeError
from trainer.recipe.loading import load_stored
from trainer.saving.journal import JOURNAL, START, STEPS, Goodput, goodput_of, read_journal
from trainer.telemetry import readable

KEYS = 24  # changed keys of a recipe that are shown
ADVICE = {
    "failed": "fix the error, then type the same command again; resume=auto continues from a checkpoint",
    "killed": "no process uses the folder and no end was recorded: it was killed, or ended before it began",
}
ENDS, LEAST = 10, 5e-4  # of attempts, that are shown; and the least share of a run's time


def show(run: RunSummary, as_json: bool = False) -> str:
    """What `runs show` prints."""
    if as_json:
        goodput = _goodput(run)
        tree = {**run.to_dict(), "changed": _changed(run)[1], "goodput": asdict(goodput) if goodput else None}
        tree |= {"result": run.result, "recipe": run.recipe}
        return json.dumps(tree, indent=2, default=str) + "\n"
    lines = [(title, value) for title, value in (*_what(run), *_figures(run), *_files(run)) if value]
    width = max(len(title) for title, _ in lines) + 1
    page = [readable.plain(str(run.path))]
    page += [readable.titled(readable.plain(title), readable.plain(value), width=width) for title, value in lines]
    page += ["", *(f"  {readable.plain(command)}" for command in _next(run))]
    return "\n".join(page) + "\n"


def _what(run: RunSummary) -> Iterator[tuple[str, str]]:
    result, section = run.result, _section(run.recipe, "data")
    error = result.get("error")
    yield "status", f"{run.status}" + (f": {error}" if error else "")
    yield "", ADVICE.get(run.status or "", "")
    yield "note", run.note
    name, changed = _changed(run)
    yield "recipe", name
    yield from _titled("changed", changed[:KEYS])
    yield "", f"and {len(changed) - KEYS} more" if len(changed) > KEYS else ""
    if facts := _section(result, "facts"):
        yield from ((str(title), str(text)) for title, text in facts.items() if title != "folder")
        return
    devices = result.get("devices")
    named = ", ".join(map(str, devices[:8])) + ", ..." * (len(devices) > 8) if isinstance(devices, list) else ""
    processes = run.figure("world_size")
    yield "mode", f"{run.mode or '-'}" + (f", {processes:.0f} process{'es' * (processes != 1)}" if processes else "")
    yield "devices", named
    yield "model", f"{run.model or '-'}" + (f", {result['precision']}" if result.get("precision") else "")
    data = _section(result, "data")
    counts = [finite(data.get(key)) for key in ("train_samples", "val_samples")]
    amounts = f": {counts[0]:,.0f} to train on, {counts[1]:,.0f} held out" if None not in counts else ""
    yield "data", f"{data.get('name') or section.get('name') or '-'}{amounts}"


def _figures(run: RunSummary) -> Iterator[tuple[str, str]]:
    result = run.result
    epochs, steps = run.figure("epochs"), run.figure("steps")
    wanted = finite(run.recipe.get("epochs"))
    if epochs is not None and steps is not None:
        of = f" of {wanted:.0f}" if wanted else ""
        took = readable.duration(run.figure("seconds"))
        yield "trained", f"{epochs:.0f}{of} epochs, {steps:,.0f} steps, {took}"
    ended_by = result.get("ended_by")
    yield "ended by", ended_by if isinstance(ended_by, str) and ended_by != "epochs" else ""
    yield from _time_spent(run)
    if run.best:
        metric, value = run.best
        at = run.figure("best_epoch")
        yield "best", f"{metric} {readable.score(metric, value)}" + (f" in epoch {at:.0f}" if at is not None else "")
    last = {key.removeprefix("val_"): finite(value) for key, value in result.items() if key.startswith("val_")}
    scores = [f"{name} {readable.score(name, value)}" for name, value in last.items() if value is not None]
    yield "last", ", ".join(scores)
    losses = result.get("losses")
    numbers = [value for value in map(finite, losses) if value is not None] if isinstance(losses, list) else []
    if numbers:
        yield "loss", f"{numbers[0]:.4g} in the first epoch, {numbers[-1]:.4g} in the last, on training images"
    if run.speed is not None:
        step = run.figure("step_time_s", "mean")
        milliseconds = f", {readable.number(1e3 * step)} ms per step" if step else ""
        yield "speed", f"{readable.number(run.speed)} images/s{milliseconds}"
    if run.peak_memory is not None:
        yield "memory", f"{readable.as_size(run.peak_memory)} on the device with the most"
    verdict = _section(result, "verdict").get("sentence")
    yield from _titled("verdict", str(verdict or "").splitlines())
    for sentence in _section(result, "warnings").values() if not verdict else ():  # which begins with them
        yield "warning", str(sentence)
    versions = _section(result, "versions")
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if run.changed:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        yield "written", f"{when}, {readable.duration(run.age)} ago"


def _time_spent(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Goodput, what else the time went into, and how each attempt ended, by the journal."""
    goodput = _goodput(run)
    if goodput is None:
        return
    attempts = readable.counted(goodput.attempts, "attempt")
    yield "goodput", f"{goodput.fraction:.1%} of {readable.duration(goodput.wall_s)}, in {attempts}"
    lost = {part: spent for part, spent in goodput.seconds.items() if part != STEPS}
    starting = {part.removeprefix(START): spent for part, spent in lost.items() if part.startswith(START)}
    named = ", ".join(f"{name} {readable.duration(spent)}" for name, spent in starting.items())
    sums = {part: spent for part, spent in lost.items() if not part.startswith(START)}
    sums |= {f"start-up: {named}": sum(starting.values())} if starting else {}
    rows = [
        (readable.duration(spent), f"{spent / goodput.wall_s:.1%}", part)
        for part, spent in sorted(sums.items(), key=lambda item: -item[1])
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


def _goodput(run: RunSummary) -> Goodput | None:
    return goodput_of(*read_journal(run.path / JOURNAL), over=run.status != "running")


def _files(run: RunSummary) -> Iterator[tuple[str, str]]:
    yield "size", readable.as_size(run.size, run.more)
    try:
        with os.scandir(run.path) as entries:
            paths = sorted((entry.name, entry.path) for _, entry in zip(range(200), entries, strict=False))
    except OSError:
        return
    rows = []
    for name, path in paths:
        if not name.startswith("."):
            folder = os.path.isdir(path) and not os.path.islink(path)
            with suppress(OSError):
                size, more = size_of(Path(path)) if folder else (os.lstat(path).st_size, False)
                rows.append(f"{readable.shortened(name + '/' * folder, 60)}  {readable.as_size(size, more)}")
    yield from _titled("files", rows)


def _next(run: RunSummary) -> Iterator[str]:
    """What one can type now."""
    path = shlex.quote(str(run.path))
    weights = any((run.path / f"{name}.safetensors").is_file() for name in ("last", "best"))
    resumable = (run.path / "checkpoints").is_dir() and (run.path / "recipe.yaml").is_file()
    if resumable and run.status in ("stopped", "failed", "killed"):
        yield f"python -m trainer recipe={path} output={path} resume=auto"
    if weights:
        yield f"python -m trainer evaluate checkpoint={path}"
        yield f"python -m trainer predict {path} photo.jpg"
        yield f"python -m trainer export {path} format=onnx"
    if any(run.path.glob("events.out.tfevents.*")):
        yield f"python -m tensorboard.main --logdir {path}"
    if run.status != "running":
        yield f"python -m trainer runs delete {path}"


def _changed(run: RunSummary) -> tuple[str, list[str]]:
    """A recipe's name, and the words by which it differs from the shipped one of that name, or from the defaults."""
    title = str(run.result.get("recipe") or "-")
    name = title if title in recipes.shipped_recipes() else None
    if not run.recipe:
        return title, []
    try:
        before = recipes.flatten(recipes.load(name).to_dict())
        after = recipes.flatten(load_stored(run.recipe, str(run.path / "recipe.yaml")).to_dict())
    except (RecipeError, TypeError, ValueError):
        return title, []
    changed = [(key, value) for key, value in after.items() if value != before[key]]
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed]
    return title if name else f"{title} (differs from the defaults)", words


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = tree.get(key)
    return section if isinstance(section, Mapping) else {}
