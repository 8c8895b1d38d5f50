"""`python -m trainer guide`: answers by question, from the pages in `trainer/guide/`."""

from __future__ import annotations

import difflib
import functools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.cli.grammar import program
from trainer.cli.terminal import cells, for_terminal
from trainer.errors import RecipeError
from trainer.processes.terminal import as_typed

FOLDER = Path(__file__).parent.parent / "guide"
INDEX = "README"  # what a git host shows of the folder
SYNONYMS = {  # words that no page has, with what the pages call them
    "oom": "out of memory", "augmentation": "augment", "augmentations": "augment", "lr": "optimizer.lr",
    "learning rate": "optimizer.lr", "hyperparameters": "recipe", "config": "recipe", "distributed": "ddp",
}  # fmt: skip
WIDEST = 100  # characters of a line, on any screen


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
        return for_terminal(_as_started(topic, f"# {text}"), width) + f"\nmore of this: {program()} guide {topic}\n"
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
