"""Mistakes in a recipe file that make it invalid YAML, or YAML that means something else: the line, and its correction.

YAML's own messages name the line where parsing broke off, often a later one. Looked for only where a file failed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trainer.recipe.reflection import defaults
from trainer.recipe.schema import EXTENDS

KEYS = tuple(defaults())
SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in KEYS if "." in key))
TOP = (EXTENDS, *SECTIONS, *(key for key in KEYS if "." not in key))
NAMES = {*TOP, *KEYS, *(key.partition(".")[2] for key in KEYS if "." in key)}  # with and without their sections
CURLED = "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}\N{DOUBLE LOW-9 QUOTATION MARK}"
CURLED += "\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}"
BLANKS = "\N{NO-BREAK SPACE}\N{FIGURE SPACE}\N{NARROW NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\N{ZERO WIDTH SPACE}"
DASHES = "-\N{EN DASH}\N{EM DASH}"
WIDE = {"\N{FULLWIDTH COLON}": ":", "\N{FULLWIDTH EQUALS SIGN}": "="}
LINE = re.compile(
    rf"(?P<indent> *)(?P<dash>[{DASHES}] *|--)?(?P<key>[A-Za-z_][\w.]*)(?P<before> *)(?P<sign>[:=])(?P<rest>.*)"
)
BRACKETED = re.compile(r"'[^']*'|\"[^\"]*\"|([^\s,\[\]'\"]+\[[^\]]*\])")  # a text in quotes, or one with brackets in it
PROGRAMS = re.compile(r" *(\$ *)?(python3?|torchrun|trainer|\S*launch\.sh) ")
MARKS = r"(?:(?:&[\w-]+|!(?:!\w+|<[^>]*>)?)(?:\s+|$))*"  # a name and a type that YAML lets stand before a value
BLOCK = re.compile(rf"(?P<indent> *(?:- +)*)(?:[^:]+:|-)\s+{MARKS}[|>][-+\d]{{0,2}}")  # a text in the lines below
RESERVED = "@%`&*!"  # what a text without quotes cannot begin with


@dataclass
class _Above:
    """What stands above a line.

    Attributes:
        section: whose keys can follow; empty where none was begun.
        first: the line of that section's first key and its column, (0, 0) where there is none yet.
        seen: the line of each key, with its section.
        named: what the file gives a name to, as &name, so that *name can stand for it.
    """

    section: str
    first: tuple[int, int]
    seen: dict[tuple[str, str], int]
    named: frozenset[str]


def first_slip(text: str, recipes: Collection[str]) -> str | None:
    """The first mistake in a file, as "line 2: ..."; None where none is recognised.

    Args:
        text: the file's.
        recipes: names that can be extended.
    """
    lines = list(_lines(text))
    above = _Above("", (0, 0), {}, frozenset(re.findall(r"(?<!\S)&([\w-]+)(?!\S)", text)))
    open_in, depth = 0, 0  # the line that began a list or map over several lines, and how deep it is
    for place, (number, line) in enumerate(lines):
        if depth > 0:
            if open_in and (key := _key(line)) in TOP and key and not line.startswith(" "):
                opened = next(text_of_line for at, text_of_line in lines if at == open_in)
                return f"line {open_in}: {opened.strip()} is not closed: put {']' if '[' in opened else '}'} after it"
            depth += _depth(line)
            continue
        slip = _unset(line, place, recipes) or _written(line, above, number)
        if slip:
            return f"line {number}: {slip}"
        depth = max(_depth(line), 0)
        open_in = number if depth and _key(line) else 0
    return None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines with code, without comments and the bodies of block texts, with their numbers."""
    body: int | None = None  # the column that the lines of a text are right of
    for number, line in enumerate(textwrap.dedent(text.removeprefix("\ufeff")).split("\n"), 1):
        if body is not None and (not line.strip() or len(line) - len(line.lstrip(" ")) > body):
            continue
        code = _uncommented(line).rstrip()
        opened = BLOCK.fullmatch(code)
        body = len(opened["indent"]) if opened else None
        if code.strip():
            yield number, code


def _uncommented(line: str) -> str:
    match = re.match(r"((?:[^#'\"]|'[^']*'|\"[^\"]*\"|(?<=\S)#|['\"](?=[^'\"]*$))*)", line)
    return match[1] if match else line


def _key(line: str) -> str:
    match = LINE.fullmatch(line)
    return match["key"] if match and match["sign"] == ":" else ""


