"""data.name=shards: which samples train, which are held out, and what their classes are called."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from trainer.data.encoded import EncodedPhotos, in_shard
from trainer.data.folders.layout import Before, held_out_of
from trainer.data.folders.photo_folders import divided, photos
from trainer.data.folders.scanning import LeftOut, few
from trainer.data.sampling import Array
from trainer.data.sets import Datasets, ImageSet
from trainer.data.shards import parquet, tars
from trainer.data.shards.classes import Classes, classes_of, parts_inside
from trainer.data.shards.indexes import ShardFile, ShardIndex
from trainer.data.shards.patterns import EXAMPLE, part_of, shards_of
from trainer.errors import SetupError
from trainer.processes.rank import place
from trainer.recipe import Recipe

THREADS = 16  # that make indexes: they wait for the disk
PROGRESS = 5.0  # seconds between two lines of progress


class ShardSplit(NamedTuple):
    """What trains and what is held out, by the names of shards or of the folders in them."""

    train: str | None = None  # None where there is no split: everything is one set
    held_out: str | None = None  # None where a part of the training images is to be held out


class ShardPhotos(EncodedPhotos):
    """The images of one split, each by its shard and its place there."""

    def __init__(
        self, root: Path, names: Iterable[str], labels: Array, begins: Sequence[bytes], shards: Array, places: Array
    ) -> None:
        """
        Args:
            names: paths below `root`, as if a shard were a folder.
            labels: (names, ...) classes.
            begins: the first bytes of the addresses of each shard's images.
            shards: (names,) places in `begins`.
            places: (names, 2) where an image is, as its kind of shard counts.
        """
        super().__init__(root, names, labels)
        self._begins, self._shards, self._places = tuple(begins), shards, places

    def below(self, rows: Array, depth: int) -> Iterator[str]:
        """The images' paths below `depth` folders of their shards, as folders have them."""
        paths = (os.fsdecode(begin.partition(b"\0")[0]) for begin in self._begins)
        depths = [depth + os.path.relpath(path, self.root).count("/") + 1 for path in paths]
        return (self.name(row).split("/", depths[self._shards[row]])[-1] for row in rows.tolist())

    def ordered(self, rows: Array, depth: int | None) -> Array:
        """Rows in the order of folders where those of `tar --sort=name` are classes, nearly that of the shards; others
        as they are, for reading here and there takes long."""
        if depth is None or any(a >= b for a, b in pairwise(path.split("/") for path in self.below(rows, depth))):
            return rows
        keys = [*zip(self.labels[rows].tolist(), self.below(rows, depth), strict=True)]
        return rows[sorted(range(len(rows)), key=keys.__getitem__)]

    def address(self, index: int) -> bytes:
        first, second = self._places[index].tolist()
        return self._begins[int(self._shards[index])] + b"%016d\0%016d" % (first, second)

    def part(self, rows: Array) -> Self:
        part = super().part(rows)
        part._shards, part._places = self._shards[rows].astype(np.int32), self._places[rows]
        return part


def open_shards(recipe: Recipe, before: Before) -> Datasets:
    """The images of the shards that `data.root` names. Raises SetupError."""
    if recipe.data.root is None:
        raise SetupError(f"data.name=shards needs shards: type data.root={EXAMPLE}")
    paths = [os.path.abspath(path) for path in shards_of(recipe.data.root)]
    root = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    names = [os.path.relpath(path, root) for path in paths]
    parts = [part_of(name) for name in names]
    split, beside = ShardSplit(), list[str]()
    depth, told = None, dict[str, str]()
    if any(parts):
        split, told = split_of({*filter(None, parts)}, recipe.data.root, before.test, 1)
        wanted = [row for row, part in enumerate(parts) if split.train is None or part in (split.train, split.held_out)]
        beside = [names[row] for row in sorted({*range(len(names))} - {*wanted})]
        paths, names = ([listed[row] for row in wanted] for listed in (paths, names))
        parts = [parts[row] for row in wanted]
    found = indexed(paths)
    indexes = [index for _, index in found]
    sample_parts = np.repeat(np.array(parts, object), [len(index) for index in indexes])
    if not any(parts):
        texts = any((index.labels >= 0).any() for index in indexes)
        sample_parts, below = parts_inside(indexes, texts)
        split, told = split_of({*sample_parts.tolist()} - {None}, recipe.data.root, before.test, int(texts))
        depth = below if split.train else None
    train, held_out = np.ones(len(sample_parts), bool), np.zeros(len(sample_parts), bool)
    if split.train:
        train, held_out = (sample_parts == part for part in split)
    held_out &= split.held_out is not None
    if split.train and (others := int((~train & ~held_out).sum())):
        beside.append(f"{others:,} images in other folders")
    classes = classes_of(root, indexes, train, held_out, depth)
    without = split.held_out == "test" and not (classes.labels[held_out] >= 0).any()
    if without and not before.test:  # as competitions give them out
        beside += [name for name, part in zip(names, parts, strict=True) if part == "test"] or ["test"]
        split, held_out, told = ShardSplit(split.train), np.zeros(len(train), bool), {}
    whole = _photos(root, names, found, classes)
    notes = _notes(recipe, whole, found, train | held_out) | classes.notes | told
    _check(recipe, root, classes, train, notes)
    if beside:
        notes["beside"] = f"not looked at in {root}: {few(beside)}"
    known = classes.labels >= 0
    here, there = classes.depths or (None, None)
    rows = whole.ordered(np.flatnonzero(train & known), here)
    trains = whole.part(rows)
    if split.held_out is None:
        drawn_by = None if here is None else [*whole.below(rows, here)]
        trains, holds, words = divided(trains, recipe, before, drawn_by)
    else:
        holds = whole.part(whole.ordered(np.flatnonzero(held_out & known), there))
        words = f"what is called {split.held_out} in {root}"
        if not len(holds):
            raise SetupError(f"{root}: no image of {split.held_out} has a class")
    data = photos(recipe, trains, holds, classes.names, words, notes, drawn=split.held_out is None)
    cost = next((index.contents.note for index in indexes if index.contents.note), "")
    if not cost or isinstance(data.train, ImageSet) or recipe.data.cache != "off":
        return data
    slow = f"each photo is read with its row group, {cost}: data.cache=disk does so once and for all"
    return replace(data, notes={**data.notes, "parquet": slow})


