"""The names of the classes of shards: numbers with a list of names, names, or folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data.class_names import class_names, shared_depth
from trainer.data.folders.layout import part_named
from trainer.data.folders.scanning import few
from trainer.data.folders.targets import sparse
from trainer.data.sampling import Array
from trainer.data.shards.indexes import ShardIndex
from trainer.errors import SetupError
from trainer.saving import files
from trainer.saving.files import portable
from trainer.tasks.classification import class_name

LIST = "classes.txt"  # beside the shards: the names of classes 0, 1, ..., one a line
DIGITS = 7  # of a class's number


class Classes(NamedTuple):
    """The classes of the samples of all shards."""

    names: list[str]  # of all classes
    labels: Array  # (samples,) int64, places in `names`; -1 for a sample without a class
    notes: dict[str, str]  # for a run's banner
    depths: tuple[int, int] | None = None  # of the folders that are classes, in the training and the held-out part


def classes_of(
    root: Path, indexes: Sequence[ShardIndex], train: Array, held_out: Array, depth: int | None = None
) -> Classes:
    """The classes of all samples of the shards, one shard behind the other; those in no part do not count.

    Where folders are classes these are the outermost ones: those below `depth` folders, else below all that the images
    of a part share. Raises SetupError.
    """
    depths = None
    texts, codes = _merged([index.contents.texts for index in indexes], [index.labels for index in indexes])
    by_part = [texts, texts]
    used = np.unique(codes[train | held_out])
    if not (codes >= 0).any():
        paths, codes = folders_of(indexes)
        trained, tested = ([paths[code] for code in np.unique(codes[part])] for part in (train, held_out))
        # Of a single folder that is the class.
        first, other = (max(0, shared_depth(some) - (len(some) == 1)) for some in (trained, tested))
        first = first if depth is None else depth
        same = depth is not None or len({path[:first] for path in (*trained, *tested)}) == 1
        depths = first, first if same else other
        by_part = [["/".join(path[at : at + 1]) for path in paths] for at in depths]
        if all(part_named(by_part[0][code]) for code in np.unique(codes[train])):
            by_part = [["" for _ in paths]] * 2  # they are parts such as train, not classes
    elif all(re.fullmatch(r"-?\d+", texts[code]) for code in used[used >= 0]):
        if long := next((text for text in texts if len(text) > DIGITS and text.isdecimal()), None):
            raise SetupError(f"{root}: a sample's class is {long[:40]}, and classes are numbers from 0")
        labels = _of([int(text) if text.isdecimal() else -1 for text in texts], codes)
        names = [portable(class_name(name)) for name in _names(root, indexes, labels[train | held_out])]
        return Classes(names, labels, {})
    here, there = (
        {some[code] for code in np.unique(codes[part]) if code >= 0} - {""}
        for some, part in zip(by_part, (train, held_out), strict=True)
    )
    named = class_names(here, there)
    odd = sorted(there - {*named.places})
    if odd and here:
        raise SetupError(f"{root}: no training image has the class '{odd[0]}' of a held-out one")
    labels = np.full(len(codes), -1, np.int64)
    for some, part in zip(by_part, (train, held_out), strict=True):
        labels[part] = _of([named.places.get(text, -1) for text in some], codes)[part]
    return Classes(named.names, labels, named.notes, depths)


def folders_of(indexes: Sequence[ShardIndex]) -> tuple[list[tuple[str, ...]], Array]:
    """The folders within all shards that hold images, and which one each sample is in."""
    below, codes = _merged([index.contents.below for index in indexes], [index.folders for index in indexes])
    return [tuple(filter(None, path.split("/"))) for path in below], codes


def parts_inside(indexes: Sequence[ShardIndex], texts: bool) -> tuple[Array, int]:
    """The part of each sample, by the folders below all that the images share, and how deep the folders within the
    parts are. Without `texts` the outermost of those is its class."""
    paths, codes = folders_of(indexes)
    depth = shared_depth([paths[code] for code in np.unique(codes)])
    parts = [part_named(path[depth]) if len(path) > depth + (not texts) else None for path in paths]
    return np.array([*parts, None], object)[codes], depth + 1


def _merged(tables: Sequence[Sequence[str]], codes: Sequence[Array]) -> tuple[list[str], Array]:
    """One table of texts, and all codes as places in it; -1 stays."""
    whole: dict[str, int] = {}
    places = [[whole.setdefault(text, len(whole)) for text in table] for table in tables]
    merged = [_of(*each) for each in zip(places, codes, strict=True)]
    return [*whole], np.concatenate([np.empty(0, np.int64), *merged])


def _of(values: Sequence[int], codes: Array) -> Array:
    """The value at each code; -1 at -1."""
    return np.array([*values, -1], np.int64)[codes]


def _names(root: Path, indexes: Sequence[ShardIndex], numbers: Array) -> list[str]:
    """The names of classes that are numbers: from the shards, else from a list beside them, else the numbers."""
    count, where = int(numbers.max(initial=-1)) + 1, root
    lists = {tuple(index.contents.names) for index in indexes if index.contents.names}
    if len(lists) > 1:
        first, other = sorted(lists)[:2]
        raise SetupError(f"{root}: its shards name different classes: {few(first)} in some and {few(other)} in others")
    names = list(next(iter(lists), ()))
    if not names and (root / LIST).is_file():
        where = root / LIST
        try:
            names = [line.strip() for line in files.read(where).decode().splitlines() if line.strip()]
        except (OSError, UnicodeError) as error:
            raise SetupError(f"{where} cannot be read ({error}): write one name a line, as UTF-8") from None
    elif not names:
        if strange := sparse(numbers):
            raise SetupError(f"{root}: {strange}; correct it, or name all classes in {LIST}, one a line")
        if (root / "classes.json").is_file():
            raise SetupError(f"{root / 'classes.json'} is not read: write its names into {LIST} there, one a line")
        return [str(number) for number in range(count)]
    if len(names) < count:
        raise SetupError(f"{where} names {len(names)} classes ({few(names)}), and a sample has the class {count - 1}")
    return names
