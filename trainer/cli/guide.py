"""`python -m trainer guide`, answers by question, and `--help`, a page for each command: from `trainer/guide/`.

For a terminal text and tables are wrapped, code stays as it is, and links say where they lead. It knows what the guide
uses of Markdown: headings, paragraphs, lists, tables, fenced code, links, pictures and comments.
"""

from __future__ import annotations

import difflib
import functools
import platform
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from trainer.cli.grammar import program
from trainer.errors import RecipeError
from trainer.processes.terminal import as_typed
from trainer.recipe.versions import VERSION, installed

INDENT = "    "  # of code
GAP = 2  # blanks between the columns of a table; 1 where it is wide
_ITEM = re.compile(r"(?:-|\d+\.) +")
_BLOCK = re.compile(  # code between fences; a heading or comment; a table; anything else up to one of them
    r"(?P<code>^ *```.*?^ *```.*?$)|^(?:#|<!--)[^\n]*|(?:^\|[^\n]*\n?)+|(?:^(?! *```|#|<!--|\|)[^\n]*\S[^\n]*\n?)+",
    re.S | re.M,
)
KEYS = "  python -m trainer recipes keys explains every key, python -m trainer guide answers questions"
SECTION = re.compile(
    r"^## (?P<name>\w+)\n\n(?P<about>.*?)\n\n```text\npython -m trainer (?P<usage>.*?)\n```\n\n"
    r"(\| word [^\n]*\n\| ---[^\n]*\n(?P<rows>.*?)\n\n)?```sh\n(?P<examples>.*?)\n```$",
    re.S | re.M,
)

FOLDER = Path(__file__).parent.parent / "guide"
INDEX = "README"  # what a git host shows of the folder
SYNONYMS = {  # words that no page has, with what the pages call them
    "oom": "out of memory", "augmentation": "augment", "augmentations": "augment", "lr": "optimizer.lr",
    "learning rate": "optimizer.lr", "hyperparameters": "recipe", "config": "recipe", "distributed": "ddp",
}  # fmt: skip
WIDEST = 100  # characters of a line, on any screen


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


def command(words: Sequence[str]) -> str:
    """The page of the topic that the words name, or the one section whose heading has them; without words, all topics.

    Raises:
        RecipeError: no such topic; the line names those nearest to it.
    """
    asked = " ".join(words).strip().lower().removesuffix(".md")
    if not asked or asked == INDEX.lower():
        return _listed()
    width = min(WIDEST, shutil.get_terminal_size().columns)
    if asked not in topics() and (part := _section(asked)) is not None:
        topic, text = part
        return for_terminal(_as_started(topic, f"# {text}"), width) + f"\nmore on this: {program()} guide {topic}\n"
    if asked not in topics():
        near = nearest_topics(asked)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise RecipeError(f"'{asked[:80]}' is not a topic{hint}: type {' '.join([program(), 'guide', *near[:1]])}")
    return for_terminal(_as_started(asked, page(asked)), width)


@functools.cache
def topics() -> dict[str, str]:
    """Each topic with its question, in reading order."""
    return {name: question for _, rows in _parts() for name, question in rows}


def page(topic: str) -> str:
    """A topic's page, in Markdown."""
    return (FOLDER / f"{topic}.md").read_text(encoding="utf-8")


def _section(asked: str) -> tuple[str, str] | None:
    """The topic and text of the only section whose heading has all the words; None where there is none, or several."""
    sections = [
        (topic, part)
        for topic in topics()
        for part in page(topic).split("\n## ")[1:]
        if set(asked.split()) <= set(re.findall(r"\w+", part.partition("\n")[0].lower()))
    ]
    return sections[0] if len(sections) == 1 else None


def nearest_topics(asked: str) -> list[str]:
    """Up to three topics: those spelled alike, then those whose pages speak of it most."""
    alike = difflib.get_close_matches(asked, topics(), n=3, cutoff=0.7)
    asked = SYNONYMS.get(asked) or " ".join(SYNONYMS.get(word, word) for word in asked.split())
    words = [word for word in re.split(r"[\s?,]+", asked) if len(word) > 2]
    counts: dict[str, int] = {}
    for topic, question in topics().items():
        text = f"{page(topic)} {10 * f'{question} '}".lower()
        counts[topic] = 100 * text.count(asked) + (sum(map(text.count, words)) if words else 0)
    often = sorted((topic for topic in counts if counts[topic]), key=lambda topic: -counts[topic])
    return list(dict.fromkeys([*alike, *often]))[:3]


def _parts() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The index: each heading with its topics and their questions."""
    for part in page(INDEX).split("\n## ")[1:]:
        rows = [cells(line) for line in part.splitlines() if line.startswith("| [")]
        yield part.splitlines()[0], [(re.sub(r"\[(\w+)\].*", r"\1", name), question) for name, question in rows]


def _listed() -> str:
    width = max(map(len, topics()))
    lines = [f"usage: {program()} guide TOPIC"]
    for heading, rows in _parts():
        lines += ["", heading, *(f"  {name:<{width}}  {question}" for name, question in rows)]
    return "\n".join(lines) + "\n"


def _as_started(topic: str, text: str) -> str:
    """A page with the program's name as it was typed; what only launch.sh knows stays launch.sh's.

    The page `start` lists all ways to start, and so keeps them.
    """
    text = text if topic == "start" else as_typed(text)
    return re.sub(r"\./launch\.sh(?= (?!test\b|tensorboard\b|--help\b)[\w-])", lambda _: program(), text)


@dataclass(frozen=True)
class Page:
    """Help for one command: how it is called, what it does, its words, and lines to type as they are."""

    usage: str
    about: str
    words: dict[str, str]
    examples: tuple[str, ...]


@functools.cache
def pages() -> dict[str, Page]:
    """Each command's page, as its section of the guide's page `commands` has it."""
    by_name = {}
    for section in SECTION.finditer(page("commands")):
        rows = (cells(row) for row in (section["rows"] or "").splitlines())
        words = {word.strip("`"): text for word, text in rows}
        about = " ".join(section["about"].split())
        by_name[section["name"]] = Page(section["usage"], about, words, tuple(section["examples"].splitlines()))
    return by_name


def first(recipes: str) -> str:
    """The first page, with the recipes' lines."""
    shown = {page.usage.partition(" [")[0]: re.split("[:.,]", page.about)[0] for page in pages().values()}
    width = max(map(len, shown))
    lines = ["usage: python -m trainer COMMAND [key=value ...]        COMMAND --help shows more", ""]
    lines += [f"  {usage:<{width}}  {about}" for usage, about in shown.items()]
    examples = pages()["train"].examples
    lines += ["", "  --key=value, --key value and key = value are read as key=value", KEYS, "", "recipes:", recipes, ""]
    lines += ["examples:", *(f"  {line}" for line in (*examples[:2], examples[-1]))]
    return as_typed("\n".join(lines)) + "\n"


def command_page(command: str) -> str:
    """One command's page."""
    about = pages()[command]
    lines = [f"usage: python -m trainer {about.usage}", "", about.about]
    width = max((len(word) for word in about.words), default=0)
    lines += ["", *(f"  {word:<{width}}  {text}" for word, text in about.words.items())] if about.words else []
    lines += ["", "examples:", *(f"  {line}" for line in about.examples)]
    return as_typed("\n".join(lines)) + "\n"


def version_line() -> str:
    """Versions, without importing torch."""
    return f"trainer {VERSION}, torch {installed('torch')}, Python {platform.python_version()}"
