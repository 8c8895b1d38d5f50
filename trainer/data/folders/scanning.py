"""Contents of folders of photos: class folders, sorted images, and counts of ignored files."""

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image

from trainer.data.photos.decoding import list_formats, register_heif
from trainer.errors import SetupError

# Names, in lower case, of files and folders that operating systems and programs create.
JUNK = (
    "__macosx",
    "thumbs.db",
    "ehthumbs.db",
    "desktop.ini",
    "icon\r",
    "@eadir",
    "$recycle.bin",
    "system volume information",
    "lost+found",
)
HEIF = (".heic", ".heif", ".heics", ".heifs", ".hif")
# Advice to the user about photos in formats that are not read, by suffix.
NEEDS = {
    **dict.fromkeys((".avif", ".webp"), "pip install --upgrade pillow"),
    **dict.fromkeys(
        (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"), "export them as JPEG"
    ),
    **dict.fromkeys((".svg", ".psd", ".pdf", ".eps", ".ai", ".jxl", ".tga"), "export them as PNG"),
}


ARRAY = ".npy"
# Descriptions of files in `LeftOut`. The "(s)" is printed as "s" if there are several files, and
# left out otherwise.
HIDDEN = "hidden file(s)"
LOOSE = "image(s) outside the class folders"
LINKS = "link(s) in shards"


class LeftOut(Counter[str]):
    """Counts of files that are not read, by a description of the files.

    Attributes:
        named: notes about the names of classes, for a run's banner.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, str] = {}

    def other(self, name: str) -> None:
        """Count a file that is not an image, or whose format is not read here."""
        suffix = os.path.splitext(name)[1]
        needed = what_reads(suffix)
        if needed:
            self[f"{suffix} file(s): {needed}"] += 1
        else:
            self[f"other file(s) ({suffix or 'without a suffix'})"] += 1

    def in_words(self) -> str:
        """Return all counts in one line, or an empty string."""
        return "; ".join(
            f"{count} {what.replace('(s)', 's' * (count > 1))}"
            for what, count in self.items()
            if count
        )

    def in_brackets(self) -> str:
        return f" ({self.in_words()})" if self.in_words() else ""

    def notes(self) -> dict[str, str]:
        """Return notes for a run's banner."""
        if self.in_words():
            return {"ignored": self.in_words(), **self.named}
        return self.named


def what_reads(suffix: str) -> str | None:
    """Return advice on how to make files with this suffix readable.

    Return None for a suffix without advice, and "" for HEIF photos if they can be read.
    """
    lower = suffix.lower()
    return register_heif() if lower in HEIF else NEEDS.get(lower)


@cache
def readable_suffixes() -> frozenset[str]:
    """Return the suffixes, such as ".jpg", of the formats that are read."""
    kinds = list_formats()
    return frozenset(
        suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds
    )


def is_image(name: str) -> bool:
    """Return whether a file has the suffix of a format that is read."""
    return os.path.splitext(name)[1].lower() in (*readable_suffixes(), ARRAY)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder in which to look for images.

    A link to a folder that contains the link itself is excluded, because the search would never
    end. Both the path of the link and its real path are checked for such a folder.
    """
    try:
        if not entry.is_dir() or not entry.is_symlink():
            return entry.is_dir()
    except OSError:
        # The entry may be a link to itself, for example.
        return False
    target = os.path.realpath(entry.path)
    here = os.path.realpath(os.path.dirname(entry.path))
    parents = {os.path.realpath(parent) for parent in Path(entry.path).absolute().parents}
    return os.path.commonpath([target, here]) != target and target not in parents


def is_junk(name: str) -> bool:
    """Return whether a file is hidden or created by a system, such as ._IMG.jpg or Thumbs.db."""
    return name.startswith(".") or name.lower() in JUNK


def listed(folder: str | os.PathLike[str], left: LeftOut) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the images in a folder, both sorted.

    Subfolders are not searched.

    Args:
        folder: the folder.
        left: counter of ignored files, to which this function adds all other files.

    Raises:
        SetupError: the folder cannot be listed.
    """
    folders = []
    images = []
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
    photos = [name for name in images if not name.lower().endswith(ARRAY)]
    if photos:
        # If the folder also contains photos, ignore its arrays, which may be masks or features.
        for name in {*images} - {*photos}:
            left.other(name)
        images = photos
    return sorted(folders), sorted(images)


def images_below(
    folder: str,
    left: LeftOut,
    below: str = "",
) -> Iterator[str]:
    """Yield the images of a folder and its subfolders, each folder in sorted order.

    Args:
        folder: the folder.
        left: counter of ignored files, to which this function adds all other files.
        below: prefix of the paths that are yielded.
    """
    folders, images = listed(folder, left)
    start = f"{below}/" if below else ""
    inner = {*folders}
    for name in sorted(folders + images):
        if name in inner:
            yield from images_below(os.path.join(folder, name), left, start + name)
        else:
            yield start + name
