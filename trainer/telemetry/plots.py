"""Tables -> pictures, on a transparent ground with mid-grey ink, so that they read on white and on dark pages alike.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), which people with any kind of colour vision can
tell apart, without black and with a darker yellow, which would vanish on one of the two grounds. Matplotlib is imported
on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK = "#7a7a7a"  # contrast 4.3 to white and 4.4 to GitHub's dark page
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#8c6bb1", "#cc79a7", "#b5a800")
THICKEST, THINNEST = 3.0, 1.0  # lines, in points
MARKERS = "osD^v*PX"
SMOOTHEST = 400  # points of a curve: what lies closer is averaged


@dataclass(frozen=True)
class Bar:
    """One bar: a mean with its standard deviation and words beside it; without a value only the words."""

    name: str
    value: float | None
    std: float = 0.0
    words: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves by name, each (x, y), on axes with these labels."""

    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    xlabel: str
    ylabel: str
    log: bool = False  # y


def canvas(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure, in inches, and its axes side by side; no window, no global state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    row = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in row:
        axes.set_facecolor("none")
        for side, spine in axes.spines.items():
            spine.set_color(INK)
            spine.set_visible(side in ("left", "bottom"))
        axes.tick_params(colors=INK, which="both")
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, row


def save_picture(figure: Any, path: Path) -> None:
    """Write the picture, transparent."""
    figure.savefig(path, dpi=150, transparent=True)


def bars(path: Path, rows: Sequence[Bar], xlabel: str, title: str = "") -> None:
    """Horizontal bars with whiskers of one standard deviation, the first on top, as many as there are."""
    figure, (axes,) = canvas(8.5, 1.1 + 0.42 * len(rows))
    axes.grid(False, axis="y")
    top = max([row.value + row.std for row in rows if row.value is not None], default=1.0) or 1.0
    for position, row in enumerate(rows):
        end = 0.0
        if row.value is not None:
            axes.barh(position, row.value, height=0.66, color=colour(position))
            if row.std:
                axes.errorbar(row.value, position, xerr=row.std, color=INK, capsize=4, capthick=1.4, elinewidth=1.4)
            end = row.value + row.std
        axes.text(end + 0.015 * top, position, row.words, va="center", ha="left", color=INK, fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.02 * top)
    axes.set_xlabel(xlabel)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.xaxis.set_major_formatter(_thousands)
    save_picture(figure, path)


def curves(path: Path, panels: Sequence[Panel], title: str = "") -> None:
    """Panels side by side with one legend; curves that lie on each other stay visible: later ones are thinner.

    A curve of one point is a mark.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    figure, row = canvas(8.0 if len(panels) == 1 else 5.25 * len(panels), 4.1, len(panels))
    for axes, panel in zip(row, panels, strict=True):
        for name, (x, y) in panel.curves.items():
            style = names.index(name)
            mark = {"marker": MARKERS[style % len(MARKERS)], "markersize": 8} if len(x) == 1 else {}
            axes.plot(*thinned(x, y), label=name, **_line(style, len(names)), **mark)
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(panel.ylabel)
        if panel.log:
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_formatter(_thousands)
    by_label: dict[str, Any] = {}
    for axes in row:
        by_label |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if by_label:
        figure.legend(
            list(by_label.values()), list(by_label), loc="outside lower center", ncols=min(4, len(by_label)),
            frameon=False, labelcolor=INK, fontsize=9, handlelength=3.2,
        )  # fmt: skip
    if title:
        figure.suptitle(title, color=INK, fontsize=11)
    save_picture(figure, path)


def colour(position: int) -> str:
    """The palette's, from the start again after its end."""
    return COLOURS[position % len(COLOURS)]


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """A curve of at most SMOOTHEST points: means of neighbours."""
    size = -(-len(x) // SMOOTHEST) or 1

    def means(values: Sequence[float]) -> list[float]:
        return [sum(values[n : n + size]) / len(values[n : n + size]) for n in range(0, len(values), size)]

    return means(x), means(y)


def _line(style: int, count: int) -> dict[str, Any]:
    thinner = style / (count - 1) if count > 1 else 0.5
    return {"color": colour(style), "linewidth": THICKEST - (THICKEST - THINNEST) * thinner}


def _thousands(value: float, _: int) -> str:
    return f"{value:,.10g}"
