"""The contents of folders of photos: class folders, their images in order, and files that are left out, by reason."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from PIL import Image

from trainer.data.class_names import class_names
from trainer.data.photos.decoding import formats
from trainer.errors import SetupError

JUNK = (  # in small letters
    *("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "@eadir", "$recycle.bin"),
    *("system volume information", "lost+found"),
)
NEEDS = {  # what it takes to read other kinds of photos
    **dict.fromkeys((".heic", ".heif", ".heics", ".heifs", ".hif"), "pip install pillow-heif"),
    **dict.fromkeys((".avif", ".webp"), "pip install --upgrade pillow"),
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"), "export them as JPEG"),
    **dict.fromkeys((".svg", ".psd", ".pdf", ".eps", ".ai", ".jxl", ".tga"), "export them as PNG"),
}
ASKED = 50_000  # files of which the size is looked up: it takes long on a network file system


class LeftOut:
    """Counts the files that are not read, by reason.

    Attributes:
        junk: hidden files and folders of other programs.
        empty: image files of no bytes.
        broken: links to images that do not exist.
        loose: images beside the folders of classes.
        links: in shards.
        classes: folders that are read, as they are called.
    """

    def __init__(self, empty: bool = True) -> None:
        """`empty`: look for files of no bytes, and for broken links."""
        self.looks = empty
        self.asked = 0 if empty else ASKED  # files of which the size was looked up
        self.junk: list[str] = []
        self.empty = self.broken = self.loose = self.links = 0
        self.classes: list[str] = []
        self._kinds: Counter[str] = Counter()  # photos that cannot be read here, by suffix
        self._others: Counter[str] = Counter()

    def other(self, name: str) -> None:
        """A file that is not an image, or cannot be read here."""
        suffix = os.path.splitext(name)[1]
        (self._kinds if suffix.lower() in NEEDS else self._others)[suffix or "without a suffix"] += 1

    def inside(self, left: Mapping[str, int]) -> None:
        """Files in a shard: hidden, empty and links, and others by suffix."""
        for kind, count in left.items():
            if kind == "hidden":
                self.junk += ["in shards"] * count
            elif kind in ("empty", "links"):
                setattr(self, kind, getattr(self, kind) + count)
            else:
                (self._kinds if kind in NEEDS else self._others)[kind] += count

    def in_words(self) -> str:
        """In one line; empty where there are none."""
        parts = [f"{_files(count, kind)}: {NEEDS[kind.lower()]}" for kind, count in self._kinds.items()]
        if self.loose:
            parts.append(f"{self.loose} image{'s' * (self.loose > 1)} outside the class folders")
        if self.empty:
            parts.append(_files(self.empty, "empty"))
        if self.broken:
            parts.append(f"{self.broken} link{'s' * (self.broken > 1)} to files that are not there")
        if self.links:
            parts.append(f"{self.links} link{'s' * (self.links > 1)} in shards")
        if self.junk:
            named = ", ".join(sorted(set(self.junk))[:4])
            parts.append(f"{len(self.junk)} hidden file{'s' * (len(self.junk) > 1)} of other programs ({named})")
        if self._others:
            named = ", ".join(sorted(self._others, key=lambda kind: (-self._others[kind], kind))[:4])
            parts.append(f"{_files(self._others.total(), 'other')} ({named})")
        return "; ".join(parts)

    def in_brackets(self) -> str:
        return f" ({self.in_words()})" if self.in_words() else ""

    def notes(self) -> dict[str, str]:
        """For a run's banner."""
        notes = class_names(self.classes).notes
        return {"ignored": self.in_words(), **notes} if self.in_words() else notes


def _files(count: int, kind: str) -> str:
    return f"{count} {kind} file{'s' * (count > 1)}"


@lru_cache(maxsize=1)
def readable_suffixes() -> frozenset[str]:
    """Suffixes, as in .jpg, of the kinds of image that are read."""
    kinds = formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds)


def is_image(name: str) -> bool:
    """Whether a file has the suffix of an image that can be read here."""
    return os.path.splitext(name)[1].lower() in readable_suffixes()


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether to look for images below it: not below a link to a folder above it, in its path or its real path."""
    try:
        if not entry.is_dir() or not entry.is_symlink():
            return entry.is_dir()
    except OSError:
        return False  # such as a link to itself
    target, here = os.path.realpath(entry.path), os.path.realpath(os.path.dirname(entry.path))
    parents = {os.path.realpath(parent) for parent in Path(entry.path).absolute().parents}
    return os.path.commonpath([target, here]) != target and target not in parents


def is_junk(name: str) -> bool:
    """Whether a file or folder is one that a system or program left there: ._IMG.jpg, .DS_Store."""
    return name.startswith(".") or name.lower() in JUNK


def listed(folder: str | os.PathLike[str], left: LeftOut) -> tuple[list[str], list[str]]:
    """The names of a folder's own folders and of its own images, each in alphabetical order. Raises SetupError."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_junk(entry.name):
                    left.junk.append(entry.name)
                elif is_folder(entry):
                    folders.append(entry.name)
                elif not is_image(entry.name):
                    left.other(entry.name)
                elif left.looks and entry.is_symlink() and _is_broken(entry):
                    left.broken += 1
                elif _is_empty(entry, left):
                    left.empty += 1
                else:
                    images.append(entry.name)
    except OSError as error:
        raise SetupError(f"{error.filename or folder} cannot be listed: {error.strerror}") from None
    return sorted(folders), sorted(images)


def _is_broken(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat()  # the entry caches it
    except OSError:
        return True
    return False


def _is_empty(entry: os.DirEntry[str], left: LeftOut) -> bool:
    left.asked += 1
    with suppress(OSError):  # reading it will raise the same
        return left.asked <= ASKED and entry.is_file() and entry.stat().st_size == 0
    return False


def images_below(folder: str, left: LeftOut, below: str = "") -> Iterator[str]:
    """The images of a folder and its subfolders, as paths that begin with `below`; each folder is sorted."""
    folders, images = listed(folder, left)
    start = f"{below}/" if below else ""
    entries = sorted([(name, False) for name in images] + [(name, True) for name in folders])
    for name, inner in entries:
        if inner:
            yield from images_below(os.path.join(folder, name), left, start + name)
        else:
            yield start + name


def class_images(folder: Path, classes: Sequence[str], left: LeftOut) -> list[list[str]]:
    """For each class folder its images, subfolders included, as sorted paths below `folder`. Raises SetupError."""
    images = [sorted(images_below(os.path.join(folder, name), left, name)) for name in classes]
    for name, paths in zip(classes, images, strict=True):
        if not paths:
            left = LeftOut()
            list(images_below(os.path.join(folder, name), left))
            raise SetupError(
                f"{folder / name} holds no images that can be read here{left.in_brackets()}; remove the folder or put "
                "images there (JPEG, PNG, WebP, ...)"
            )
    return images


def few(names: Sequence[str], most: int = 4) -> str:
    """The first names, in words."""
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)
