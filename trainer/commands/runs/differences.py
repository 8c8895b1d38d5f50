"""Runs side by side: what differed in their recipes, their final figures, their curves in one picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.commands.runs.run_page import value_of
from trainer.commands.runs.run_status import RunSummary
from trainer.errors import RecipeError, SetupError
from trainer.recipe import flatten
from trainer.saving.files import writing
from trainer.saving.steps_file import read_steps
from trainer.telemetry import plots, readable
from trainer.telemetry.events import curves_of

MOST = 6  # runs
IGNORED = ("output", "resume")  # keys of a recipe in which all runs differ or none
MISSING = "-"


def compare(runs: Sequence[RunSummary], output: str | None = None, as_json: bool = False) -> str:
    """What `runs compare` prints; leaves a picture at `output`, or compare-FIRST-SECOND.png in the working folder.

    Raises:
        RecipeError: too many runs, one twice, or a picture's name that is none.
        SetupError: the picture cannot be written.
    """
    names = _names(runs)
    changed = _changed(runs)
    picture, lacking = _picture(runs, names, output)
    if as_json:
        tree = {
            "runs": [run.to_dict() for run in runs],
            "recipe": {key: dict(zip(names, values, strict=True)) for key, values in changed.items()},
            "picture": str(picture) if picture else None,
        }
        return json.dumps(tree, indent=2, default=str) + "\n"
    rows = [("", names)]
    for key, values in changed.items():
        cells = [value_of(value) if run.recipe else MISSING for run, value in zip(runs, values, strict=True)]
        rows.append((key, cells))
    lost = [f"{name}: {run.note or 'no recipe.yaml'}" for name, run in zip(names, runs, strict=True) if not run.recipe]
    same = ["the recipes are the same"] if not changed and not lost else []
    shown = [(title, cells) for title, cells in _figures(runs).items() if any(cell != MISSING for cell in cells)]
    lines = [*_aligned(rows), *same, "", *_aligned([("", names), *shown]), *lost, *lacking]
    if picture:
        lines += ["", f"curves: {picture}"]
    return "\n".join(lines) + "\n"


def _names(runs: Sequence[RunSummary]) -> list[str]:
    """Different names for the runs: their folders', or their paths where those are alike."""
    real = [run.path.resolve() for run in runs]
    if len(set(real)) < len(real):
        raise RecipeError("runs compare needs different runs, and one was given twice")
    if len(runs) > MOST:
        raise RecipeError(f"runs compare shows at most {MOST} runs side by side, and {len(runs)} were given")
    names = [readable.plain(path.name) for path in real]
    return names if len(set(names)) == len(names) else [readable.plain(str(run.path)) for run in runs]


def _changed(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """The recipe's keys in which the runs that have one differ, with each one's value; None where it has none.

    An old recipe gets today's defaults.
    """
    trees = [flatten(_resolved(run.recipe)) for run in runs]
    known = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in known for key in tree if key not in IGNORED)
    differ = [key for key in keys if any(tree.get(key) != known[0].get(key) for tree in known)]
    return {key: [tree.get(key) for tree in trees] for key in differ}


def _resolved(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return recipes.load(dict(plain)).to_dict() if plain else {}
    except (RecipeError, TypeError, ValueError, RecursionError):
        return plain


def _figures(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Title -> a figure of each run, as text."""

    def column(text_of: Callable[[float], str], *keys: str) -> list[str]:
        values = [run.figure(*keys) for run in runs]
        return [MISSING if value is None else text_of(value) for value in values]

    metrics = dict.fromkeys(key for run in runs for key in run.result if key.startswith(("best_", "val_")))
    metrics.pop("best_epoch", None)
    scores = {key: column(partial(readable.score, key.partition("_")[2]), key) for key in metrics}
    return {
        "status": [run.status or MISSING for run in runs],
        **{key.replace("_", " ", 1): cells for key, cells in scores.items()},
        "best epoch": column("{:.0f}".format, "best_epoch"),
        "train loss": column("{:.4g}".format, "train_loss"),
        "epochs": column("{:,.0f}".format, "epochs"),
        "steps": column("{:,.0f}".format, "steps"),
        "images/s": [readable.number(run.speed) for run in runs],
        "ms a step": column(lambda seconds: readable.number(1e3 * seconds), "step_time_s", "mean"),
        "waits for data": column("{:.1%}".format, "data_wait_fraction"),
        "peak memory": [readable.as_size(run.peak_memory) for run in runs],
        "time": column(readable.duration, "seconds"),
        "size": [readable.as_size(run.size, run.more) for run in runs],
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
    missing = []
    for name, run in zip(names, runs, strict=True):
        try:
            rows, bad = read_steps(run.path / "steps.csv")
        except OSError as error:
            rows, bad = [], 0
            missing.append(f"{name}: no training curve (steps.csv: {error.strerror})")
        if bad:
            missing.append(f"{name}: {bad} damaged line{'s' * (bad > 1)} of steps.csv left out")
        if rows:
            loss[name] = ([float(row["step"]) for row in rows], [float(row["train_loss"]) for row in rows])
        metric = run.best[0] if run.best else None
        steps, _, values = curves_of(run.path).get(f"val/{metric}", ([], [], []))
        if values:
            held_out.setdefault(str(metric), {})[name] = (steps, values)
    panels = [plots.Panel(loss, "optimizer steps", "training loss")] if loss else []
    panels += [plots.Panel(curves, "optimizer steps", f"held-out {metric}") for metric, curves in held_out.items()]
    if not any(len(x) > 1 for panel in panels for x, _ in panel.curves.values()):
        return None, [*missing, "no picture: neither steps.csv nor TensorBoard's files hold two points of a curve"]
    if not path.parent.is_dir():
        raise SetupError(f"output={path}: there is no folder {path.parent}; choose another output=")
    with writing(path, "the same words again"):
        plots.curves(path, panels)
    return path, missing
