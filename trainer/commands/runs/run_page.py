"""One run on a page: what ran, its results, where its time went, what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from trainer.commands.runs.run_status import RunSummary, finite
from trainer.errors import RecipeError
from trainer.recipe.loading import load_stored, words_of
from trainer.recipe.schema import validated
from trainer.saving.journal import JOURNAL, START, STEPS, goodput_of, read_journal
from trainer.telemetry import readable

ADVICE = {
    "failed": "fix the error, then type the same command again; resume=auto continues from a checkpoint",
    "killed": "no process uses the folder and no end was recorded: it was killed, or ended before it began",
}
ENDS, LEAST = 10, 5e-4  # of attempts, that are shown; and the least share of a run's time


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