def split_of(parts: set[str], root: str, test: bool, most: int) -> tuple[ShardSplit, dict[str, str]]:
    """Which of the parts trains and which is held out, and a note about that; `most` may be there without one that
    trains. Raises SetupError."""
    held_out, told = held_out_of(parts, test, root)
    if "train" in parts:
        return ShardSplit("train", held_out), told
    if len(parts) > most:
        names = " and ".join(sorted(parts, reverse=True))
        raise SetupError(f"data.root={root} holds {names} and no train: name one, or what trains too")
    return ShardSplit(), {}


def indexed(paths: Sequence[str]) -> list[tuple[ShardFile, ShardIndex]]:
    """The shards and their indexes, which are made where there are none. Raises SetupError."""
    printed, prints = time.monotonic(), place().local_rank == 0
    order = random.sample(range(len(paths)), len(paths))  # each rank begins with other shards
    pool = ThreadPoolExecutor(min(THREADS, len(paths)))
    try:
        waiting = {row: pool.submit(_index, paths[row]) for row in order}
        for done, _ in enumerate(as_completed(waiting.values()), 1):
            if prints and time.monotonic() - printed > PROGRESS:
                printed = time.monotonic()
                print(f"  shards: indexed {done:,} of {len(paths):,}, once for all runs", flush=True)
        return [waiting[row].result() for row in range(len(paths))]
    finally:
        pool.shutdown(cancel_futures=True)


def _kind(path: str) -> Any:
    return parquet if path.endswith(".parquet") else tars


def _index(path: str) -> tuple[ShardFile, ShardIndex]:
    try:
        shard = ShardFile.of(path)
        return shard, _kind(path).index(shard)
    except SetupError:  # a kind of OSError
        raise
    except OSError as error:
        raise SetupError(f"{path} cannot be read ({error.strerror or error})") from None


def _photos(
    root: Path, names: Sequence[str], found: Sequence[tuple[ShardFile, ShardIndex]], classes: Classes
) -> ShardPhotos:
    """All samples of all shards."""
    listed = (f"{name}/{each}" for name, (_, index) in zip(names, found, strict=True) for each in index.listed())
    begins = [in_shard(shard, _kind(name).KIND) for name, (shard, _) in zip(names, found, strict=True)]
    rows = np.repeat(np.arange(len(found), dtype=np.int32), [len(index) for _, index in found])
    places = np.concatenate([np.empty((0, 2), np.int64), *(index.places for _, index in found)])
    return ShardPhotos(root, listed, classes.labels, begins, rows, places)


def _notes(
    recipe: Recipe, whole: ShardPhotos, found: Sequence[tuple[ShardFile, ShardIndex]], used: Array
) -> dict[str, str]:
    """For a run's banner: what is left out."""
    left, wrong = LeftOut(empty=False), list[str]()
    for shard, index in found:
        contents = index.contents
        left.inside(contents.left)
        if contents.broken:
            wrong.append(f"{shard}: {contents.broken}; {len(index):,} samples before that are whole")
        wrong += [f"{shard}: {_many(count)} {why} ({first})" for why, (count, first) in contents.wrong.items()]
    nameless = np.flatnonzero((whole.labels < 0) & used)
    if len(nameless) and len(nameless) < used.sum():
        wrong.append(f"{_many(len(nameless))} no class ({whole.where(int(nameless[0]))})")
    if wrong and recipe.data.on_error == "stop":
        more = f" (and {len(wrong) - 1} more such findings)" if len(wrong) > 1 else ""
        raise SetupError(f"{wrong[0]}{more}; data.on_error=skip leaves out what cannot be used, and counts it")
    notes = left.notes()
    if wrong:
        notes["left out"] = "; ".join(wrong[:3]) + f"; and {len(wrong) - 3} more" * (len(wrong) > 3)
    return notes


def _many(count: int) -> str:
    return f"{count:,} samples have" if count > 1 else "a sample has"


def _check(recipe: Recipe, root: Path, classes: Classes, train: Array, notes: dict[str, str]) -> None:
    """Refuse shards without training images, or without two classes."""
    if not train.any():
        ignored = f" ({notes['ignored']})" if "ignored" in notes else ""
        raise SetupError(f"data.root={recipe.data.root} holds no images that can be read here{ignored}")
    if not classes.names or not (classes.labels[train] >= 0).any():
        raise SetupError(
            f"{root}: its images have no classes: put a .cls beside each image (0001.jpg, 0001.cls), or "
            "the images of a class into a folder of its own, as tar -C photos -cf photos.tar . does with class folders"
        )
    if len(classes.names) == 1:
        raise SetupError(f"{root} holds one class, '{classes.names[0]}', and a classifier tells classes apart")


def exist(root: str) -> bool:
    """Whether data.root names shards on this machine."""
    try:
        return bool(shards_of(root))
    except SetupError:
        return False
