"""Tar files of encoded images: their samples, by WebDataset's conventions, and where their bytes are.

A sample is consecutive files with the same name up to the first dot: 0001.jpg and 0001.cls. Its class is the text in
.cls, or `label`, `cls` or `class` in .json; of a sample with another label none is guessed. Where there are none, every
image is a sample, and its class is its folder.
"""

from __future__ import annotations

import json
import os
import posixpath
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from trainer.data.folders.scanning import NEEDS, is_junk, readable_suffixes
from trainer.data.photos.decoding import LARGEST
from trainer.data.shards.indexes import Bytes, Contents, ShardFile, ShardIndex, kept, opened
from trainer.errors import SetupError

KIND = b"tar"
IMAGE, CLASS, JSON = ".img", ".cls", ".json"
CLASS_KEYS = ("cls", "label", "class")  # in JSON
LONGEST = {CLASS: 4096, JSON: 2**20}  # bytes of files that may hold a class
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")  # first bytes of such files
WINDOW, ZEROS = 2**14, 2**20  # bytes that are read at once: a header and small files after it; behind the last file


class BrokenError(Exception):
    """The archive is damaged, or images cannot be read from it; the text says how."""


def index(shard: ShardFile) -> ShardIndex:
    """The index of its samples. Raises SetupError, OSError."""
    return kept(shard, "tar " + " ".join(sorted(readable_suffixes())), look)


def encoded(shard: ShardFile, start: int, size: int) -> Bytes:
    """An image's bytes. Raises OSError, ValueError."""
    if size > LARGEST:
        raise ValueError(f"the file is larger than {LARGEST:,} bytes")
    return shard.read(start, size)


def look(shard: ShardFile) -> ShardIndex:
    """Read all headers, and the classes; no image."""
    opened(shard)  # it is a file, and the one that it was
    with open(shard.path, "rb", WINDOW) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read-ahead would read images
        if file.read(8).startswith(COMPRESSED):
            raise SetupError(f"{shard} is compressed, and images are read from the middle of shards: unpack it to .tar")
        file.seek(0)
        samples, broken = Samples(file), ""
        try:
            for member in members(file, shard.size):
                samples.add(member)
        except BrokenError as error:
            broken = str(error)
        return samples.index(broken)


def members(file: BinaryIO, size: int) -> Iterator[tarfile.TarInfo]:
    """All of an archive, in order. Raises BrokenError, OSError.

    tarfile takes a damaged header for the end: behind the last file there have to be zeros, and nothing else.
    """
    place = 0
    try:
        archive = tarfile.TarFile(fileobj=file)
        while (member := archive.next()) is not None:
            if "\0" in member.name:
                raise BrokenError(f"it is damaged at byte {member.offset:,}, in a name")
            if member.issparse():
                raise BrokenError(f"{member.name} in it is stored with holes: make the tar anew without --sparse")
            if member.isreg() and not 0 <= member.size <= size - member.offset_data:
                raise BrokenError(f"it ends in the middle of {member.name}, at byte {size:,}")
            yield member
            place = archive.offset
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        where = f"it is damaged at byte {place:,}" if place or size < tarfile.BLOCKSIZE else "it is not a tar file"
        raise BrokenError(f"{where} ({error})") from None
    file.seek(place)
    rest = file.read(tarfile.BLOCKSIZE)
    if not rest:
        raise BrokenError("it has no end mark, so that files may be missing")
    while rest:
        if rest.count(0) < len(rest):
            raise BrokenError(f"it is damaged at byte {place:,}, or two are joined by cat: tar -A joins them")
        rest = file.read(ZEROS)


