"""The command `guide` and the help pages, both from the folder `trainer/guide/`."""

import difflib
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.grammar import format_program
from trainer.errors import RecipeError
from trainer.processes.terminal import fit, localize_commands, terminal_width
from trainer.telemetry.readable import format_table, wrap

KEYS = """\
  python -m trainer recipes keys explains every key
  python -m trainer guide answers questions"""
# Matches one command's section of the page `commands`: name, description, usage, list of options,
# examples.
SECTION = re.compile(
    r"^## (?P<name>\w+)\n\n(?P<about>.*?)\n\n```text\npython -m trainer (?P<usage>.*?)\n```\n\n"
    r"((?P<rows>- .*?)\n\n)?```sh\n(?P<examples>.*?)\n```$",
    re.S | re.M,
)

# An image, or a link to another page of the guide. Links to websites do not match.
LINK = re.compile(r"!?\[([^\]]*)\]\((?!http)[^)]*\)")
FOLDER = Path(__file__).parent.parent / "guide"
# Name of the page that lists all topics. The name is README so that Git hosts show this page below
# the files of its folder.
INDEX = "README"


def command(words: Sequence[str]) -> str:
    """Return the page of the topic that `words` name, or the list of topics if `words` is empty.

    Raises:
        RecipeError: there is no such topic; the message names similar topics, if any.
    """
    topic = " ".join(words).strip().lower().removesuffix(".md")
    if not topic or topic == INDEX.lower():
        return _format_index()
    if topic not in list_topics():
        similar = difflib.get_close_matches(topic, list_topics(), n=3, cutoff=0.7)
        mentions = {}
        for name, question in list_topics().items():
            # A mention in the topic's question counts as much as 1,000 mentions on its page.
            text = 1000 * question + read_page(name)
            mentions[name] = text.lower().count(topic)
        mentioning = sorted(filter(mentions.get, mentions), key=mentions.__getitem__, reverse=True)
        nearest = [*dict.fromkeys([*similar, *mentioning])][:3]
        hint = ""
        if nearest:
            hint = f"; nearest: {', '.join(nearest)}"
        example = " ".join([format_program(), "guide", *nearest[:1]])
        raise RecipeError(f"'{topic[:80]}' is not a topic{hint}: type {example}")
    return format_page(_name_program(topic, read_page(topic)))


@functools.cache
def list_topics() -> dict[str, str]:
    """Map each topic to its question, in reading order."""
    questions = dict[str, str]()
    for _, rows in _read_index():
        questions.update(rows)
    return questions


def read_page(topic: str) -> str:
    """Read the Markdown page of a topic."""
    return (FOLDER / f"{topic}.md").read_text(encoding="utf-8")


def format_page(text: str) -> str:
    """Format a page of the guide for the terminal. Without a terminal, return it unchanged."""
    if terminal_width() == sys.maxsize:
        return text
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.S | re.M)
    blocks = []
    # Code blocks are not wrapped, so that their commands can be copied.
    for part in re.split(r"(^ *```.*?^ *```$)", text, flags=re.S | re.M):
        if part.strip():
            is_code = part.lstrip().startswith("```")
            blocks.append(part if is_code else _format_prose(part))
    return "\n\n".join(blocks) + "\n"


def _format_prose(text: str) -> str:
    """Wrap headings, paragraphs, lists and tables. Links between pages become their text."""
    blocks = []
    for block in LINK.sub(r"\1", text).strip("\n").split("\n\n"):
        lines = []
        if block.startswith("|"):
            rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in block.splitlines()]
            lines = format_table([rows[0], *rows[2:]])
            if any("\n" in line for line in lines):
                # If any row has several lines, separate the rows by empty lines.
                lines = ["\n\n".join(line.rstrip() for line in lines if line)]
        else:
            # Join the lines of each paragraph or list item before wrapping them again.
            for line in re.sub(r"\n(?!- |\d+\. |#)\s*", " ", block).splitlines():
                _, start, words = re.split(r"^( *(?:- |\d+\. )?)", line, maxsplit=1)
                lines.append(wrap(start, words))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _read_index() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each heading of the index with its topics and their questions."""
    for section in read_page(INDEX).split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        rows = []
        for line in lines:
            if line.startswith("- ["):
                link, _, question = line.partition(": ")
                rows.append((re.sub(r"- \[(\w+)\].*", r"\1", link), question))
        yield heading, rows


def _format_index() -> str:
    width = max(map(len, list_topics()))
    lines = [f"usage: {format_program()} guide TOPIC"]
    for heading, rows in _read_index():
        lines += ["", heading]
        lines += [f"  {name:<{width}}  {question}" for name, question in rows]
    return fit("\n".join(lines)) + "\n"


def _name_program(topic: str, text: str) -> str:
    """Replace the program's name in the commands of a page with what the user typed.

    `./launch.sh` stays in front of commands that only launch.sh has. `python -m trainer` stays on
    the page `start`, which lists all ways to start.
    """
    if topic != "start":
        text = localize_commands(text)
    return re.sub(
        r"\./launch\.sh(?= (?!test\b|--help\b)[\w-])",
        lambda _: format_program(),
        text,
    )


@dataclass(frozen=True)
class Page:
    """Help for one command.

    Attributes:
        usage: name of the command and pattern of its arguments.
        about: description of the command.
        words: description of each option, by the option's name.
        examples: command lines to type unchanged.
    """

    usage: str
    about: str
    words: dict[str, str]
    examples: tuple[str, ...]


@functools.cache
def parse_command_pages() -> dict[str, Page]:
    """Map the name of each command to its help, parsed from the guide's page `commands`."""
    by_name = {}
    for section in SECTION.finditer(read_page("commands")):
        words = {}
        for row in (section["rows"] or "").splitlines():
            word, _, text = row.removeprefix("- `").partition("`: ")
            words[word] = text
        about = " ".join(section["about"].split())
        examples = tuple(section["examples"].splitlines())
        by_name[section["name"]] = Page(section["usage"], about, words, examples)
    return by_name


def format_overview(recipes: str) -> str:
    """Format the overview of all commands; `recipes` are the lines that describe the recipes."""
    summaries = {}
    for entry in parse_command_pages().values():
        # The overview has one line per command: the usage without optional arguments, and the first
        # clause of the description.
        usage = entry.usage.partition(" [")[0]
        summaries[usage] = re.split("[:.,]", entry.about)[0]
    width = max(map(len, summaries))
    lines = [
        "usage: python -m trainer COMMAND [key=value ...]    COMMAND --help shows more",
        "",
    ]
    lines += [f"  {usage:<{width}}  {about}" for usage, about in summaries.items()]
    examples = parse_command_pages()["train"].examples
    lines += [
        "",
        "  --key=value and --key value are read as key=value",
        KEYS,
        "",
        "recipes:",
        recipes,
        "",
    ]
    lines += ["examples:", f"  {examples[0]}", f"  {examples[1]}", f"  {examples[-1]}"]
    return localize_commands(fit("\n".join(lines))) + "\n"


def format_command_page(command: str) -> str:
    """Format the page of one command."""
    entry = parse_command_pages()[command]
    lines = [f"usage: python -m trainer {entry.usage}", "", wrap("", entry.about)]
    if entry.words:
        width = max(map(len, entry.words))
        lines.append("")
        for word, text in entry.words.items():
            lines.append(wrap(f"  {word:<{width}}  ", text))
    lines += ["", "examples:"]
    # Examples are not wrapped, so that they can be copied.
    for example in entry.examples:
        lines.append(f"  {example}")
    return localize_commands("\n".join(lines)) + "\n"
