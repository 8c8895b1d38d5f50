"""From data.root to shards: a file, a folder, a pattern, numbers in braces, or a list."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from trainer.data.folders.layout import part_named
from trainer.data.folders.scanning import few, is_junk
from trainer.errors import SetupError

SUFFIXES = (".tar", ".parquet")
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
ARCHIVES = (".zip", ".7z", ".rar", *PACKED)
MOST = 10**5  # shards
EXAMPLE = "a folder, file or pattern of .tar or .parquet shards, as in data.root='/data/train-*.tar'"


def shards_of(root: str) -> list[Path]:
    """The shards, of a folder or pattern by name, of braces as they are listed. Raises SetupError."""
    shards: dict[str, None] = {}
    missing: list[str] = []
    for text in [root] if os.path.exists(root) else braced(_listed(root)):
        pattern = os.path.expanduser(text)
        paths = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        for path in paths:
            shards |= dict.fromkeys(below(path) if os.path.isdir(path) else [path])
        if not paths:
            missing.append(text)
    if not shards:
        why = packed_or_remote(root)
        raise SetupError(f"data.root={root} is {why}" if why else f"data.root={root} names no shards: type {EXAMPLE}")
    if missing:
        raise SetupError(f"data.root={root}: {len(missing):,} of its shards are not there ({few(missing)})")
    odd = next((path for path in shards if not path.endswith((*SUFFIXES, *PACKED))), None)
    if odd is not None:
        why = packed_or_remote(odd) or f"no shard: type {EXAMPLE}; photos in folders are data.name=imagefolder"
        raise SetupError(f"data.root={root} is {why}" if len(shards) == 1 else f"{odd} is {why}")
    kinds = {os.path.splitext(path)[1] for path in shards}
    if set(SUFFIXES) <= kinds and os.path.isdir(os.path.expanduser(root)):
        raise SetupError(f"{root} holds .tar and .parquet: {quote(f'data.root={root}/**/*.tar')} chooses")
    return [Path(path) for path in shards]


def below(folder: str) -> Iterator[str]:
    """The shards in a folder and its subfolders, by name."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_junk(name))
        yield from (os.path.join(path, name) for name in sorted(names) if name.endswith(SUFFIXES) and not is_junk(name))


def _listed(text: str) -> str:
    """A list in brackets, [a.tar, b.tar], as braces; other brackets belong to a pattern."""
    listed = re.fullmatch(r"\[([^][]+)\]", text)
    names = [name.strip() for name in listed[1].split(",")] if listed else []
    return f"{{{','.join(names)}}}" if len(names) > 1 else names[0] if names and names[0].endswith(SUFFIXES) else text


def packed_or_remote(root: str) -> str | None:
    """The error for an archive or a URL in place of a folder."""
    if re.match(r"\w+://", root):
        return "an address, and images are read from this machine: download it first, and type data.root=FOLDER"
    if root.lower().endswith(ARCHIVES) and not os.path.isdir(os.path.expanduser(root)):
        return "an archive: unpack it first, and type data.root=FOLDER with the folder of its images"
    return None


def braced(text: str) -> list[str]:
    """Expand braces as a shell does, {a,b} and {000..012}; others stay as they are. Raises SetupError."""
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
    texts = itertools.chain.from_iterable(braced(text[: match.start()] + each + text[match.end() :]) for each in inner)
    listed = list(itertools.islice(texts, MOST + 1))
    if len(listed) > MOST:
        raise SetupError(f"data.root={text} means more than {MOST:,} shards")
    return list(dict.fromkeys(listed))


def part_of(path: str) -> str | None:
    """The part in a shard's name, or in the name of one of its folders: train, val or test."""
    *folders, name = path.split("/")
    words = (*re.split(r"[^a-z]+", name.lower()), *reversed(folders))
    return next(filter(None, map(part_named, words)), None)
