"""Formatting of numbers, text and tables for people, and parsing of amounts.

Amounts are written as 24GiB or 10GB/s.
"""

import re
import textwrap
from collections.abc import Container, Sequence
from itertools import zip_longest

from trainer.errors import RecipeError
from trainer.processes import terminal
from trainer.recipe.metric_table import is_fraction

# Maximum width of a table in characters.
MAX_WIDTH = 100
# Maximum number of characters of a word that is never broken in a table.
LONG_WORD = 20
# Titles of lines that contain a command or a path. These lines are not wrapped, so that the command
# or path can be copied.
UNWRAPPED_TITLES = ("best", "details", "labels", "result", "timeline", "watch", "weights", "worst")
# Length in seconds and name of each unit of time, the largest first.
UNITS = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"))
# Bytes, or bytes per second, of each unit, by the name of the unit in lower case.
SIZES: dict[str, float] = {}
SPEEDS: dict[str, float] = {}
for power, prefix in enumerate("kmgt", 1):
    SIZES[f"{prefix}ib"] = SPEEDS[f"{prefix}ib/s"] = 1024**power
    SIZES[f"{prefix}b"] = SPEEDS[f"{prefix}b/s"] = 1000**power
    SPEEDS[f"{prefix}bit/s"] = 1000**power / 8


def table_width() -> int:
    """Return the width of the terminal in columns, at most `MAX_WIDTH`."""
    return min(MAX_WIDTH, terminal.terminal_width())


def format_titled(
    title: str,
    text: str,
    width: int = 9,
) -> str:
    """Return a text next to its title, wrapped to the width of the terminal.

    Args:
        title: The title. If it is in `UNWRAPPED_TITLES`, the text is not wrapped.
        text: The text. Its line breaks are kept.
        width: Width of the column of titles.
    """
    start = f"  {title:<{width}} "
    if title in UNWRAPPED_TITLES:
        return start + text
    filled = []
    for paragraph in text.split("\n"):
        filled.append(terminal.fill(paragraph, table_width(), start, width + 3))
        start = " " * (width + 3)
    return "\n".join(filled)


def wrap(start: str, text: str) -> str:
    """Return `start + text`, wrapped to the terminal, at most 120 columns.

    The other lines are indented by the length of `start`.
    """
    return terminal.fill(text, min(120, terminal.terminal_width()), start, len(start))


def escape_control_characters(text: str) -> str:
    """Replace control characters and line breaks in a name by question marks."""
    return terminal.escape_control_characters(text).replace("\n", "?").replace("\t", "?")


def format_number(value: float | None) -> str:
    """Format a number with up to three significant digits.

    Numbers from 100 on are formatted as integers, such as "1,234".
    """
    if value is None:
        return "-"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_score(metric: str, value: float | None) -> str:
    """Format the value of a metric, as a percentage if it is a fraction."""
    if value is None:
        return "-"
    if is_fraction(metric):
        return f"{100 * value:.2f}%"
    return f"{value:.4g}"


def format_duration(seconds: float | None) -> str:
    """Format seconds in the largest unit with a value of 2 or more: "90.0 s", but "2 min"."""
    if seconds is None:
        return "-"
    for length, unit in UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:#.3g}".rstrip(".") + " s"


def format_size(count: float | None) -> str:
    """Format a number of bytes in powers of 1024, as in "1.2 MiB"."""
    if count is None:
        return "-"
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count / 1024:,.2f} GiB"


def format_table(
    rows: Sequence[Sequence[str]],
    right: Container[int] = (),
    width: int | None = None,
) -> list[str]:
    """Return a string for each row of a table. Columns without a title and text are left out.

    If the table is too wide, its cells are wrapped, and a string may have several lines. If it is
    still too wide, each row becomes a list of titles and cells.

    Args:
        rows: Cells of each row. The first row has the titles.
        right: Indices of the right-aligned columns.
        width: Maximum width in characters; None for the width of the terminal.
    """
    if width is None:
        width = terminal.terminal_width()
    columns = {n: column for n, column in enumerate(zip(*rows, strict=True)) if any(column)}
    widths = {n: max(map(len, column)) for n, column in columns.items()}
    excess = sum(widths.values()) + 2 * (len(widths) - 1) - width
    # Narrow the columns without breaking words first, and then with breaking long words.
    for longest in (width, LONG_WORD):
        narrowest = {
            n: min(longest, max(map(len, " ".join(column).split()), default=0))
            for n, column in columns.items()
        }
        while excess > 0:
            wide = [n for n in widths if widths[n] > narrowest[n]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
            excess -= 1
    if excess > 0:
        return _list_cells(rows)
    texts = []
    for row in rows:
        cells = [textwrap.wrap(row[n], widths[n], break_on_hyphens=False) for n in widths]
        lines = []
        for parts in zip_longest(*cells, fillvalue=""):
            padded = []
            for n, part in zip(widths, parts, strict=True):
                padded.append(part.rjust(widths[n]) if n in right else part.ljust(widths[n]))
            lines.append("  ".join(padded).rstrip())
        texts.append("\n".join(lines))
    return texts


def _list_cells(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a string for each row, with a line "title  cell" for each cell that is not empty.

    The string of the row of titles is empty.
    """
    titles = rows[0]
    width = max(map(len, titles))
    texts = [""]
    for row in rows[1:]:
        pairs = zip(titles, row, strict=True)
        cells = [wrap(f"{title:<{width}}  ", cell) for title, cell in pairs if cell]
        texts.append("\n".join([*cells, ""]))
    return texts


def format_count(number: int, what: str) -> str:
    """Format a number and its noun, as in "1 trial" and "1,200 trials"."""
    if number == 1:
        return f"{number:,} {what}"
    return f"{number:,} {what}s"


def parse_amount(key: str, text: str) -> float:
    """Return the bytes of `memory=24GiB`, or the bytes per second of `bandwidth=10GB/s`.

    Args:
        key: "memory" or "bandwidth".
        text: Value of the option.

    Raises:
        RecipeError: The text is not an amount above 0.
    """
    scales = SIZES
    example = "24GiB"
    units = "GiB, GB, MiB or MB"
    if key == "bandwidth":
        scales = SPEEDS
        example = "10GB/s"
        units = "GB/s, GiB/s, MB/s or Gbit/s"
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([A-Za-z/]+)", text)
    amount = 0.0
    if match:
        amount = float(match[1]) * scales.get(match[2].lower(), 0.0)
    if amount < 1:
        raise RecipeError(
            f"{key}={text[:40]} is not an amount above 0: write {key}={example}, in {units}"
        )
    return amount


def format_operations(count: float) -> str:
    """Format a number of floating point operations, as in "8.18 GFLOP"."""
    for unit in ("FLOP", "KFLOP", "MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TFLOP"


def multiply_adds(count: float) -> str:
    """Format floating point operations as multiply-accumulates, as papers and torchvision do.

    A multiplication and its addition count as one, as in "4.09 GMACs".
    """
    return format_operations(count / 2).replace("FLOP", "MACs")
