"""Tar files of encoded images: their samples, by WebDataset's conventions, and where their bytes are.

A sample is consecutive files with the same name up to the first dot: 0001.jpg and 0001.cls. Its class is the text in
.cls, or `label`, `cls` or `class` in .json; of a sample with another label none is guessed. Where there are none, every
image is a sample, and its class is its folder.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trainer.data.folders.scanning import NEEDS, is_junk, readable_suffixes
from trainer.data.photos.decoding import LARGEST
from trainer.data.shards.indexes import Bytes, Contents, ShardFile, ShardIndex, kept, opened
from trainer.data.shards.tar_headers import BrokenError, Member, Window, members
from trainer.errors import SetupError

KIND = b"tar"
IMAGE, CLASS, JSON = ".img", ".cls", ".json"
CLASS_KEYS = ("cls", "label", "class")  # in JSON
LONGEST = {CLASS: 4096, ".class": 4096, ".label": 4096, JSON: 2**20}  # bytes of files that may hold a class
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")  # first bytes of such files


def index(shard: ShardFile) -> ShardIndex:
    """The index of its samples. Raises SetupError, OSError."""
    return kept(shard, "tar " + " ".join(sorted(readable_suffixes())), look)


def encoded(shard: ShardFile, start: int, size: int) -> Bytes:
    """An image's bytes. Raises OSError, ValueError."""
    if size > LARGEST:
        raise ValueError(f"the file is larger than {LARGEST:,} bytes")
    return shard.read(start, size)


def look(shard: ShardFile) -> ShardIndex:
    """Read all headers, and the classes."""
    file = opened(shard)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # read-ahead would read images
    window = Window(file.descriptor, shard.size)
    if window.read(0, 8).startswith(COMPRESSED):
        raise SetupError(f"{shard} is compressed, and images are read from the middle of shards: unpack it to .tar")
    samples, broken = Samples(window), ""
    try:
        for member in members(window):
            samples.add(member)
    except BrokenError as error:
        broken = str(error)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    return samples.index(broken)


class Samples:
    """Collects the samples of a tar from its members."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._key = ""
        self._sample: list[tuple[str, Member]] = []  # suffixes and files of the current sample
        self._metadata: dict[str, bytes] = {}  # the contents of its .cls and .json, by suffix
        self._names: dict[str, tuple[int, int, int, int]] = {}  # start, size, class, folder
        self._texts: dict[str, int] = {}
        self._below: dict[str, int] = {}
        self._others: Counter[str] = Counter()
        self._wrong: dict[str, tuple[int, str]] = {}
        self._contents = Contents([])

    def add(self, member: Member) -> None:
        folder, _, base = tidied(member.name).rpartition("/")
        key, dot, suffix = base.partition(".")
        if not member.is_file:
            self._count(links=member.is_link)
        elif is_junk(base):
            self._count(hidden=1)
        else:
            key = f"{folder}/{key}"
            if key != self._key:
                self._end()
                self._key = key
            suffix = dot + suffix.lower()
            self._sample.append((suffix, member))
            if (longest := LONGEST.get(_last(suffix))) is not None:  # now, while it is in the window's buffer
                self._metadata[suffix] = self._window.read(member.start, min(member.size, longest + 1))

    def index(self, broken: str) -> ShardIndex:
        """Of all samples; `broken` says why the tar could not be read on: the last sample may then be incomplete."""
        if not broken or not self._texts:
            self._end()
        contents = replace(
            self._contents,
            texts=[*self._texts],
            below=[*self._below] or [""],
            others=dict(self._others),
            wrong=self._wrong,
            broken=broken,
        )
        rows = [*self._names.values()]
        return ShardIndex.of(
            map(os.fsencode, self._names),
            ((start, size) for start, size, _, _ in rows),
            (label for _, _, label, _ in rows),
            (folder for _, _, _, folder in rows),
            contents,
        )

    def _count(self, **more: int) -> None:
        contents = self._contents
        self._contents = replace(contents, **{key: getattr(contents, key) + n for key, n in more.items()})

    def _refuse(self, why: str, name: str) -> None:
        count, first = self._wrong.get(why, (0, name))
        self._wrong[why] = (count + 1, first)

    def _end(self) -> None:
        """Add the current sample."""
        sample, texts = self._sample, self._metadata
        self._sample, self._metadata = [], {}
        images = [member for suffix, member in sample if suffix == IMAGE or _last(suffix) in readable_suffixes()]
        try:
            label = label_of(texts)
        except ValueError as error:
            name = next(member.name for suffix, member in sample if suffix == error.args[1])
            return self._refuse(error.args[0], tidied(name))
        is_sample = any(suffix == CLASS for suffix, _ in sample) or label is not None
        kept = {member.start for member in images}
        for suffix, member in sample:
            if suffix not in (CLASS, JSON) and member.start not in kept:
                self._others[_last(suffix) or "without a suffix"] += 1
        if len(images) > 1 and is_sample:
            whole = [member for suffix, member in sample if suffix == IMAGE or suffix in readable_suffixes()]
            images = whole or images  # 1.jpg beside 1.mask.png
            if len(images) > 1:
                return self._refuse("several images and one class", self._key.lstrip("/"))
        if not images and is_sample and not any(_last(suffix) in NEEDS for suffix, _ in sample):
            self._refuse("a class and no image", self._key.lstrip("/"))
        for member in images:
            self._keep(member, label)

    def _keep(self, member: Member, text: str | None) -> None:
        name = tidied(member.name)
        if not member.size:
            self._count(empty=1)
        elif name in self._names:
            self._refuse("the same name as another one", name)
        else:
            label = -1 if text is None else self._texts.setdefault(text, len(self._texts))
            below = self._below.setdefault(name.rpartition("/")[0], len(self._below))
            self._names[name] = (member.start, member.size, label, below)


def label_of(texts: Mapping[str, bytes]) -> str | None:
    """A sample's class, by its metadata; None where it has no label. Raises ValueError(what is wrong, suffix)."""
    for suffix in sorted(texts, key=lambda suffix: (suffix != CLASS, suffix != JSON)):
        if (label := class_in(suffix, texts[suffix])) is not None:
            if suffix not in (CLASS, JSON):
                raise ValueError("a class in neither NAME.cls nor NAME.json, where NAME ends at its first dot", suffix)
            return label
    return None


def class_in(suffix: str, raw: bytes) -> str | None:
    """The class in such a file; None of a .json without one. Raises ValueError(what is wrong, suffix)."""
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
        raise ValueError("a class that is neither a whole number nor one line of text", suffix)
    return text


def tidied(name: str) -> str:
    """A member's name, normalised where it has to be: ./cat/1.jpg is cat/1.jpg."""
    return posixpath.normpath(name).lstrip("/") if name.startswith((".", "/")) or "/." in name or "//" in name else name


def _last(suffix: str) -> str:
    return posixpath.splitext(suffix)[1] if suffix.count(".") > 1 else suffix
