"""A Markdown page as lines for a terminal: text and tables are wrapped, code stays as it is, links say where they lead.

It knows what the guide uses: headings, paragraphs, lists, tables, fenced code, links, pictures and comments.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

INDENT = "    "  # of code
GAP = 2  # blanks between the columns of a table; 1 where it is wide
_ITEM = re.compile(r"(?:-|\d+\.) +")
_BLOCK = re.compile(  # code between fences; a heading or comment; a table; anything else up to one of them
    r"(?P<code>^ *```.*?^ *```.*?$)|^(?:#|<!--)[^\n]*|(?:^\|[^\n]*\n?)+|(?:^(?! *```|#|<!--|\|)[^\n]*\S[^\n]*\n?)+",
    re.S | re.M,
)


def for_terminal(page: str, width: int) -> str:
    """The page in lines of `width` characters at most; code and words that are longer stay in one piece."""
    return "\n\n".join("\n".join(block) for block in _blocks(page, width)) + "\n"


def cells(row: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def _blocks(page: str, width: int) -> Iterator[list[str]]:
    """Each block, as lines for the terminal."""
    for block in _BLOCK.finditer(page):
        lines = block[0].splitlines()
        first = lines[0]
        if block["code"]:
            yield [f"{INDENT}{line}".rstrip() for line in textwrap.dedent("\n".join(lines[1:-1])).splitlines()]
        elif first.startswith("#"):
            title = _plain(first.lstrip("# "))
            yield [title, ("=" if first.startswith("# ") else "-") * len(title)]
        elif first.startswith("|"):
            yield _table([cells(_plain(row)) for number, row in enumerate(lines) if number != 1], width)
        elif _ITEM.match(first):
            yield [line for item in _items(lines) for line in _wrapped(item, width)]
        elif not first.startswith("<!--"):
            yield _wrapped(" ".join(lines), width)


def _items(lines: Sequence[str]) -> list[str]:
    items: list[str] = []
    for line in lines:
        if _ITEM.match(line):
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    return items


def _wrapped(text: str, width: int) -> list[str]:
    item = _ITEM.match(text)
    later = " " * len(item[0]) if item else ""
    return textwrap.wrap(_plain(text), width, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    """Text without the marks of Markdown; backquotes stay, for they show what can be typed."""
    text = re.sub(r"!\[([^]]*)\]\(([^)]*)\)", r"[picture: \1]", text)
    text = re.sub(r"\[([^]]+)\]\((?:[^)]*/)?([a-z_]+)\.md(?:#[^)]*)?\)", _topic, text)
    text = re.sub(r"\[([^]]+)\]\((https?:[^)]*)\)", r"\1 (\2)", text)
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<(https?:[^>]*)>", r"\1", text).replace("**", "")
    return re.sub(r"(?<![\w*`/.])\*(?=\S)([^*`]+)\*(?![\w*`])", r"\1", text)


def _topic(link: re.Match[str]) -> str:
    return f"`guide {link[2]}`" if link[1] == link[2] else f"{link[1]} (`guide {link[2]}`)"


def _table(rows: list[list[str]], width: int) -> list[str]:
    """Columns as wide as their cells where there is room; else wrapped, the long ones most."""
    rows = [[cell.replace("`", "") for cell in row] for row in rows]
    columns = list(zip(*rows, strict=True))
    whole = [max(map(len, column)) for column in columns]
    widths = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    gap = GAP if sum(widths) + GAP * (len(columns) - 1) <= width else 1
    room = width - gap * (len(columns) - 1)
    if sum(widths) > room:
        return _records(rows, width)
    while sum(widths) < min(room, sum(whole)):
        widest = max(range(len(widths)), key=lambda at: (whole[at] - widths[at] > 0, whole[at] / max(widths[at], 1)))
        widths[widest] += 1
    ruled = [rows[0], ["-" * column for column in widths], *rows[1:]]
    return [line for row in ruled for line in _row(row, widths, gap)]


def _row(row: Sequence[str], widths: Sequence[int], gap: int) -> list[str]:
    parts = [
        textwrap.wrap(cell, column, break_long_words=False, break_on_hyphens=False)
        for cell, column in zip(row, widths, strict=True)
    ]
    padded = (zip(line, widths, strict=True) for line in zip_longest(*parts, fillvalue=""))
    return [(" " * gap).join(f"{part:<{column}}" for part, column in line).rstrip() for line in padded]


def _records(rows: list[list[str]], width: int) -> list[str]:
    """A table that is too wide for any wrapping: each row as lines of its own."""
    head, *body = rows
    lines: list[str] = []
    for row in body:
        lines.append(row[0])
        for name, cell in zip(head[1:], row[1:], strict=True):
            lines += textwrap.wrap(
                f"{name}: {cell}", width, initial_indent="  ", subsequent_indent=INDENT, break_long_words=False,
                break_on_hyphens=False,
            ) if cell else []  # fmt: skip
    return lines
