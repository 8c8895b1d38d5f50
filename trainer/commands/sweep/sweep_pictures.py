"""A sweep's picture: the metric over each key, all trials in every panel; the best one is ringed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands.sweep.results import SweepReport, TrialFigures
from trainer.commands.sweep.space import Choices, Dimension
from trainer.telemetry import plots
from trainer.telemetry.readable import FRACTIONS

PANEL = 3.6  # inches


def draw(folder: Path, report: SweepReport, dimensions: Sequence[Dimension]) -> list[Path]:
    """sweep.png, where a trial has a figure; returns its path."""
    if not report.done:
        return []
    count = len(dimensions)
    figure, panels = plots.canvas(8.0 if count == 1 else PANEL * count, 4.4 if count == 1 else 3.8, count)
    scale = 100.0 if report.metric in FRACTIONS else 1.0
    for axes, part in zip(panels, dimensions, strict=True):
        points = _points(part, report, scale)
        axes.errorbar(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            yerr=[scale * (row.std or 0.0) for *_, row in points] if report.repeats > 1 else None,
            color=plots.COLOURS[0], marker="o", capsize=4,
            linestyle="-" if count == 1 and isinstance(part, Choices) else "",
        )  # fmt: skip
        x, y = next((x, y) for x, y, row in points if row is report.done[0])
        axes.plot([x], [y], "o", color=plots.COLOURS[3], markersize=15, markeredgewidth=2, fillstyle="none")
        axes.set_xlabel(part.key)
        if isinstance(part, Choices):
            axes.set_xticks(range(len(part.values)), part.values)
            axes.set_xlim(-0.5, len(part.values) - 0.5)
        elif part.log:
            _decades(axes, part.high / part.low)
    panels[0].set_ylabel(f"best {report.metric}" + ", %" * (scale > 1))
    for axes in panels[1:]:
        axes.sharey(panels[0])
    failed = sum(row.status == "failed" for row in report.trials)
    title = f"{report.recipe}: {len(report.trials)} trials" + f", {failed} failed" * bool(failed)
    title += f"; mean and standard deviation of {report.repeats} seeds" * (report.repeats > 1)
    figure.suptitle(title, color=plots.INK, fontsize=11)
    plots.save_picture(figure, folder / "sweep.png")
    return [folder / "sweep.png"]


def _points(part: Dimension, report: SweepReport, scale: float) -> list[tuple[float, float, TrialFigures]]:
    points = [(_place(part, row.values[part.key]), scale * (row.value or 0.0), row) for row in report.done]
    return sorted(points, key=lambda point: point[0])


def _place(part: Dimension, value: str) -> float:
    """Values of a list lie evenly, as they were typed; those of a range on its scale."""
    return float(part.values.index(value)) if isinstance(part, Choices) else float(value)


def _decades(axes: Any, factor: float) -> None:
    """Ticks as one types the numbers, few enough to stand side by side."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if factor > 100 else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
