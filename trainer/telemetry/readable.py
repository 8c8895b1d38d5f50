"""Figures, texts and tables as people read them, in few characters, and amounts as they write them: 24GiB, 10GB/s."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Sequence
from shutil import get_terminal_size

from trainer.errors import RecipeError
from trainer.processes import terminal

FRACTIONS = ("top1", "top5", "f1", "f1_macro")  # metrics that are told in per cent
WIDEST = 100  # characters of a line
WHOLE = ("best", "details", "labels", "result", "timeline", "watch", "weights", "worst")  # titles of commands and paths
UNITS = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"))
SIZES = {f"{prefix}{i}B": (1024 if i else 1000) ** power for power, prefix in enumerate("KMGT", 1) for i in ("i", "")}
BITS = {f"{prefix}bit": 1000**power / 8 for power, prefix in enumerate("KMGT", 1)}


def columns(elsewhere: int = WIDEST) -> int:
    """How wide a table may be: as the terminal, at most WIDEST; `elsewhere` without a terminal."""
    return min(WIDEST, get_terminal_size((elsewhere, 24)).columns)


def titled(title: str, text: str, lines: int | None = None, width: int = 9) -> str:
    """A text beside its title of this width, in so many lines at most; what one copies stays in one piece.

    Without a number of lines, each line of the text begins a new one.
    """
    start, rest = f"  {title:<{width}} ", " " * (width + 3)
    if title in WHOLE:
        return start + text
    parts = text.split("\n") if lines is None else [text]
    return "\n".join(
        textwrap.fill(
            part, columns(80), initial_indent=rest if number else start, subsequent_indent=rest, max_lines=lines,
            placeholder=" ...", break_long_words=False, break_on_hyphens=False,
        )
        for number, part in enumerate(parts)
    )  # fmt: skip


def plain(text: str) -> str:
    """A name as one may print it: what would move the cursor or break the line becomes a question mark."""
    return terminal.plain(text).replace("\n", "?").replace("\t", "?")


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
    """In the largest unit of which there are two or more: 90 are "90.0 s", 7,200 are "2 h"."""
    if seconds is None:
        return "-"
    for length, unit in UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:#.3g}".rstrip(".") + " s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def as_size(count: float | None, more: bool = False) -> str:
    """Bytes in powers of 1024, as in "1.2 MiB"; `more` where not all were counted."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{'>' * more}{count:.0f} B" if unit == "B" else f"{'>' * more}{count:.3g} {unit}"
        count /= 1024
    return f"{'>' * more}{count:,.2f} GiB"


def table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Columns side by side, those in `right` to the right; a column without any text is left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = (cell.rjust(width) if n in right else cell.ljust(width) for n, (cell, width) in cells if width)
        lines.append("  ".join(padded).rstrip())
    return lines


def markdown_table(rows: Sequence[Sequence[str]], bold: Container[int] = ()) -> list[str]:
    """The lines of a Markdown table, its head first; the rows `bold`, numbered from 0 below the head, stand out."""
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rest = [[f"**{cell}**" if n in bold and cell else cell for cell in row] for n, row in enumerate(rest)]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest)]


def counted(number: int, what: str) -> str:
    """As in "1 trial" and "1,200 trials"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def parse_amount(key: str, word: str) -> float:
    """Bytes of `memory=24GiB`, or those a second of `bandwidth=10GB/s`. Raises RecipeError for what is no amount."""
    scales, example, listed = SIZES, "24GiB", "GiB, GB, MiB or MB"
    if key == "bandwidth":
        scales = {f"{unit}/s": scale for unit, scale in {**SIZES, **BITS}.items()}
        example, listed = "10GB/s", "GB/s, GiB/s, MB/s or Gbit/s"
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([A-Za-z/]+)", word)
    lowered = {unit.lower(): scale for unit, scale in scales.items()}
    amount = float(match[1]) * lowered.get(match[2].lower(), 0.0) if match else 0.0
    if amount < 1:
        raise RecipeError(f"{key}={word[:40]} is not an amount above 0: write {key}={example}, in {listed}")
    return amount


def operations(count: float) -> str:
    """Floating point operations for people."""
    for unit in ("FLOP", "KFLOP", "MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TFLOP"


def multiply_adds(count: float) -> str:
    """The same as papers and torchvision count them, a multiplication and its addition as one: 4.09 GMACs."""
    return operations(count / 2).replace("FLOP", "MACs")
