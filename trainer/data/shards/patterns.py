"""From data.root to shards: a file, a folder, or a pattern of the shell's."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from trainer.data.folders.layout import part_named
from trainer.data.folders.scanning import is_junk
from trainer.errors import SetupError

SUFFIXES = (".tar", ".parquet")
ARCHIVES = (".zip", ".7z", ".rar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
EXAMPLE = "a folder, file or pattern of .tar or .parquet shards, as in data.root='/data/train-*.tar'"


def shards_of(root: str) -> list[Path]:
    """The shards, by name. Raises SetupError."""
    pattern = os.path.expanduser(root)
    there = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
    shards = [shard for path in there for shard in (below(path) if os.path.isdir(path) else [path])]
    if not shards:
        braces = "; {} and [,] are not read: * stands for any part of a name" * any(mark in root for mark in "{[")
        why = packed_or_remote(root)
        raise SetupError(f"data.root={root} {f'is {why}' if why else f'names no shards: type {EXAMPLE}{braces}'}")
    for path in shards:
        if not path.endswith(SUFFIXES):
            why = packed_or_remote(path) or f"no shard: type {EXAMPLE}; photos in folders are data.name=imagefolder"
            raise SetupError(f"{path} is {why}")
    if os.path.isdir(pattern) and len({os.path.splitext(path)[1] for path in shards}) > 1:
        raise SetupError(f"{root} holds .tar and .parquet: {quote(f'data.root={root}/**/*.tar')} chooses")
    return [Path(path) for path in dict.fromkeys(shards)]


def below(folder: str) -> Iterator[str]:
    """The shards in a folder and its subfolders, by name."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_junk(name))
        yield from (os.path.join(path, name) for name in sorted(names) if name.endswith(SUFFIXES) and not is_junk(name))


def packed_or_remote(root: str) -> str | None:
    """The error for an archive or a URL in place of a folder."""
    if re.match(r"\w+://", root):
        return "an address, and images are read from this machine: download it first, and type data.root=FOLDER"
    if root.lower().endswith(ARCHIVES) and not os.path.isdir(os.path.expanduser(root)):
        return "an archive: unpack it first, and type data.root=FOLDER with the folder of its images"
    return None


def part_of(path: str) -> str | None:
    """The part in a shard's name, or in the name of one of its folders: train, val or test."""
    *folders, name = path.split("/")
    words = (*re.split(r"[^a-z]+", name.lower()), *reversed(folders))
    return next(filter(None, map(part_named, words)), None)
