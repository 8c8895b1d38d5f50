"""data.name=shards: which samples train, which are held out, and what their classes are called."""

from __future__ import annotations

import glob
import os
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Self

import numpy as np

from trainer.data.archives import parquet, tars
from trainer.data.archives.indexes import Archive, ArchiveIndex
from trainer.data.encoded import EncodedPhotos, in_archive
from trainer.data.folders.layout import Before, class_names, held_out_of, part_named
from trainer.data.folders.photo_folders import divided, photos
from trainer.data.folders.scanning import LeftOut, few, is_junk
from trainer.data.folders.targets import sparse
from trainer.data.sampling import Array
from trainer.data.sets import Datasets
from trainer.errors import SetupError
from trainer.processes.rank import place
from trainer.recipe import Recipe
from trainer.saving import files
from trainer.saving.files import portable
from trainer.tasks.classification import class_name
from trainer.telemetry.tracking import Progress

SUFFIXES = (".tar", ".parquet")
ARCHIVES = (".zip", ".7z", ".rar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
EXAMPLE = "a folder, file or pattern of .tar or .parquet shards, as in data.root='/data/train-*.tar'"
LIST = "classes.txt"  # beside the shards: the names of classes 0, 1, ..., one a line
THREADS = 16  # that make indexes: they wait for the disk

Found = tuple[Archive, ArchiveIndex]


class ArchivedPhotos(EncodedPhotos):
    """The images of one split, each by its shard and its place there."""

    def __init__(
        self, root: Path, names: Iterable[str], labels: Array, begins: Sequence[bytes], shards: Array, places: Array
    ) -> None:
        """`names` are paths below `root`, as if a shard were a folder. `shards` (names,) are places in `begins`, the
        first bytes of the addresses of each shard's images, `places` (names, 2) where an image is in its shard."""
        super().__init__(root, names, labels)
        self._begins, self._shards, self._places = tuple(begins), shards, places

    def address(self, index: int) -> bytes:
        first, second = self._places[index].tolist()
        return self._begins[int(self._shards[index])] + b"%016d\0%016d" % (first, second)

    def part(self, rows: Array) -> Self:
        part = super().part(rows)
        part._shards, part._places = self._shards[rows].astype(np.int32), self._places[rows]
        return part


def open_archives(recipe: Recipe, before: Before) -> Datasets:
    """The images of the shards that `data.root` names. Raises SetupError."""
    if recipe.data.root is None:
        raise SetupError(f"data.name=shards needs shards: type data.root={EXAMPLE}")
    paths = [os.path.abspath(path) for path in shards_of(recipe.data.root)]
    root = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    parts = {path: part_of(os.path.relpath(path, root)) for path in paths}
    held_out, told = held_out_of(parts.values(), before.test, recipe.data.root)
    wanted: set[str | None] = {"train", held_out or "train"}
    if "train" not in parts.values():
        wanted, held_out, told = {*parts.values()}, None, {}
        if len(named := sorted(filter(None, wanted), reverse=True)) > 1:
            raise SetupError(
                f"data.root={recipe.data.root} holds {' and '.join(named)} and no train: name one, or what trains too"
            )
    show = recipe.logging.progress and place().local_rank == 0
    found = indexed([path for path in paths if parts[path] in wanted], show)
    held = [held_out is not None and parts[str(shard)] == held_out for shard, _ in found]
    tested = np.repeat(np.array(held, bool), [len(index) for _, index in found])
    classes, labels, notes = classes_of(root, [index for _, index in found], tested)
    names = [os.path.relpath(str(shard), root) for shard, _ in found]
    whole = ArchivedPhotos(
        root,
        (f"{name}/{each}" for name, (_, index) in zip(names, found, strict=True) for each in index.listed()),
        labels,
        [in_archive(shard, _kind(str(shard)).KIND) for shard, _ in found],
        np.repeat(np.arange(len(found), dtype=np.int32), [len(index) for _, index in found]),
        np.concatenate([np.empty((0, 2), np.int64), *(index.places for _, index in found)]),
    )
    known = labels >= 0
    notes |= _notes(recipe, root, whole, len(classes) > 1 and bool((~tested & known).any()), found) | told
    if beside := [os.path.relpath(path, root) for path in paths if parts[path] not in wanted]:
        notes["beside"] = f"not looked at in {root}: {few(beside)}"
    train, val, words = whole.part(np.flatnonzero(~tested & known)), whole.part(np.flatnonzero(tested & known)), ""
    if held_out is None:
        train, val, words = divided(train, recipe, before)
    elif not len(val):
        raise SetupError(f"{root}: no image of {held_out} has a class: give {EXAMPLE}, without those")
    words = words or f"what is called {held_out} in {root}"
    return photos(recipe, train, val, classes, words, notes, drawn=held_out is None)


def indexed(paths: Sequence[str], show: bool) -> list[Found]:
    """The shards and their indexes, which are made where there are none. Raises SetupError."""
    order = random.sample(range(len(paths)), len(paths))  # each rank begins with other shards
    pool, progress = ThreadPoolExecutor(min(THREADS, len(paths))), Progress(len(paths), show, "index", "shard")
    try:
        waiting = {row: pool.submit(_index, paths[row]) for row in order}
        for _ in as_completed(waiting.values()):
            progress.more()
        return [waiting[row].result() for row in range(len(paths))]
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def _kind(path: str) -> Any:
    return parquet if path.endswith(".parquet") else tars


def _index(path: str) -> Found:
    try:
        shard = Archive.of(path)
        return shard, _kind(path).index(shard)
    except SetupError:  # a kind of OSError
        raise
    except OSError as error:
        raise SetupError(f"{path} cannot be read ({error.strerror or error})") from None


def classes_of(root: Path, indexes: Sequence[ArchiveIndex], held_out: Array) -> tuple[list[str], Array, dict[str, str]]:
    """The names of all classes, (samples,) int64 places in these, -1 for no class, and notes for a run's banner, of
    all samples of the shards, one shard behind the other. Raises SetupError.

    Where none tells its class, folders are classes: the outermost ones below all that the images of a part share.
    """
    texts, codes = _joined([index.texts for index in indexes], [index.labels for index in indexes])
    below, inside = _joined([index.below for index in indexes], [index.folders for index in indexes])
    paths = [tuple(filter(None, path.split("/"))) for path in below]
    parts, told = (~held_out, held_out), bool((codes >= 0).any())
    folders = [_outermost(root, paths, np.unique(inside[part]), told) for part in parts]
    if not told:
        texts, codes = [*folders[0], *folders[1]], inside + len(paths) * held_out
    elif all(re.fullmatch(r"-?\d+", text) for text in texts):
        labels = _of([_number(text) for text in texts], codes)
        return [portable(class_name(name)) for name in _names(root, indexes, labels)], labels, {}
    here, there = ({texts[code] for code in np.unique(codes[part]) if code >= 0} - {""} for part in parts)
    named = class_names(here, there)
    if here and (odd := sorted(there - {*named.places})):
        raise SetupError(f"{root}: no training image has the class '{odd[0]}' of a held-out one")
    return named.names, _of([named.places.get(text, -1) for text in texts], codes), named.notes


def _outermost(root: Path, paths: Sequence[tuple[str, ...]], used: Array, told: bool) -> list[str]:
    """For each path the outermost folder below what those that are used share; empty where there is none.

    Refuses folders that are parts such as train, and no classes; `told` says that classes are known otherwise.
    """
    some = [paths[code] for code in used]
    depth = max(0, min([_shared_depth(some), *(len(path) - 1 for path in some)]))
    names = ["/".join(path[depth : depth + 1]) for path in paths]
    outer = {names[code] for code in used}
    parts = {name for name in outer if part_named(name)}
    deeper = told or any(len(path) > depth + 1 and path[depth] in parts for path in some)
    if parts and len(outer) > 1 and (deeper or parts == outer):
        raise SetupError(
            f"{root}: shards there hold the folder{'s' * (len(parts) > 1)} {few(sorted(parts))}: make shards of each "
            "part, as tar -C photos/train -cf train.tar . and tar -C photos/val -cf val.tar ."
        )
    return names


def _shared_depth(paths: Collection[tuple[str, ...]]) -> int:
    """How many folders all paths begin with alike."""
    first, last = min(paths, default=()), max(paths, default=())
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _joined(tables: Sequence[Sequence[str]], codes: Sequence[Array]) -> tuple[list[str], Array]:
    """One table of texts, and all codes as places in it; -1 stays."""
    whole: dict[str, int] = {}
    places = [[whole.setdefault(text, len(whole)) for text in table] for table in tables]
    joined = [_of(*each) for each in zip(places, codes, strict=True)]
    return [*whole], np.concatenate([np.empty(0, np.int64), *joined])


def _of(values: Sequence[int], codes: Array) -> Array:
    """The value at each code; -1 at -1."""
    return np.array([*values, -1], np.int64)[codes]


def _number(text: str) -> int:
    """A class's number; -1 where it is none. One that no set has so many classes for is refused by its size."""
    return int(text.lstrip("0")[:10] or 0) if text.isdecimal() else -1


def _names(root: Path, indexes: Sequence[ArchiveIndex], numbers: Array) -> list[str]:
    """The names of classes that are numbers: from the shards, else from a list beside them, else the numbers."""
    count, where = int(numbers.max(initial=-1)) + 1, root
    lists = sorted({tuple(index.classes) for index in indexes if index.classes})
    if len(lists) > 1:
        raise SetupError(f"{root}: its shards name different classes, {few(lists[0])} and {few(lists[1])}")
    names = [*lists[0]] if lists else []
    if not names and (root / LIST).is_file():
        where = root / LIST
        try:
            names = [line.strip() for line in files.read(where).decode().splitlines() if line.strip()]
        except (OSError, UnicodeError) as error:
            raise SetupError(f"{where} cannot be read ({error}): write one name a line, as UTF-8") from None
    elif not names:
        if strange := sparse(numbers):
            raise SetupError(f"{root}: {strange}; correct it, or name all classes in {LIST}, one a line")
        return [str(number) for number in range(count)]
    if len(names) < count:
        raise SetupError(f"{where} names {len(names)} classes ({few(names)}), and a sample has the class {count - 1}")
    return names


def _notes(recipe: Recipe, root: Path, whole: ArchivedPhotos, trains: bool, found: Sequence[Found]) -> dict[str, str]:
    """For a run's banner: what is left out. Raises SetupError where it may not be, or there are no classes to train."""
    left = LeftOut()
    for _, index in found:
        left.update(index.left)
    if not trains:
        raise SetupError(
            f"data.root={root} holds no images of two classes to train on{left.in_brackets()}: put a .cls beside each "
            "image (0001.jpg, 0001.cls), or make shards of class folders, as tar -C photos -cf photos.tar . does"
        )
    nameless = np.flatnonzero(whole.labels < 0)
    told = f"samples with no class: {len(nameless):,} ({whole.where(int(nameless[0]))})" if len(nameless) else ""
    if told and recipe.data.on_error == "stop":
        raise SetupError(f"{told}; data.on_error=skip leaves them out, and counts them")
    return left.notes() | ({"left out": told} if told else {})


def shards_of(root: str) -> list[Path]:
    """The shards, by name. Raises SetupError."""
    pattern = os.path.expanduser(root)
    there = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
    shards = [shard for path in there for shard in (below(path) if os.path.isdir(path) else [path])]
    if not shards:
        why = packed_or_remote(root)
        raise SetupError(f"data.root={root} {f'is {why}' if why else f'names no shards: type {EXAMPLE}'}")
    if odd := next((path for path in shards if not path.endswith(SUFFIXES)), None):
        why = packed_or_remote(odd) or f"no shard: type {EXAMPLE}; photos in folders are data.name=imagefolder"
        raise SetupError(f"{odd} is {why}")
    if os.path.isdir(pattern) and len({os.path.splitext(path)[1] for path in shards}) > 1:
        raise SetupError(f"{root} holds .tar and .parquet: 'data.root={root}/**/*.tar' chooses")
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


def exist(root: str) -> bool:
    """Whether data.root names shards on this machine."""
    try:
        return bool(shards_of(root))
    except SetupError:
        return False
