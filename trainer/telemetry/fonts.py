"""Words on pictures: in a font that has their letters, and cut to the room that there is."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import ImageFont

FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts")
WIDE = re.compile(r"(cjk|fallback|wqy|unifont|noto\w*(jp|kr|sc|tc)\b).*\.(ttf|ttc|otf)$", re.IGNORECASE)
MOST = 3  # of those
UNDRAWN = ("Cc", "Cs", "Zl", "Zp")  # control characters, bytes of no character, and what breaks a line
NOWHERE = "\U0010ffff"  # no letter, so every font has its sign for that instead


def font_for(words: str, size: int) -> tuple[str, Any]:
    """Words as they can be written, and the font for them; a letter that no font has becomes its number (\\u732b)."""
    letters, first = set(words), _first(size)
    if all(_has(first, letter) for letter in letters):
        return words, first
    for face in _others(size):
        if all(_has(face, letter) for letter in letters):
            return words, face
    numbers = {letter: letter.encode("unicode_escape").decode() for letter in letters if not _has(first, letter)}
    return "".join(numbers.get(letter, letter) for letter in words), first


def width(words: str, size: int) -> int:
    """Of words in pixels, as they are written."""
    written, face = font_for(words, size)
    return round(float(face.getlength(written)))


def fit(words: str, size: int, room: float, end: str = "") -> str:
    """Cut words so that they, with an `end` that is never cut, take so many pixels."""
    if width(words + end, size) <= room:
        return words + end
    while words and width(words + "…" + end, size) > room:
        words = words[:-1]
    return words + "…" + end


@cache
def _first(size: int) -> Any:
    """Matplotlib's font, which has the letters of most languages; importing matplotlib for it would take long."""
    package = find_spec("matplotlib")
    for place in (package.submodule_search_locations if package else None) or ():
        with suppress(OSError):
            return ImageFont.truetype(str(Path(place, "mpl-data/fonts/ttf/DejaVuSans.ttf")), size)
    return ImageFont.load_default(size)


@cache
def _others(size: int) -> tuple[Any, ...]:
    """The system's fonts for Chinese, Japanese and Korean."""
    fonts = []
    for path in sorted(_matching())[:MOST]:
        with suppress(OSError):
            fonts.append(ImageFont.truetype(path, size))
    return tuple(fonts)


def _matching() -> Iterator[str]:
    for folder in FOLDERS:
        for place, _, names in os.walk(os.path.expanduser(folder)):
            yield from (os.path.join(place, name) for name in names if WIDE.search(name))


@cache
def _has(face: Any, letter: str) -> bool:
    if unicodedata.category(letter) in UNDRAWN:
        return False
    return letter.isspace() or _drawn(face, letter) != _drawn(face, NOWHERE)


def _drawn(face: Any, letter: str) -> tuple[tuple[int, int], bytes]:
    mask = face.getmask(letter)
    return mask.size, bytes(mask)
