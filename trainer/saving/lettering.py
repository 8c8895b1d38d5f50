"""Words on pictures: in a font that has their letters, and cut to the room that there is."""

from __future__ import annotations

import os
import re
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
NOWHERE = "\U0010ffff"  # no letter, so every font has its sign for that instead


def set_in(words: str, size: int) -> tuple[str, Any]:
    """Words as they can be written, and the font for them; a letter that no font has becomes its number (\\u732b)."""
    faces = _faces(size)
    letters = set(words)
    for face in faces:
        if all(_has(face, letter) for letter in letters):
            return words, face
    told = {letter: letter.encode("unicode_escape").decode() for letter in letters if not _has(faces[0], letter)}
    return "".join(told.get(letter, letter) for letter in words), faces[0]


def width(words: str, size: int) -> int:
    """Of words in pixels, as they are written."""
    written, face = set_in(words, size)
    return round(float(face.getlength(written)))


def fit(words: str, size: int, room: float, end: str = "") -> str:
    """Cut words so that they, with an `end` that is never cut, take so many pixels."""
    if width(words + end, size) <= room:
        return words + end
    while words and width(words + "…" + end, size) > room:
        words = words[:-1]
    return words + "…" + end


@cache
def _faces(size: int) -> tuple[Any, ...]:
    """Matplotlib's font, which has the letters of most languages, then the system's for Chinese, Japanese, Korean.

    Matplotlib is not imported for it, which takes long.
    """
    found = []
    package = find_spec("matplotlib")
    for place in (package.submodule_search_locations if package else None) or ():
        with suppress(OSError):
            found.append(ImageFont.truetype(str(Path(place, "mpl-data/fonts/ttf/DejaVuSans.ttf")), size))
    for path in _wide():
        with suppress(OSError):
            found.append(ImageFont.truetype(path, size))
    return tuple(found) or (ImageFont.load_default(size),)


@cache
def _wide() -> tuple[str, ...]:
    return tuple(sorted(_matching()))[:MOST]


def _matching() -> Iterator[str]:
    for folder in FOLDERS:
        for place, _, names in os.walk(os.path.expanduser(folder)):
            yield from (os.path.join(place, name) for name in names if WIDE.search(name))


@cache
def _has(face: Any, letter: str) -> bool:
    return letter.isspace() or _drawn(face, letter) != _drawn(face, NOWHERE)


def _drawn(face: Any, letter: str) -> tuple[tuple[int, int], bytes]:
    mask = face.getmask(letter)
    return mask.size, bytes(mask)
