"""What `--help` prints: a first page, and one for each command with its words and examples, from the guide's page."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass

from trainer.cli import guide
from trainer.cli.grammar import program
from trainer.cli.terminal import cells
from trainer.recipe.versions import VERSION, installed

KEYS = "  python -m trainer recipes keys explains every key, python -m trainer guide answers questions"
SECTION = re.compile(
    r"^## (?P<name>\w+)\n\n(?P<about>.*?)\n\n```text\npython -m trainer (?P<usage>.*?)\n```\n\n"
    r"(\| word [^\n]*\n\| ---[^\n]*\n(?P<rows>.*?)\n\n)?```sh\n(?P<examples>.*?)\n```$",
    re.S | re.M,
)


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
    for section in SECTION.finditer(guide.page("commands")):
        rows = (cells(row) for row in (section["rows"] or "").splitlines())
        words = {word.strip("`"): text for word, text in rows}
        about = " ".join(section["about"].split())
        by_name[section["name"]] = Page(section["usage"], about, words, tuple(section["examples"].splitlines()))
    return by_name


def first(recipes: str) -> str:
    """The first page, with the recipes' lines."""
    shown = {page.usage.partition(" [")[0]: re.split("[:.,]", page.about)[0] for page in pages().values()}
    width = max(map(len, shown))
    lines = ["usage: python -m trainer COMMAND [key=value ...]        COMMAND --help tells more", ""]
    lines += [f"  {usage:<{width}}  {about}" for usage, about in shown.items()]
    examples = pages()["train"].examples
    lines += ["", "  --key=value, --key value and key = value are read as key=value", KEYS, "", "recipes:", recipes, ""]
    lines += ["examples:", *(f"  {line}" for line in (*examples[:2], examples[-1]))]
    return _called("\n".join(lines)) + "\n"


def page(command: str) -> str:
    """One command's page."""
    about = pages()[command]
    lines = [f"usage: python -m trainer {about.usage}", "", about.about]
    width = max((len(word) for word in about.words), default=0)
    lines += ["", *(f"  {word:<{width}}  {text}" for word, text in about.words.items())] if about.words else []
    lines += ["", "examples:", *(f"  {line}" for line in about.examples)]
    return _called("\n".join(lines)) + "\n"


def version_line() -> str:
    """Versions, without importing torch."""
    return f"trainer {VERSION}, torch {installed('torch')}, Python {platform.python_version()}"


def _called(text: str) -> str:
    """A page with the program's name as it was typed."""
    lines = text.split("\n")
    return "\n".join(line if "torchrun" in line else line.replace("python -m trainer", program()) for line in lines)