def _depth(line: str) -> int:
    """How many more brackets a line opens than it closes."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
    return sum(map(bare.count, "[{")) - sum(map(bare.count, "]}"))


def _unset(line: str, place: int, recipes: Collection[str]) -> str | None:
    """Characters that look like others, and lines that set nothing. `place` is 0 for the first."""
    code, clean = line.strip(), re.sub(f"[{BLANKS}]", " ", line).strip()
    blank = next((f"U+{ord(sign):04X}" for sign in BLANKS if sign in line), "")
    wide = re.match(rf" *(?P<key>[\w.]+) *(?P<sign>{'|'.join(WIDE)})(?P<value>.*)", line)
    rows = (
        (re.match(r" *\t", line), f"YAML does not indent by tabs: write two spaces before {code}"),
        (blank, f"a character that only looks like a space is in it ({blank}): type the line again: {clean}"),
        (wide, wide and f"its {WIDE[wide['sign']]} is another character that looks like it: write "
         f"{wide['key']}: {wide['value'].strip()}"),
        (code.startswith("//"), f"a comment begins with #: write # {code.strip('/ ')}"),
        (code == "---" and place, "--- begins another document: leave it out"),
        (PROGRAMS.match(line), "this is a command: a file has a line for each key, such as epochs: 3"),
        (code in SECTIONS, f"put a colon after it: {code}:"),
        (code in NAMES, f"a colon and a value are missing: write {code}: VALUE"),
        (code in recipes, f"write {EXTENDS}: {code}"),
    )  # fmt: skip
    return next((advice for wrong, advice in rows if wrong), None)


def _written(line: str, above: _Above, number: int) -> str | None:
    """A line that sets a key, or was to set one; remembers it."""
    match = LINE.fullmatch(line)
    if match is None or (match["key"] not in NAMES and not (match["key"] == "recipe" and match["sign"] == "=")):
        return None
    key, sign, value = match["key"], match["sign"], match["rest"].strip()
    if sign == "=":
        words = re.split(r"\s+(?=[\w.]+=)", value)
        if len(words) > 1 and match["before"] == "":
            return f"one key a line, with a colon: write {_as_lines(key, words[0])}"
        return f"a file has a colon where a command has =: write {_as_lines(key, value)}"
    if match["dash"]:
        return f"keys have no dash: write {key}: {value}"
    if value and match["rest"][0] not in " \t":
        return f"put a space after the colon: {key}: {value}"
    value = re.sub(f"^{MARKS}", "", value)
    if value[:1] == "*" and value[1:] in above.named:
        value = ""
    slip = _value(key, value) or (None if "." in key else _place(key, len(match["indent"]), above, number))
    return slip or (_section(key, value) if not match["indent"] else None)


def _as_lines(key: str, value: str) -> str:
    """key=value as a file has it."""
    section, dot, last = key.rpartition(".")
    if key == "recipe":
        return f"{EXTENDS}: {value}"
    return f"{section}: {{{last}: {value}}}" if dot else f"{key}: {value}"


def _section(key: str, value: str) -> str | None:
    """A section with a value of its own."""
    if key not in SECTIONS or not value or value[0] == "{" or value in ("null", "~"):
        return None
    if f"{key}.name" in KEYS:
        return f"{key} is a section: write {key}: {{name: {value}}}"
    return f"{key} is a section: write its keys below it, with two spaces before each"


def _value(key: str, value: str) -> str | None:
    """A value that YAML does not read as it was meant."""
    if not value:
        return None
    first, end, balanced = value[0], value.find(value[0], 1), _depth(value) == 0  # where a quote is closed
    listed = BRACKETED.sub(lambda match: f"'{match[1]}'" if match[1] else match[0], value)
    closed = max(value.rfind("]"), value.rfind("}"))
    second = re.search(r"([\w.]*): ", value) if first not in "'\"[{" else None
    rows = (
        (first in CURLED, f"quotes are straight or left out: write {key}: {value.strip(CURLED)}"),
        (value[-1] == "," and balanced, f"a line ends without a comma: write {key}: {value.rstrip(',; ')}"),
        (value[-1] == ";" and balanced, f"a line ends without a semicolon: write {key}: {value.rstrip(',; ')}"),
        (first in RESERVED, f"put it in quotes: {key}: {_quoted(value)}"),
        (first in "'\"" and end < 0, f"the quote is not closed: write {key}: {value}{first}"),
        (first == "'" and value[end + 1 : end + 2] not in "'\"", f"put all of it in quotes: {key}: "
         f"{_quoted(value.replace(first, ''))}"),
        (first in "[{" and listed != value, f"put what has brackets in it in quotes: {key}: {listed}"),
        (first in "[{" and 0 < closed < len(value) - 1 and balanced, f"put it in quotes: {key}: {_quoted(value)}"),
        (second and second[1] in NAMES, second and f"one key a line: write {value[second.start() :]} in a line of its "
         "own"),
        (second or (value[-1] == ":" and first not in "'\"[{"), f"put a text with a colon in quotes: {key}: "
         f"{_quoted(value)}"),
    )  # fmt: skip
    return next((advice for match, advice in rows if match), None)


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _place(key: str, column: int, above: _Above, number: int) -> str | None:
    """The column that a key begins in, and whether it was there before."""
    within = f"{above.section}.{key}" in KEYS
    if column == 0 and key not in TOP:
        if within:
            return f"{key} belongs to {above.section}: put two spaces before it"
        return None
    if column and not within:
        return f"{key} belongs to no section: write it at the left edge" if key in TOP else None
    if column and above.first[0] and column != above.first[1]:
        line, blanks = above.first
        return f"keys of a section have the same indent: put {blanks} spaces before {key}, as in line {line}"
    seen = above.seen.setdefault((above.section if column else "", key), number)
    if seen != number:
        keep = "put the keys of both below one" if key in SECTIONS and not column else "keep one of them"
        return f"{key} is in line {seen} already: {keep}"
    if column == 0:
        above.section, above.first = (key if key in SECTIONS else ""), (0, 0)
    elif not above.first[0]:
        above.first = (number, column)
    return None
