"""From what data.root says to the shards that are meant: a file, a folder, a pattern, numbers in braces, a list."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from trainer.data.folders.layout import HELD_OUT, TEST, TRAIN
from trainer.data.folders.scanning import few, is_junk
from trainer.errors import SetupError

SUFFIXES = (".tar", ".parquet")
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
ARCHIVES = {
    ".zip": "unzip -q {} -d {}",
    ".7z": "7z x {} -o{}",
    ".rar": "unrar x {} {}/",
    **dict.fromkeys(PACKED, "tar xf {} -C {}"),
}  # with what unpacks each
MOST = 10**5  # shards
EXAMPLE = "a folder, file or pattern of .tar or .parquet shards, as in data.root='/data/train-*.tar'"


def shards_of(root: str) -> list[Path]:
    """The shards, in order: those of a folder or pattern by name, those of braces as they are listed.

    Raises:
        SetupError: there are none, or some are missing; the line says what to type.
    """
    found: dict[str, None] = {}
    missing: list[str] = []
    for text in [root] if os.path.exists(root) else braced(_listed(root)):
        path = os.path.expanduser(text)
        listed = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
        for one in listed:
            found |= dict.fromkeys(below(one) if os.path.isdir(one) else [one])
        if not listed:
            missing.append(text)
    if not found and (why := packed_or_remote(root)):
        raise SetupError(f"data.root={root} is {why}")
    if not found:
        raise SetupError(f"data.root={root} names no shards: type {EXAMPLE}{_unpacked(os.path.expanduser(root))}")
    if missing:
        raise SetupError(f"data.root={root}: {len(missing):,} of its shards are not there ({few(missing)})")
    odd = next((one for one in found if not one.endswith((*SUFFIXES, *PACKED))), None)
    if odd is not None and (why := packed_or_remote(odd)):
        raise SetupError(f"data.root={root} is {why}" if len(found) == 1 else f"{odd} is {why}")
    if odd is not None:
        raise SetupError(f"{odd} is no shard: type {EXAMPLE}; photos in folders are data.name=imagefolder")
    kinds = {os.path.splitext(one)[1] for one in found}
    if set(SUFFIXES) <= kinds and os.path.isdir(os.path.expanduser(root)):
        raise SetupError(f"{root} holds .tar and .parquet: {quote(f'data.root={root}/**/*.tar')} chooses")
    return [Path(one) for one in found]


def below(folder: str) -> Iterator[str]:
    """The shards in a folder and in those in it, by name."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_junk(name))
        yield from (os.path.join(path, name) for name in sorted(names) if name.endswith(SUFFIXES) and not is_junk(name))


def _listed(text: str) -> str:
    """A list in brackets, [a.tar, b.tar], as braces; other brackets are a pattern's."""
    listed = re.fullmatch(r"\[([^][]+)\]", text)
    names = [name.strip() for name in listed[1].split(",")] if listed else []
    return f"{{{','.join(names)}}}" if len(names) > 1 else names[0] if names and names[0].endswith(SUFFIXES) else text


def packed_or_remote(root: str) -> str | None:
    """What to say of an archive, or of an address in a network, that is named in place of a folder."""
    if re.match(r"\w+://", root):
        return "an address, and images are read from this machine: download it first, and type data.root=FOLDER"
    end = next((end for end in ARCHIVES if root.lower().endswith(end)), None)
    path = os.path.expanduser(root)  # as a shell does not in quotes
    if end is None or os.path.isdir(path):
        return None
    if not os.path.exists(path):
        return f"an archive, and {path} is not there: type the path of the folder that it was unpacked into"
    folder = os.path.basename(path)[: -len(end)] or "unpacked"
    unpack = f"mkdir -p {quote(folder)} && {ARCHIVES[end].format(quote(path), quote(folder))}"
    return f"an archive, which is to be unpacked first: {unpack}, then {quote(f'data.root={folder}')}"


def _unpacked(folder: str) -> str:
    """What to say of a folder of compressed tars."""
    if not os.path.isdir(folder):
        return ""
    packed = sorted(name for name in os.listdir(folder) if name.endswith(PACKED))
    return f" ({few(packed)} in it are compressed: unpack them to .tar, gunzip does .gz)" if packed else ""


def braced(text: str) -> list[str]:
    """As a shell expands braces: {a,b} and {000..012}, which keeps its zeros; others stay as they are.

    Raises:
        SetupError: they mean too many.
    """
    for match in re.finditer(r"\{([^{}]*)\}", text):  # the innermost ones
        numbers = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", match[1])
        if numbers or "," in match[1]:
            break
    else:
        return [text]
    inner = match[1].split(",")
    if numbers:
        first, last = int(numbers[1]), int(numbers[2])
        padded = any(len(number) > 1 and number.startswith("0") for number in numbers.groups())
        if abs(last - first) >= MOST:
            raise SetupError(f"data.root={text} means more than {MOST:,} shards")
        step = 1 if first <= last else -1
        inner = [str(n).zfill(padded * max(map(len, numbers.groups()))) for n in range(first, last + step, step)]
    found = itertools.chain.from_iterable(braced(text[: match.start()] + one + text[match.end() :]) for one in inner)
    listed = list(itertools.islice(found, MOST + 1))
    if len(listed) > MOST:
        raise SetupError(f"data.root={text} means more than {MOST:,} shards")
    return list(dict.fromkeys(listed))


def part_of(path: str) -> str | None:
    """The part that a shard's name, or the name of a folder that it is in, says: train, val or test."""
    *folders, name = path.split("/")
    words = (_part(word) for word in re.split(r"[^a-z]+", name.lower()))
    return next(filter(None, words), None) or part_of_folder("/".join(folders))


def part_of_folder(path: str) -> str | None:
    """The part that one of the folders of a path is called."""
    return next(filter(None, (_part(name.lower()) for name in reversed(path.split("/")))), None)


def _part(word: str) -> str | None:
    if word in TRAIN:
        return "train"
    return ("test" if word in TEST else "val") if word in HELD_OUT else None
