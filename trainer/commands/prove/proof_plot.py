"""`proof.png`: on the left what was checked, on the right images a second beside a bare loop."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands.prove.proof import CheckFigures, Proof
from trainer.telemetry.plots import COLOURS, INK, canvas, save_picture

BLUE, ORANGE, GREEN, RED = COLOURS[:4]
SIGNS = {"right": ("o", GREEN), "wrong": ("X", RED), "not here": ("_", INK), "left out": ("_", INK)}
ROW = 0.235  # inches of a line on the left


def draw(path: Path, proof: Proof) -> None:
    """Draw it on a transparent ground."""
    rows = [row for row in proof["checks"] if row["part"] == "right"]
    speeds = [row for row in proof["checks"] if "images_per_sec" in row["figures"]]
    figure, (left, *others) = canvas(11 if speeds else 7.5, 1.0 + ROW * len(rows), 2 if speeds else 1)
    _list(left, rows)
    for axes in others:
        _bars(axes, speeds)
    colour = {"right": GREEN, "wrong": RED}.get(proof["status"], INK)
    title = "\n".join(textwrap.wrap(proof["sentence"], 100 if speeds else 70))
    figure.suptitle(title, color=colour, fontsize=12, fontweight="bold", x=0.02, ha="left")
    save_picture(figure, path)


def _list(axes: Any, rows: Sequence[CheckFigures]) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for place, row in enumerate(rows):
        mark, colour = SIGNS[row["status"]]
        wrong, done = row["status"] == "wrong", row["status"] in ("right", "wrong")
        axes.plot(0.02, place, mark, color=colour, markersize=7)
        title = row["title"].replace("`", "")
        text = title if done else f"{title} ({row['status']})"
        weight = "bold" if wrong else "normal"
        axes.text(0.06, place, text, va="center", color=RED if wrong else INK, fontsize=9, fontweight=weight)


def _bars(axes: Any, rows: Sequence[CheckFigures]) -> None:
    """A pair for each network and number of devices, with the least and the most that was seen."""
    pairs = ((-0.2, "images_per_sec", BLUE, "trainer"), (0.2, "bare_images_per_sec", ORANGE, "a bare PyTorch loop"))
    top = 1.0
    for place, row in enumerate(rows):
        for offset, key, colour, name in pairs:
            middle, low, high = (row["figures"][key][part] for part in ("median", "low", "high"))
            axes.barh(place + offset, middle, height=0.36, color=colour, label=None if place else name)
            around = [[middle - low], [high - middle]]
            axes.errorbar(middle, place + offset, xerr=around, color=INK, capsize=3, elinewidth=1.2)
            axes.text(high, place + offset, f"  {middle:,.0f}", va="center", ha="left", color=INK, fontsize=9)
            top = max(top, high)
    axes.set_yticks(range(len(rows)), [row["title"].replace(" on ", "\non ") for row in rows])
    axes.set_ylim(max(2.5, len(rows) - 0.4), -0.8)  # bars of one network are no thicker than those of two
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.2 * top)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("images/s: the median, and the least and the most")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left", bbox_to_anchor=(0, 1.06), ncols=2)
