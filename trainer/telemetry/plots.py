"""Charts with a transparent background and mid-gray ink, readable on light and on dark pages.

The colors are those of Okabe and Ito, "Color Universal Design" (2008), which people with any kind
of color vision can distinguish, with two changes: violet replaces black, which would vanish on dark
pages, and yellow is darker, because the original would vanish on light pages. Matplotlib is
imported on first use.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Gray for text and axes. Its contrast ratio is 4.3 to white, and 4.4 to GitHub's dark page.
INK = "#7a7a7a"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#8c6bb1", "#cc79a7", "#b5a800")


def create_figure(
    width: float,
    height: float,
    columns: int = 1,
) -> tuple[Any, list[Any]]:
    """Create a figure without pyplot, which keeps global state and may open a window.

    Args:
        width: Width in inches.
        height: Height in inches.
        columns: Number of axes next to each other.

    Returns:
        (figure, axes): the figure, and a list of its `columns` axes.
    """
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
    """Write the figure as a picture with a transparent background."""
    figure.savefig(path, dpi=150, transparent=True)


def draw_bars(
    path: Path,
    rows: Sequence[tuple[str, float, float, str]],
    xlabel: str,
    title: str,
    marks: Mapping[str, str],
) -> None:
    """Draw horizontal bars with whiskers of one standard deviation, the first bar on top.

    Args:
        path: File to write.
        rows: Name, mean, standard deviation and label of each bar.
        xlabel: Label of the axis.
        title: Title of the chart.
        marks: Symbol to draw before the label, by the name of the bar. Bars without one are paler.
    """
    figure, (axes,) = create_figure(8.5, 1.1 + 0.42 * len(rows))
    axes.grid(False, axis="y")
    top = max(mean + std for _, mean, std, _ in rows) or 1.0
    for position, (name, mean, std, label) in enumerate(rows):
        alpha = 0.45
        if name in marks:
            alpha = 1.0
            label = f"{marks[name]} {label}"
        axes.barh(position, mean, height=0.66, color=COLOURS[0], alpha=alpha)
        if std:
            axes.errorbar(
                mean, position, xerr=std, color=INK, capsize=4, capthick=1.4, elinewidth=1.4
            )
        x = mean + std + 0.015 * top
        axes.text(x, position, label, va="center", ha="left", color=INK, fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.02 * top)
    axes.set_xlabel(xlabel)
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    save_picture(figure, path)
