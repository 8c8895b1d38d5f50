"""Runs side by side: what differed in their recipes, their final figures, their curves in one picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.commands.runs.run_page import value_of
from trainer.commands.runs.run_status import RunSummary, finite
from trainer.errors import RecipeError, SetupError
from trainer.recipe import flatten
from trainer.saving.files import writing
from trainer.saving.run_folder import read_steps
from trainer.telemetry import plots, readable
from trainer.telemetry.curves import curves_of

MOST = 6  # runs
UNTOLD = ("output", "resume")  # keys of a recipe in which all runs differ or none
MISSING = "-"


def compare(runs: Sequence[RunSummary], output: str | None = None, as_json: bool = False) -> str:
    """What `runs compare` prints; leaves a picture at `output`, or compare-FIRST-SECOND.png in the working folder.

    Raises:
        RecipeError: too many runs, one twice, or a picture's name that is none.
        SetupError: the picture cannot be written.
    """
    names = _names(runs)
    changed = _changed(runs)
    figures = {title: [told(one) for one in runs] for title, told in _figures(runs).items()}
    picture, lacking = _picture(runs, names, output)
    if as_json:
        found = {
            "runs": [one.to_dict() for one in runs],
            "recipe": {key: dict(zip(names, values, strict=True)) for key, values in changed.items()},
            "picture": str(picture) if picture else None,
        }
        return json.dumps(found, indent=2, default=str) + "\n"
    rows = [("", names)]
    for key, values in changed.items():
        cells = [value_of(value) if one.recipe else MISSING for one, value in zip(runs, values, strict=True)]
        rows.append((key, cells))
    lost = [f"{name}: {one.note or 'no recipe.yaml'}" for name, one in zip(names, runs, strict=True) if not one.recipe]
    same = ["the recipes are the same"] if not changed and not lost else []
    shown = [(title, cells) for title, cells in figures.items() if any(cell != MISSING for cell in cells)]
    lines = [*_aligned(rows), *same, "", *_aligned([("", names), *shown]), *lost, *lacking]
    if picture:
        lines += ["", f"curves: {picture}"]
    return "\n".join(lines) + "\n"


def _names(runs: Sequence[RunSummary]) -> list[str]:
    """What tells the runs apart: their folders' names, or their paths where those are alike."""
    real = [one.path.resolve() for one in runs]
    if len(set(real)) < len(real):
        raise RecipeError("runs compare needs different runs, and one was given twice")
    if len(runs) > MOST:
        raise RecipeError(f"runs compare shows at most {MOST} runs side by side, and {len(runs)} were given")
    names = [readable.plain(path.name) for path in real]
    return names if len(set(names)) == len(names) else [readable.plain(str(one.path)) for one in runs]


def _changed(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """The recipe's keys in which the runs that have one differ, with each one's value; None where it has none.

    An old recipe gets today's defaults.
    """
    trees = [flatten(_resolved(one.recipe)) for one in runs]
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree if key not in UNTOLD)
    differ = [key for key in keys if any(tree.get(key) != known[0].get(key) for tree in known)]
    return {key: [tree.get(key) for tree in trees] for key in differ}


def _resolved(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return recipes.load(dict(plain)).to_dict() if plain else {}
    except (RecipeError, TypeError, ValueError, RecursionError):
        return plain


def _figures(runs: Sequence[RunSummary]) -> dict[str, Callable[[RunSummary], str]]:
    """Title -> how it is told of a run."""

    def value(*keys: str) -> Callable[[RunSummary], float | None]:
        def found(one: RunSummary) -> float | None:
            inner: Any = one.result
            for key in keys:
                inner = inner.get(key) if isinstance(inner, Mapping) else None
            return finite(inner)

        return found

    def scored(metric: str, key: str) -> Callable[[RunSummary], str]:
        return lambda one: readable.score(metric, value(key)(one))

    def best_epoch(one: RunSummary) -> str:
        at = value("best_epoch")(one)
        return MISSING if at is None else f"{at:.0f}"

    def fullest(one: RunSummary) -> str:
        peaks = one.result.get("peak_memory_bytes")
        sizes = [finite(size) for size in peaks.values()] if isinstance(peaks, Mapping) else []
        known = [size for size in sizes if size is not None]
        return readable.as_size(int(max(known))) if known else MISSING

    def counted(key: str) -> Callable[[RunSummary], str]:
        def told(one: RunSummary) -> str:
            found = value(key)(one)
            return MISSING if found is None else f"{found:,.0f}"

        return told

    step, waiting = value("step_time_s", "mean"), value("data_wait_fraction")
    metrics = dict.fromkeys(key for one in runs for key in one.result if key.startswith(("best_", "val_")))
    metrics.pop("best_epoch", None)
    return {
        "status": lambda one: one.status or MISSING,
        **{key.replace("_", " ", 1): scored(key.partition("_")[2], key) for key in metrics},
        "best epoch": best_epoch,
        "train loss": scored("loss", "train_loss"),
        "epochs": counted("epochs"),
        "steps": counted("steps"),
        "images/s": lambda one: readable.number(one.speed),
        "ms a step": lambda one: readable.number(1e3 * found if (found := step(one)) is not None else None),
        "waits for data": lambda one: f"{found:.1%}" if (found := waiting(one)) is not None else MISSING,
        "peak memory": fullest,
        "time": lambda one: readable.duration(value("seconds")(one)),
        "size": lambda one: readable.as_size(one.size, one.more),
    }


def _aligned(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Titles and cells in columns that fit; a text too long for its column loses its middle."""
    titles = max(len(title) for title, _ in rows)
    room = (readable.columns() - titles) // len(rows[0][1]) - 2
    return readable.table(
        [(title, *(readable.shortened(readable.plain(cell), room) for cell in row)) for title, row in rows]
    )


def _picture(runs: Sequence[RunSummary], names: Sequence[str], output: str | None) -> tuple[Path | None, list[str]]:
    """The picture's path, and what could not be drawn in it."""
    path = Path(output).expanduser() if output else Path(f"compare-{names[0]}-{names[1]}.png".replace("/", "_"))
    if path.suffix.lower() != ".png":
        raise RecipeError(f"output={output} names no picture: write output={path.name or 'curves'}.png")
    loss: dict[str, Any] = {}
    held_out: dict[str, dict[str, Any]] = {}
    untold = []
    for name, one in zip(names, runs, strict=True):
        try:
            rows, bad = read_steps(one.path / "steps.csv")
        except OSError as error:
            rows, bad = [], 0
            untold.append(f"{name}: no training curve (steps.csv: {error.strerror})")
        if bad:
            untold.append(f"{name}: {bad} damaged line{'s' * (bad > 1)} of steps.csv left out")
        if rows:
            loss[name] = ([float(row["step"]) for row in rows], [float(row["train_loss"]) for row in rows])
        metric = one.best[0] if one.best else None
        steps, _, values = curves_of(one.path).get(f"val/{metric}", ([], [], []))
        if values:
            held_out.setdefault(str(metric), {})[name] = (steps, values)
    panels = [plots.Panel(loss, "optimizer steps", "training loss")] if loss else []
    panels += [plots.Panel(found, "optimizer steps", f"held-out {metric}") for metric, found in held_out.items()]
    if not any(len(x) > 1 for panel in panels for x, _ in panel.curves.values()):
        return None, [*untold, "no picture: neither steps.csv nor TensorBoard's files hold two points of a curve"]
    if not path.parent.is_dir():
        raise SetupError(f"output={path}: there is no folder {path.parent}; choose another output=")
    with writing(path, "the same words again"):
        plots.curves(path, panels)
    return path, untold
