"""Words of the command line as key=value: options with dashes, blanks around "=", pairs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.cli.known_keys import EVERY_WORD, is_name, is_path_or_text, our_name
from trainer.recipe.reflection import choices, defaults

DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"  # pages and word processors make others of a hyphen
QUOTES = "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}\N{DOUBLE LOW-9 QUOTATION MARK}"
QUOTES += "\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}`"
FLAGS = ("--help", "-h", "--json", "--go", "--version", "-V")  # ours, as they are


@dataclass(frozen=True)
class Word:
    """What was typed, and what it says."""

    typed: str  # as it was typed, several words joined by spaces
    key: str = ""  # what it sets; empty where it sets nothing
    value: str = ""
    fine: bool = True  # it is accepted as typed; otherwise an error says how it is written

    @property
    def text(self) -> str:
        return f"{self.key}={self.value}" if self.key else self.typed


def tidied(words: Sequence[str]) -> list[str]:
    """The words without blanks around them, and without the line ends of a script that Windows wrote.

    Blanks at the end of a value stay, and those of a file that is there.
    """
    kept = [word for word in words if not word or word.strip(" \t\r\n,;")]
    bare = (word.lstrip().rstrip("\r") if "=" in word else word.strip() for word in kept)
    return [word if os.path.lexists(word) else tidy for word, tidy in zip(kept, bare, strict=True)]


def spelled(words: Sequence[str]) -> list[Word]:
    """The words as key=value, from words with dashes, spaces and quotes.

    Taken as they are: `--key=value`, `--key value`, `key = value`, and dashes within a key. Not so, for these are slips
    or another program's way: `key value`, `key: value`, `--flag`, `+key=value`, capitals, printers' quotes.
    """
    read, rest = [], list(words)
    while rest:
        word, count = _taken(rest[0], rest[1:])
        read.append(word)
        rest = rest[1 + count :]
    return read


def _taken(word: str, rest: Sequence[str]) -> tuple[Word, int]:
    """A word with those after it that belong to it, and how many these are."""
    following = rest[0] if rest else ""
    if word in FLAGS or not word.strip(DASHES):
        return Word(word), 0
    if word[0] in "\"'" and word[-1] == word[0] and "=" in word:
        key, _, value = word[1:-1].partition("=")
        return _set(word, key, value, fine=False), 0
    opened = "=[" in word and "]" not in word and not is_path_or_text(_name(word.partition("=")[0]))
    closes = next((count for count, later in enumerate(rest, 1) if later.endswith("]")), 0) if opened else 0
    if closes and not any("=" in later for later in rest[:closes]):
        typed = " ".join((word, *rest[:closes]))
        listed = re.sub(r"\[,|,\]", lambda match: match[0].strip(","), re.sub(r"[\s,]+", ",", typed))
        key, _, value = listed.partition("=")
        return _set(typed, key, value, fine=False), closes
    if following == "=" and len(rest) > 1 and "=" not in word:
        return _set(f"{word} = {rest[1]}", word, rest[1]), 2
    if re.match("=[^=]", following) and "=" not in word:
        return _set(f"{word} {following}", word, following[1:]), 1
    if word[0] in DASHES:
        return _option(word, rest)
    if word[0] == "~" and (name := _name(word)) in defaults():  # as hydra leaves a key out
        return Word(word, name, "false" if choices().get(name, ())[:2] == ("true", "false") else "none", fine=False), 0
    key, equals, value = word.partition("=")
    if equals and not value and _bare(following) and is_name(_name(key)):
        return _set(f"{word} {following}", key, following), 1
    if equals:
        return _set(word, key, value), 0
    key, colon, value = word.partition(":")
    if colon and len(key) > 1 and is_name(_name(key)) and (value or _bare(following)):
        typed = word if value else f"{word} {following}"
        return _set(typed, key, value or following, fine=False), int(not value)
    pair = len(word) > 1 and is_name(_name(word)) and _bare(following) and not is_name(_name(following))
    if pair and not os.path.exists(word):
        return _set(f"{word} {following}", word, following, fine=False), 1
    return Word(word), 0


def _option(word: str, rest: Sequence[str]) -> tuple[Word, int]:
    following = rest[0] if rest else ""
    key, equals, value = word.partition("=")
    if equals:
        return _set(word, key, value), 0
    attached = re.fullmatch(r"-([A-Za-z])(\d[\w.]*)", word)  # -j4
    if attached and is_name(attached[1]):
        return _set(word, attached[1], attached[2], fine=False), 0
    name = _name(word)
    sizes = list(itertools.takewhile(str.isdigit, rest)) if our_name(name, ()) == "data.image_size" else []
    if len(sizes) > 1:  # --input-size 3 224 224
        return _set(" ".join((word, *sizes)), word, ",".join(sizes), fine=False), len(sizes)
    if _bare(following) and choices().get(name, ())[:2] != ("true", "false"):
        return _set(f"{word} {following}", word, following), 1
    if name.startswith("no_") and is_name(name[3:]):
        return Word(word, name[3:], "false", fine=False), 0
    if (name in defaults() and choices().get(name, ())[:2] != ("true", "false")) or name in EVERY_WORD:
        return Word(word), 0  # a value is missing
    return Word(word, name, "true", fine=False), 0


def _set(typed: str, key: str, value: str, fine: bool = True) -> Word:
    bare = key.lstrip(DASHES).replace("-", "_")
    name = _name(key)
    dotted = re.sub(r"\]?[\[/:]|__", ".", name).rstrip("]")
    group = re.fullmatch(r"\w\w+(/\w\w+)+", name) and "." not in value  # hydra/launcher=slurm, no file
    if dotted != name and (group or is_name(dotted)):  # optimizer/lr, optimizer[lr], optimizer__lr
        name = dotted
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name):
        return Word(typed)
    kept = value
    if not is_path_or_text(name):
        kept = kept.strip(QUOTES).lstrip("=").rstrip(",;") if not value.startswith(("[", "{", "'", '"')) else value
    elif len(value) > 1 and value[0] in QUOTES and value[-1] in QUOTES:
        kept = value[1:-1]
    return Word(typed, name, kept, fine and (bare, value) == (name, kept))


def _name(key: str) -> str:
    """A key in our spelling: without dashes, spaces, quotes, plus signs of hydra and capitals."""
    name = key.strip(QUOTES).lstrip(DASHES + "+~/").replace("-", "_").strip(QUOTES + "'\"")
    return name.lower() if name not in defaults() and is_name(name.lower()) else name


def _bare(word: str) -> bool:
    """Whether a word can be the value of the one before it."""
    return bool(word) and "=" not in word and (word[0] not in DASHES or word[1:2].isdigit())
