"""The members of a tar file by its headers: one pass that reads no image.

Read as POSIX's pax and GNU tar write them. Where the archive stops being one is said, and what comes before is told.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
WINDOW = 2**14  # bytes that are read at once: a header and the small files around it
ZEROS = 2**20
LONGEST = 2**20  # bytes of a name or of what pax tells of a file
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}


class BrokenError(Exception):
    """The archive is not whole, or not one that images can be read from; the text says how."""


class Member(NamedTuple):
    """A file, folder or link of an archive.

    Attributes:
        kind: as tar writes it; `is_file` tells what matters.
        start, size: of its bytes.
    """

    name: str
    kind: bytes
    start: int
    size: int

    @property
    def is_file(self) -> bool:
        return self.kind in tarfile.REGULAR_TYPES

    @property
    def is_link(self) -> bool:
        return self.kind in (tarfile.LNKTYPE, tarfile.SYMTYPE)


class Window:
    """A file that is read here and there, and often just behind where it was read before."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self._descriptor, self._start, self._data = size, descriptor, 0, b""

    def read(self, start: int, count: int) -> bytes:
        """Fewer bytes where the file ends."""
        offset = start - self._start
        if offset < 0 or offset + count > len(self._data):
            self._data, self._start, offset = os.pread(self._descriptor, max(count, WINDOW), start), start, 0
        return self._data[offset : offset + count]


def members(window: Window) -> Iterator[Member]:
    """All of them, in order; of archives that were put behind one another, all as well.

    Raises:
        BrokenError: from there on nothing can be told.
        OSError: it cannot be read.
    """
    place = 0
    common: dict[str, str] = {}
    own: dict[str, str] = {}
    while place < window.size:
        head = window.read(place, BLOCK)
        if head.count(0) == len(head):
            place = _behind_zeros(window, place)
            continue
        if len(head) < BLOCK:
            raise BrokenError(f"it ends in the middle of a header, at byte {window.size:,}")
        try:
            told = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            raise BrokenError(f"it is damaged at byte {place:,}" if place else "it is not a tar file") from None
        place += BLOCK
        if told.type in NAMES or told.type in PAX or told.type == tarfile.XGLTYPE:
            text = _text(window, place, told)
            if told.type in NAMES:
                own.setdefault(NAMES[told.type], os.fsdecode(text.rstrip(b"\0")))
            elif told.type == tarfile.XGLTYPE:
                common |= pax(text)
            else:
                own |= pax(text)
            place += _whole(told.size)
            continue
        more, own = {**common, **own}, {}
        name = more.get("path", told.name)
        if told.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in more):
            raise BrokenError(f"{name} in it is stored with holes: make the tar anew without --sparse")
        size = _size(more, told) if told.isreg() or told.type not in tarfile.SUPPORTED_TYPES else 0
        if place + size > window.size:
            raise BrokenError(f"it ends in the middle of {name}, at byte {window.size:,}")
        yield Member(name, told.type, place, size)
        place += _whole(size)


def _whole(size: int) -> int:
    """Bytes in full blocks."""
    return -(-size // BLOCK) * BLOCK


def _size(more: dict[str, str], told: tarfile.TarInfo) -> int:
    text = more.get("size", str(told.size))
    if not text.isascii() or not text.isdigit():  # a number may be below 0 in GNU's way of writing it
        raise BrokenError(f"{told.name} in it has a size that makes no sense")
    return int(text)


def _text(window: Window, place: int, told: tarfile.TarInfo) -> bytes:
    if not 0 <= told.size <= LONGEST:
        raise BrokenError(f"it is damaged at byte {place - BLOCK:,}")
    text = window.read(place, told.size)
    if len(text) < told.size:
        raise BrokenError(f"it ends in the middle of a header, at byte {window.size:,}")
    return text


def pax(text: bytes) -> dict[str, str]:
    """What a pax header says: lines of "length key=value", of which the length is one of bytes.

    Raises:
        BrokenError: it says something else.
    """
    found, place = {}, 0
    while place < len(text) and text[place]:
        length, _, _ = text[place : place + 20].partition(b" ")
        if not length.isdigit() or int(length) <= len(length) or place + int(length) > len(text):
            raise BrokenError("it is damaged in a pax header")
        line = text[place + len(length) + 1 : place + int(length) - 1]
        key, _, value = line.partition(b"=")
        found[os.fsdecode(key)] = os.fsdecode(value)
        place += int(length)
    return found


def _behind_zeros(window: Window, place: int) -> int:
    """Where the next block begins that is not all zeros, or the end."""
    while place < window.size:
        zeros = window.read(place, ZEROS)
        rest = zeros.lstrip(b"\0")
        if rest or not zeros:
            return place + (len(zeros) - len(rest)) // BLOCK * BLOCK if rest else window.size
        place += len(zeros)
    return place
