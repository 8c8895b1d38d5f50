"""A sweep's picture: of one key a curve, of two a map, of more a panel each; the best trial is ringed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.sweep.results import SweepReport, TrialFigures
from trainer.recipe.search_space import Choices, Dimension
from trainer.telemetry import plots
from trainer.telemetry.readable import FRACTIONS

PANEL = 3.6  # inches
RING: Mapping[str, Any] = {"markersize": 15, "markeredgewidth": 2, "fillstyle": "none", "linestyle": ""}
BEST = plots.COLOURS[3]


def draw(folder: Path, report: SweepReport, dimensions: Sequence[Dimension]) -> list[Path]:
    """sweep.png, where a trial has a figure; returns its path."""
    rows = [row for row in report.trials if row.value is not None and row.status in ("done", "ended early")]
    if not rows:
        return []
    path = folder / "sweep.png"
    if len(dimensions) == 2:
        lists = all(isinstance(part, Choices) for part in dimensions)
        figure = _heat_map(report, dimensions) if lists else _scattered(report, rows, dimensions)
    else:
        figure = _panels(report, rows, dimensions)
    plots.save_picture(figure, path)
    return [path]


class _Axis:
    """Where the values of a key lie: those of a list evenly, as they were typed; those of a range on its scale."""

    def __init__(self, part: Dimension) -> None:
        self.key, self._part = part.key, part

    def place(self, value: str) -> float:
        return float(self._part.values.index(value)) if isinstance(self._part, Choices) else float(value)

    def dress(self, axes: Any, side: str) -> None:
        """Scale, ticks and label of `x` or `y`."""
        if isinstance(self._part, Choices):
            getattr(axes, f"set_{side}ticks")(range(len(self._part.values)), self._part.values)
            getattr(axes, f"set_{side}lim")(-0.5, len(self._part.values) - 0.5)
        elif self._part.log:
            getattr(axes, f"set_{side}scale")("log")
            _label_decades(getattr(axes, f"{side}axis"), self._part.high / self._part.low)
        getattr(axes, f"set_{side}label")(self.key)


def _label_decades(axis: Any, factor: float) -> None:
    """Ticks as one types the numbers, few enough to stand side by side."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0,) if factor > 100 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _scale(report: SweepReport) -> tuple[float, str]:
    """What values are multiplied by, and the label of the metric."""
    fraction = report.metric in FRACTIONS
    return 100.0 if fraction else 1.0, f"best {report.metric}{', %' * fraction}"


def _panels(report: SweepReport, rows: Sequence[TrialFigures], dimensions: Sequence[Dimension]) -> Any:
    """The metric over each key, all trials in every panel."""
    count = len(dimensions)
    figure, panels = plots.canvas(8.0 if count == 1 else PANEL * count, 4.4 if count == 1 else 3.8, count)
    scale, label = _scale(report)
    for axes, part in zip(panels, dimensions, strict=True):
        axis = _Axis(part)
        for status, colour, marker in (("done", plots.COLOURS[0], "o"), ("ended early", plots.INK, "x")):
            points = [(axis.place(row.values[part.key]), row) for row in rows if row.status == status]
            points.sort(key=lambda point: point[0])
            if not points:
                continue
            joined = "-" if count == 1 and status == "done" and isinstance(part, Choices) else ""
            axes.errorbar(
                [x for x, _ in points],
                [scale * (row.value or 0.0) for _, row in points],
                yerr=[scale * (row.std or 0.0) for _, row in points] if report.repeats > 1 else None,
                color=colour, marker=marker, linestyle=joined, capsize=4, label=status,
            )  # fmt: skip
        if report.done:
            best = report.done[0]
            x = axis.place(best.values[part.key])
            axes.plot([x], [scale * (best.value or 0.0)], marker="o", color=BEST, label="best", **RING)
        axis.dress(axes, "x")
    panels[0].set_ylabel(label)
    for axes in panels[1:]:
        axes.sharey(panels[0])
    if any(row.status == "ended early" for row in rows):
        plots.legend_below(figure, panels)
    _titled(figure, report)
    return figure


