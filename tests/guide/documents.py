"""README and the guide as tests read them: blocks of code, commands, links, headings."""

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.command_line import PROJECT
from tests.pages import GUIDE, README

CONTRIBUTING = PROJECT / ".github" / "CONTRIBUTING.md"
PAGES = [README, *sorted(GUIDE.glob("*.md"))]  # Pages for users.
LANGUAGES = ("sh", "sh wrong", "console", "text", "yaml", "python", "mermaid")
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_COMMAND = re.compile(
    r"\./launch\.sh|torchrun|trainer(?= )|python -m (trainer|tests)|python tests/|pip install"
)
_PLACEHOLDERS = {"COMMAND", "TOPIC", "NAME"}


@dataclass(frozen=True)
class Block:
    """A fenced block of code: its language, its text, and its first line."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Typed:
    """A command line as a page shows it, lines that end in a backslash joined."""

    text: str
    page: Path
    line: int
    wrong: bool = False  # Whether the page shows the command with its error.

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {self.text}"


def name(page: Path) -> str:
    """Return the name of a page in the ids of tests."""
    return (
        page.stem
        if page.parent == GUIDE and page.stem != "README"
        else str(page.relative_to(PROJECT))
    )


def cells(row: str) -> list[str]:
    """Split a row of a Markdown table into its cells."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


@cache
def blocks(page: Path) -> list[Block]:
    """List all fenced code of a page, including code in lists."""
    text = page.read_text(encoding="utf-8")
    actual = [
        (match[2], textwrap.dedent(match[3]), match.start()) for match in _FENCE.finditer(text)
    ]
    return [
        Block(
            language,
            code,
            text.count("\n", 0, start) + 1,
        )
        for language, code, start in actual
    ]


@cache
def prose(page: Path) -> str:
    """The page without fenced code; its lines keep their numbers."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """List the inline code of text and tables."""
    return [" ".join(match[1].split()) for match in _SPAN.finditer(prose(page))]


def settings(page: Path) -> list[str]:
    """List the `key=value` of text and tables."""
    return [span for span in spans(page) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*=[^ .]\S*", span)]


@cache
def commands(page: Path) -> list[Typed]:
    """List the lines of shell blocks, of console blocks those after a `$`, and the commands in text
    and tables, in the order of the page.
    """
    collected = []
    for block in blocks(page):
        if block.language in ("sh", "sh wrong"):
            text = block.text.replace("\\\n", "\0")
            for number, line in enumerate(text.splitlines(), block.line + 1):
                collected.append(
                    Typed(
                        " ".join(line.replace("\0", " ").split()),
                        page,
                        number,
                        block.language != "sh",
                    )
                )
        elif block.language == "console":
            for number, line in enumerate(block.text.splitlines(), block.line + 1):
                collected += [Typed(line[2:], page, number)] if line.startswith("$ ") else []
    text = prose(page)
    for match in _SPAN.finditer(text):
        span = " ".join(match[1].split())
        whole = " " in span and span not in ("python -m trainer", "pip install")
        if whole and _COMMAND.match(span) and not {*span.split()} & _PLACEHOLDERS:
            collected.append(
                Typed(
                    span,
                    page,
                    text.count("\n", 0, match.start()) + 1,
                )
            )
    return sorted(collected, key=lambda typed: typed.line)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a git host makes from the page's headings."""
    titles = re.findall(r"^#+ +(.*)$", prose(page), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def links(page: Path) -> list[str]:
    """The targets of links and pictures."""
    text = _SPAN.sub("", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"<(https?:[^>]+)>", text)