class Samples:
    """Collects the samples of a tar from its members."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._key = ""
        self._sample: list[tuple[str, str, tarfile.TarInfo]] = []  # of the current one: suffixes, names and files
        self._metadata: dict[str, bytes] = {}  # the contents of its .cls and .json, by name
        self._rows: dict[str, tuple[int, int, int, int]] = {}  # start, size, class, folder
        self._texts: dict[str, int] = {}
        self._below: dict[str, int] = {}
        self._left: Counter[str] = Counter()
        self._wrong: dict[str, tuple[int, str]] = {}

    def add(self, member: tarfile.TarInfo) -> None:
        name = tidied(member.name)
        folder, _, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if not member.isreg():
            self._left["links"] += member.issym() or member.islnk()
        elif is_junk(base):
            self._left["hidden"] += 1
        else:
            if self._key != (key := f"{folder}/{stem}"):
                self._end()
                self._key = key
            suffix = dot + suffix.lower()
            self._sample.append((suffix, name, member))
            if (longest := LONGEST.get(_last(suffix))) is not None:  # now, while it is in the file's buffer
                self._file.seek(member.offset_data)
                self._metadata[name] = self._file.read(min(member.size, longest + 1))

    def index(self, broken: str) -> ShardIndex:
        """Of all samples; `broken` says why the tar could not be read on: the last sample may then be incomplete."""
        if not broken or not self._texts:
            self._end()
        contents = Contents([*self._texts], None, [*self._below] or [""], dict(self._left), self._wrong, broken)
        starts, sizes, labels, folders = zip(*self._rows.values(), strict=True) if self._rows else ((),) * 4
        return ShardIndex.of(map(os.fsencode, self._rows), zip(starts, sizes, strict=True), labels, folders, contents)

    def _refuse(self, why: str, name: str) -> None:
        count, first = self._wrong.get(why, (0, name))
        self._wrong[why] = (count + 1, first)

    def _end(self) -> None:
        """Add the current sample."""
        sample, texts = self._sample, self._metadata
        self._sample, self._metadata = [], {}
        try:
            label = label_of([(suffix, name, texts[name]) for suffix, name, _ in sample if name in texts])
        except ValueError as error:
            return self._refuse(*error.args)
        has_class = label is not None or any(suffix == CLASS for suffix, *_ in sample)
        images = [each for each in sample if each[0] == IMAGE or _last(each[0]) in readable_suffixes()]
        for suffix, *_ in (each for each in sample if each not in images and each[0] not in (CLASS, JSON)):
            self._left[_last(suffix) or "without a suffix"] += 1
        if len(images) > 1 and has_class:  # 1.jpg beside 1.mask.png
            images = [each for each in images if each[0].count(".") == 1] or images
            if len(images) > 1:
                return self._refuse("several images and one class", self._key.lstrip("/"))
        if not images and has_class and not any(_last(suffix) in NEEDS for suffix, *_ in sample):
            self._refuse("a class and no image", self._key.lstrip("/"))
        for _, name, member in images:
            self._keep(name, member, label)

    def _keep(self, name: str, member: tarfile.TarInfo, text: str | None) -> None:
        if not member.size:
            self._left["empty"] += 1
        elif name in self._rows:
            self._refuse("the same name as another one", name)
        else:
            label = -1 if text is None else self._texts.setdefault(text, len(self._texts))
            below = self._below.setdefault(name.rpartition("/")[0], len(self._below))
            self._rows[name] = (member.offset_data, member.size, label, below)


def label_of(metadata: list[tuple[str, str, bytes]]) -> str | None:
    """A sample's class, by the suffixes, names and contents of its files; None where it has no label. Raises
    ValueError(what is wrong, name)."""
    for suffix, name, raw in sorted(metadata, key=lambda each: (each[0] != CLASS, each[0] != JSON)):
        if (label := class_in(suffix, name, raw)) is not None:
            if suffix not in (CLASS, JSON):
                raise ValueError("a class in neither NAME.cls nor NAME.json, where NAME ends at its first dot", name)
            return label
    return None


def class_in(suffix: str, name: str, raw: bytes) -> str | None:
    """The class in such a file; None of a .json without one. Raises ValueError(what is wrong, name)."""
    label: Any = None
    if len(raw) <= LONGEST[_last(suffix)]:
        with suppress(ValueError, RecursionError):
            facts = json.loads(raw) if _last(suffix) == JSON else {CLASS_KEYS[0]: raw.decode()}
            keys = [key for key in CLASS_KEYS if key in facts] if isinstance(facts, dict) else []
            if not keys and isinstance(facts, dict | list):
                return None
            label = facts[keys[0]] if keys else None
    text = str(label).strip() if isinstance(label, str | int) and not isinstance(label, bool) else ""
    if len(text.splitlines()) != 1:
        raise ValueError("a class that is neither a whole number nor one line of text", name)
    return text


def tidied(name: str) -> str:
    """A member's name, normalised where it has to be: ./cat/1.jpg is cat/1.jpg."""
    return posixpath.normpath(name).lstrip("/") if name.startswith((".", "/")) or "/." in name or "//" in name else name


def _last(suffix: str) -> str:
    return posixpath.splitext(suffix)[1] if suffix.count(".") > 1 else suffix