def _heat_map(report: SweepReport, dimensions: Sequence[Dimension]) -> Any:
    """A cell a combination, with its figure; one that failed says so."""
    from matplotlib.patches import Rectangle

    down, across = dimensions
    cells = {(row.values[down.key], row.values[across.key]): row for row in report.trials}
    scale, label = _scale(report)
    figure, (axes,) = plots.canvas(2.4 + 1.15 * len(across.ends()), 1.7 + 0.62 * len(down.ends()))
    axes.grid(False)
    values = [[_value(cells.get((first, second)), scale) for second in across.ends()] for first in down.ends()]
    image = axes.imshow(values, cmap="cividis" if report.larger_is_better else "cividis_r", aspect="auto")
    for y, first in enumerate(down.ends()):
        for x, second in enumerate(across.ends()):
            row = cells.get((first, second))
            _write_cell(axes, image, x, y, row, scale)
            if report.done and row is report.done[0]:
                frame = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, fill=False, edgecolor=BEST, linewidth=3)
                axes.add_patch(frame)
    axes.set_xticks(range(len(across.ends())), across.ends())
    axes.set_yticks(range(len(down.ends())), down.ends())
    axes.tick_params(length=0)
    axes.set_xlabel(across.key)
    axes.set_ylabel(down.key)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _bar(figure, image, axes, label)
    _titled(figure, report)
    return figure


def _value(row: TrialFigures | None, scale: float) -> float:
    usable = row is not None and row.value is not None and row.status == "done"
    return scale * (row.value or 0.0) if row is not None and usable else float("nan")


def _write_cell(axes: Any, image: Any, x: int, y: int, row: TrialFigures | None, scale: float) -> None:
    value = _value(row, scale)
    if value != value:
        text = f"exit {row.exit_code}" if row is not None and row.error else "-"
        axes.text(x, y, text, ha="center", va="center", color=plots.INK, fontsize=9)
        return
    text = f"{value:.2f}" if scale > 1 else f"{value:.4g}"
    if row is not None and row.std is not None:
        text += f"\n± {scale * row.std:.2g}"
    red, green, blue, _ = image.cmap(image.norm(value))
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
    axes.text(x, y, text, ha="center", va="center", color="black" if light else "white", fontsize=9)


def _scattered(report: SweepReport, rows: Sequence[TrialFigures], dimensions: Sequence[Dimension]) -> Any:
    """Trials where their two values lie, in the colour of their metric; crosses ended early."""
    figure, (axes,) = plots.canvas(7.4, 5.0)
    (across, down), (scale, label) = map(_Axis, dimensions), _scale(report)
    finite = [scale * (row.value or 0.0) for row in rows]
    colours = {"cmap": "cividis" if report.larger_is_better else "cividis_r", "vmin": min(finite), "vmax": max(finite)}
    image = None
    for status, marker in (("ended early", "X"), ("done", "o")):
        points = [row for row in rows if row.status == status]
        x = [across.place(row.values[across.key]) for row in points]
        y = [down.place(row.values[down.key]) for row in points]
        values = [scale * (row.value or 0.0) for row in points]
        drawn = axes.scatter(x, y, c=values, s=60, marker=marker, edgecolors=plots.INK, linewidths=0.6, **colours)
        image = drawn if points else image
    if report.done:
        best = report.done[0].values
        place = [across.place(best[across.key])], [down.place(best[down.key])]
        axes.plot(*place, marker="o", color=BEST, **RING)
    across.dress(axes, "x")
    down.dress(axes, "y")
    _bar(figure, image, axes, label)
    _titled(figure, report)
    return figure


def _bar(figure: Any, image: Any, axes: Any, label: str) -> None:
    """The scale of colours."""
    bar = figure.colorbar(image, ax=axes)
    bar.ax.tick_params(colors=plots.INK)
    bar.set_label(label, color=plots.INK)
    bar.outline.set_visible(False)


def _titled(figure: Any, report: SweepReport) -> None:
    failed = sum(row.status == "failed" for row in report.trials)
    title = f"{report.recipe}: {len(report.trials)} trials" + (f", {failed} failed" if failed else "")
    title += f"; mean and standard deviation of {report.repeats} seeds" if report.repeats > 1 else ""
    figure.suptitle(title, color=plots.INK, fontsize=11)
