"""`python -m trainer guide`, answers by question, and `--help`, a page for each command: from `trainer/guide/`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.grammar import program
from trainer.errors import RecipeError
from trainer.processes.terminal import as_typed

KEYS = "  python -m trainer recipes keys explains every key, python -m trainer guide answers questions"
SECTION = re.compile(
    r"^## (?P<name>\w+)\n\n(?P<about>.*?)\n\n```text\npython -m trainer (?P<usage>.*?)\n```\n\n"
    r"(\| word [^\n]*\n\| ---[^\n]*\n(?P<rows>.*?)\n\n)?```sh\n(?P<examples>.*?)\n```$",
    re.S | re.M,
)

FOLDER = Path(__file__).parent.parent / "guide"
INDEX = "README"  # what a git host shows of the folder


def cells(row: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def command(words: Sequence[str]) -> str:
    """The page of the topic that the words name; without words, all topics.

    Raises:
        RecipeError: no such topic; the line names those nearest to it.
    """
    asked = " ".join(words).strip().lower().removesuffix(".md")
    if not asked or asked == INDEX.lower():
        return _listed()
    if asked not in topics():
        near = difflib.get_close_matches(asked, topics(), n=3, cutoff=0.7)
        found = {topic: f"{1000 * question}{page(topic)}".lower() for topic, question in topics().items()}
        often = {topic: text.count(asked) for topic, text in found.items() if topic not in near}
        near = [*near, *sorted(filter(often.get, often), key=lambda topic: -often[topic])][:3]
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise RecipeError(f"'{asked[:80]}' is not a topic{hint}: type {' '.join([program(), 'guide', *near[:1]])}")
    return _as_started(asked, page(asked))


@functools.cache
def topics() -> dict[str, str]:
    """Each topic with its question, in reading order."""
    return {name: question for _, rows in _parts() for name, question in rows}


def page(topic: str) -> str:
    """A topic's page, in Markdown."""
    return (FOLDER / f"{topic}.md").read_text(encoding="utf-8")


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
    lines += ["", "  --key=value and --key value are read as key=value", KEYS, "", "recipes:", recipes, ""]
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
