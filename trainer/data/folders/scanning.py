"""The contents of folders of photos: class folders, their images in order, and files that are left out, by reason."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from PIL import Image

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


ARRAY = ".npy"
HIDDEN, LOOSE, LINKS = "hidden file(s)", "image(s) outside the class folders", "link(s) in shards"


class LeftOut(Counter[str]):
    """Counts the files that are not read, by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, str] = {}  # notes about the names of classes

    def other(self, name: str) -> None:
        """A file that is not an image, or cannot be read here."""
        suffix = os.path.splitext(name)[1]
        needed = NEEDS.get(suffix.lower())
        self[f"{suffix} file(s): {needed}" if needed else f"other file(s) ({suffix or 'without a suffix'})"] += 1

    def in_words(self) -> str:
        """In one line; empty where there are none."""
        return "; ".join(f"{count} {what.replace('(s)', 's' * (count > 1))}" for what, count in self.items() if count)

    def in_brackets(self) -> str:
        return f" ({self.in_words()})" if self.in_words() else ""

    def notes(self) -> dict[str, str]:
        """For a run's banner."""
        return {"ignored": self.in_words(), **self.named} if self.in_words() else self.named


@lru_cache(maxsize=1)
def readable_suffixes() -> frozenset[str]:
    """Suffixes, as in .jpg, of the kinds of image that are read."""
    kinds = formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds)


def is_image(name: str) -> bool:
    """Whether a file has the suffix of an image that can be read here."""
    return os.path.splitext(name)[1].lower() in (*readable_suffixes(), ARRAY)


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
                    left[HIDDEN] += 1
                elif is_folder(entry):
                    folders.append(entry.name)
                elif not is_image(entry.name):
                    left.other(entry.name)
                else:
                    images.append(entry.name)
    except OSError as error:
        raise SetupError(f"{error.filename or folder} cannot be listed: {error.strerror}") from None
    if others := [name for name in images if not name.lower().endswith(ARRAY)]:
        for name in {*images} - {*others}:  # arrays beside photos are something else
            left.other(name)
        images = others
    return sorted(folders), sorted(images)


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


def few(names: Sequence[str], most: int = 4) -> str:
    """The first names, in words."""
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)
