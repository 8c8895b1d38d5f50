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
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import BinaryIO, NamedTuple

from trainer.data.archives.indexes import Archive, ArchiveIndex, Bytes, kept, opened
from trainer.data.folders.scanning import ARRAY, HIDDEN, LINKS, LeftOut, is_junk, readable_suffixes
from trainer.data.photos.stacks import LARGEST
from trainer.errors import SetupError

KIND = b"tar"
IMAGE, CLASS, JSON = ".img", ".cls", ".json"
CLASS_KEYS = ("cls", "label", "class")  # in JSON
LONGEST = 2**20  # bytes of a file that may hold a class
SEVERAL = "{} is of a sample of several images and one class"
WINDOW, ZEROS = 2**14, 2**20  # bytes that are read at once: a header and small files after it; behind the last file


class Member(NamedTuple):
    """A file of a sample."""

    key: str  # of its sample: its path up to the first dot of its name
    suffix: str  # from there on, in small letters
    last: str  # of several suffixes
    name: str
    start: int
    size: int
    text: bytes  # what it holds, where that may be a class


def index(shard: Archive) -> ArchiveIndex:
    """The index of its samples. Raises SetupError, OSError."""
    return kept(shard, "tar " + " ".join(sorted({ARRAY, *readable_suffixes()})), look)


def encoded(shard: Archive, start: int, size: int) -> Bytes:
    """An image's bytes. Raises OSError, ValueError."""
    if size > LARGEST:
        raise ValueError(f"the file is larger than {LARGEST:,} bytes")
    return shard.read(start, size)


def look(shard: Archive) -> ArchiveIndex:
    """Read all headers, and the classes; no image. Raises SetupError, OSError."""
    opened(shard)  # it is a file, and the one that it was
    rows: dict[bytes, tuple[int, int, int, int]] = {}  # start, size, class, folder
    left, texts, below, several = LeftOut(), dict[str, int](), dict[str, int](), list[str]()
    with open(shard.path, "rb", WINDOW) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read-ahead would read images
        try:
            for _, sample in groupby(files_in(file, shard.size, left), lambda each: each.key):
                text, images = understood([*sample], left)
                several += [each.name for each in images[1:] if text is not None]  # of photos it is refused at once
                label = -1 if text is None else texts.setdefault(text, len(texts))
                for image in images:
                    if (name := os.fsencode(image.name)) in rows:
                        raise ValueError(f"{image.name} is in it twice")
                    folder = below.setdefault(image.name.rpartition("/")[0], len(below))
                    rows[name] = (image.start, image.size, label, folder)
            arrays = [name for name in rows if name.lower().endswith(ARRAY.encode())]
            if several and len(arrays) == len(rows):
                raise ValueError(SEVERAL.format(several[0]))
        except ValueError as error:
            advice = "mend it, or leave it out by a pattern, as in data.root='/data/train-*.tar'"
            raise SetupError(f"{shard}: {error}: {advice}") from None
    for name in arrays if len(arrays) < len(rows) else ():  # beside photos they are something else
        del rows[name]
        left.other(os.fsdecode(name))
    return ArchiveIndex.of(rows, [*texts], None, [*below] or [""], dict(left))


def files_in(file: BinaryIO, size: int, left: LeftOut) -> Iterator[Member]:
    """The files of an archive that samples are made of; `left` counts others. Raises ValueError, OSError."""
    for member in members(file, size):
        name = member.name
        if name.startswith((".", "/")) or "/." in name or "//" in name:  # ./cat/1.jpg is cat/1.jpg
            name = posixpath.normpath(name).lstrip("/")
        folder, _, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if not member.isreg():
            left[LINKS] += member.issym() or member.islnk()
        elif is_junk(base):
            left[HIDDEN] += 1
        else:
            suffix, text = dot + suffix.lower(), b""
            last = posixpath.splitext(suffix)[1] if suffix.count(".") > 1 else suffix
            if last in (CLASS, JSON):  # now, while it is in the file's buffer
                file.seek(member.offset_data)
                text = file.read(min(member.size, LONGEST))
            yield Member(f"{folder}/{stem}", suffix, last, name, member.offset_data, member.size, text)


def members(file: BinaryIO, size: int) -> Iterator[tarfile.TarInfo]:
    """All of an archive, in order. Raises ValueError, OSError.

    tarfile takes a damaged header for the end: behind the last file there have to be zeros, and nothing else.
    """
    place = 0
    try:
        archive = tarfile.TarFile(fileobj=file)
        while (member := archive.next()) is not None:
            if member.issparse():
                raise ValueError(f"{member.name} is stored with holes, as by --sparse")
            if "\0" in member.name or not 0 <= member.size <= size - member.offset_data * member.isreg():
                raise ValueError(f"it is cut or damaged at {member.name}")
            yield member
            place = archive.offset
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
    except (tarfile.TarError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is damaged at byte {place:,}, compressed, or not a tar file ({error})") from None
    file.seek(place)
    if {rest.count(0) == len(rest) for rest in iter(lambda: file.read(ZEROS), b"")} != {True}:
        raise ValueError(f"it is cut or damaged at byte {place:,}, or two are joined by cat, as tar -A would")


def understood(sample: list[Member], left: LeftOut) -> tuple[str | None, list[Member]]:
    """A sample's class, None where it has no label, and its images; other files are counted in `left`. Raises
    ValueError."""
    label = None
    for each in sorted(each for each in sample if each.last in (CLASS, JSON)):  # .cls first
        if label is None and (label := class_in(each)) is not None and each.suffix != each.last:
            raise ValueError(f"{each.name} has a class, and is neither NAME{CLASS} nor NAME{JSON} with a dotless NAME")
    images = [each for each in sample if each.suffix == IMAGE or each.last in readable_suffixes()]
    images = images or [each for each in sample if each.last == ARRAY]
    for each in sample:
        if each not in images and not (images and each.suffix in (CLASS, JSON)):
            left.other(each.name)
    if label is not None and len(images) > 1:  # 1.jpg beside 1.mask.png
        whole = [each for each in images if each.suffix == each.last]
        if len(whole) != 1 and images[0].last != ARRAY:
            raise ValueError(SEVERAL.format(sample[0].name))
        images = whole if len(whole) == 1 else images
    return label, images


def class_in(file: Member) -> str | None:
    """The class in a .cls or .json; None of a .json without one. Raises ValueError."""
    with suppress(ValueError, RecursionError):
        facts = json.loads(file.text) if file.last == JSON else {CLASS_KEYS[0]: file.text.decode()}
        if isinstance(facts, dict):
            if not (keys := [key for key in CLASS_KEYS if key in facts]):
                return None
            label, text = facts[keys[0]], str(facts[keys[0]]).strip()
            if isinstance(label, str | int) and not isinstance(label, bool) and len(text.splitlines()) == 1:
                return text
    raise ValueError(f"the class in {file.name} is neither a whole number nor one line of text")
