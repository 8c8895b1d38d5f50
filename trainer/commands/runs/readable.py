"""Figures as people read them, in few characters."""

from __future__ import annotations

from shutil import get_terminal_size

from trainer.processes import started

FRACTIONS = ("top1", "top5", "f1", "f1_macro")  # metrics that are told in per cent
WIDEST = 100  # characters of a line
UNITS = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def columns() -> int:
    """How wide a table may be: as the terminal, and WIDEST elsewhere."""
    return min(WIDEST, get_terminal_size((WIDEST, 24)).columns)


def plain(text: str) -> str:
    """A name as one may print it: what would move the cursor or break the line becomes a question mark."""
    return started.plain(text).replace("\n", "?").replace("\t", "?")


def shortened(text: str, width: int) -> str:
    """A text that fits; the middle of a long one is left out."""
    if len(text) <= width:
        return text
    return text[: (width - 3 + 1) // 2] + "..." + text[len(text) - (width - 3) // 2 :]


def number(value: float | None) -> str:
    """Three figures or more, thousands apart."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def score(metric: str, value: float | None) -> str:
    """A metric's value: shares of right answers in per cent."""
    if value is None:
        return "-"
    return f"{100 * value:.2f}%" if metric in FRACTIONS else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """In the largest unit of which there are two or more: "90 s" are "90 s", 7,200 are "2 h"."""
    if seconds is None:
        return "-"
    for size, unit in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "0 s"


def bytes_of(size: int | None, more: bool = False) -> str:
    """As in "1.2 GB"; `more` where not all was counted."""
    if size is None:
        return "-"
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    unit = units[0]
    figure = f"{value:.0f}" if value >= 10 or unit == "B" else f"{value:.1f}"
    return f"{'>' * more}{figure} {unit}"
