"""The members of a tar file by its headers: one pass that reads no image.

Reads the pax format of POSIX and GNU tar's. Where an archive is damaged, the members before that are given.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
WINDOW = 2**14  # bytes that are read at once: a header and small files after it
ZEROS = 2**20
DIGITS = 20  # of a size, at most
LONGEST = 2**20  # bytes of a name or a pax header
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
BARE = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}


class BrokenError(Exception):
    """The archive is damaged, or images cannot be read from it; the text says how."""


class Member(NamedTuple):
    """A file, folder or link of an archive."""

    name: str
    kind: bytes  # tar's type flag
    start: int  # of its bytes
    size: int

    @property
    def is_file(self) -> bool:
        return self.kind in tarfile.REGULAR_TYPES

    @property
    def is_link(self) -> bool:
        return self.kind in (tarfile.LNKTYPE, tarfile.SYMTYPE)


class Window:
    """Reads a file in pieces, with a buffer for small pieces behind one another."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size, self._descriptor, self._start, self._data = size, descriptor, 0, b""

    def read(self, start: int, count: int) -> bytes:
        """Fewer bytes where the file ends."""
        offset = start - self._start
        if offset < 0 or offset + count > len(self._data):
            self._data, self._start, offset = os.pread(self._descriptor, max(count, WINDOW), start), start, 0
        return self._data[offset : offset + count]


def members(window: Window) -> Iterator[Member]:
    """All of them, in order, of concatenated archives too. Raises BrokenError, OSError."""
    place, ended = 0, False
    common: dict[str, str] = {}
    member: dict[str, str] = {}
    while place < window.size:
        head = window.read(place, BLOCK)
        ended = head.count(0) == len(head)
        if ended:
            place = _behind_zeros(window, place)
            continue
        if len(head) < BLOCK:
            raise BrokenError(f"it ends in the middle of a header, at byte {window.size:,}")
        name, kind, size = _header(head, place)
        place += BLOCK
        if kind in NAMES or kind in PAX or kind == tarfile.XGLTYPE:
            text = _text(window, place, size)
            if kind in NAMES:
                member.setdefault(NAMES[kind], os.fsdecode(text.rstrip(b"\0")))
            elif kind == tarfile.XGLTYPE:
                common |= pax(text)
            else:
                member |= pax(text)
            place += _whole(size)
            continue
        if common or member:
            more, member = {**common, **member}, {}
            name = more.get("GNU.sparse.name", more.get("path", name))
            if any(key.startswith("GNU.sparse.") for key in more):
                kind = tarfile.GNUTYPE_SPARSE
            if (digits := more.get("size", "")).isdecimal():
                if len(digits) > DIGITS:
                    raise BrokenError("it is damaged in a pax header")
                size = int(digits)
        if kind == tarfile.GNUTYPE_SPARSE:
            raise BrokenError(f"{name} in it is stored with holes: make the tar anew without --sparse")
        if kind in BARE:
            size = 0
        if place + size > window.size:
            raise BrokenError(f"it ends in the middle of {name}, at byte {window.size:,}")
        yield Member(name, kind, place, size)
        place += _whole(size)
    if not ended:
        raise BrokenError("it has no end mark, so that files may be missing" if place else "it is empty")


def _header(head: bytes, place: int) -> tuple[str, bytes, int]:
    """Name, kind and size, once the checksum is right: the sum of all bytes, with blanks in place of itself."""
    try:
        size = _number(head[124:136])
        right = size >= 0 and _number(head[148:156]) == sum(head) - sum(head[148:156]) + 8 * ord(" ")
    except ValueError:
        right = False
    if not right:
        raise BrokenError(f"it is damaged at byte {place:,}" if place else "it is not a tar file")
    name, kind = head[:100].partition(b"\0")[0], head[156:157]
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    if name.endswith(b"/") and kind in tarfile.REGULAR_TYPES:  # old tars have no flag for folders
        kind = tarfile.DIRTYPE
    return os.fsdecode(prefix + b"/" + name if prefix else name), kind, size


def _number(field: bytes) -> int:
    """In octal digits, or in binary where those are too few."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _whole(size: int) -> int:
    """Rounded up to full blocks."""
    return -(-size // BLOCK) * BLOCK


def _text(window: Window, place: int, size: int) -> bytes:
    if size > LONGEST:
        raise BrokenError(f"it is damaged at byte {place - BLOCK:,}")
    text = window.read(place, size)
    if len(text) < size:
        raise BrokenError(f"it ends in the middle of a header, at byte {window.size:,}")
    return text


def pax(text: bytes) -> dict[str, str]:
    """The values of a pax header: lines of "length key=value", with the length in bytes. Raises BrokenError."""
    values, place = {}, 0
    while place < len(text) and text[place]:
        length, _, _ = text[place : place + 20].partition(b" ")
        if not length.isdigit() or int(length) <= len(length) or place + int(length) > len(text):
            raise BrokenError("it is damaged in a pax header")
        line = text[place + len(length) + 1 : place + int(length) - 1]
        key, _, value = line.partition(b"=")
        values[os.fsdecode(key)] = os.fsdecode(value)
        place += int(length)
    return values


def _behind_zeros(window: Window, place: int) -> int:
    """The next block that is not all zeros, or the end."""
    while place < window.size:
        zeros = window.read(place, ZEROS)
        rest = zeros.lstrip(b"\0")
        if rest or not zeros:
            return place + (len(zeros) - len(rest)) // BLOCK * BLOCK if rest else window.size
        place += len(zeros)
    return place
