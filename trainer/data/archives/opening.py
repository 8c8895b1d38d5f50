"""Data sets of shards (data.name=shards): opening, division into splits, and names of classes."""

import glob
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Self

import numpy as np

from trainer.data.archives import parquet, tars
from trainer.data.archives.indexes import Archive, ArchiveIndex
from trainer.data.encoded import EncodedPhotos, archive_prefix
from trainer.data.folders.layout import Before, class_names, held_out_of, part_named
from trainer.data.folders.photo_folders import photos
from trainer.data.folders.scanning import LeftOut, is_junk
from trainer.data.folders.targets import sparse
from trainer.data.sampling import Array
from trainer.data.sets import Datasets
from trainer.errors import SetupError
from trainer.processes.rank import read_place
from trainer.recipe import Recipe
from trainer.recipe.text import list_some
from trainer.saving import files
from trainer.saving.files import escape_non_utf8
from trainer.tasks.classification import class_name
from trainer.telemetry.tracking import Progress

SUFFIXES = (".tar", ".parquet")
# Suffixes of packed files that cannot be read as shards, in lower case.
ARCHIVES = (".zip", ".7z", ".rar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
EXAMPLE = (
    "a folder, file or pattern of .tar or .parquet shards, as in data.root='/data/train-*.tar'"
)
# File next to the shards with the names of classes 0, 1, ..., one per line.
LIST = "classes.txt"
# Maximum number of threads that make indexes. More threads than cores help, because threads mostly
# wait for the disk.
THREADS = 16

# A shard, and the index of its samples.
IndexedShard = tuple[Archive, ArchiveIndex]


class ArchivedPhotos(EncodedPhotos):
    """The images of one split, stored in shards."""

    def __init__(
        self,
        root: Path,
        names: Iterable[str],
        labels: Array,
        begins: Sequence[bytes],
        shards: Array,
        places: Array,
    ) -> None:
        """Create the set.

        Args:
            root: directory that contains all shards.
            names: path of each image below `root`, as if a shard were a directory.
            labels: (names, ...) targets.
            begins: for each shard, the bytes with which the addresses of its images start.
            shards: (names,) index in `begins` of each image's shard.
            places: (names, 2) position of each image in its shard, as in `ArchiveIndex.places`.
        """
        super().__init__(root, names, labels)
        self._begins = begins
        self._shards = shards
        self._places = places

    def address(self, index: int) -> bytes:
        first, second = self._places[index].tolist()
        return self._begins[int(self._shards[index])] + b"%016d\0%016d" % (first, second)

    def part(self, rows: Array) -> Self:
        part = super().part(rows)
        part._shards = self._shards[rows]
        part._places = self._places[rows]
        return part


def open_archives(recipe: Recipe, before: Before) -> Datasets:
    """Open the shards of `data.root` as a data set.

    Args:
        recipe: the recipe.
        before: the split of an earlier run, if any.

    Raises:
        SetupError: there are no shards; a shard or its labels are invalid; there are fewer than two
            classes; or a sample has no class and data.on_error=stop.
    """
    if recipe.data.root is None:
        raise SetupError(f"data.name=shards needs shards: type data.root={EXAMPLE}")
    paths = [os.path.abspath(path) for path in shards_of(recipe.data.root)]
    root = Path(os.path.commonpath([*map(os.path.dirname, paths)]))
    parts = {path: part_of(os.path.relpath(path, root)) for path in paths}
    held_out, split_notes = held_out_of(parts.values(), before.test, recipe.data.root)
    used_parts: set[str | None] = {"train", held_out or "train"}
    if "train" not in parts.values():
        used_parts = {*parts.values()}
        held_out = None
        split_notes = {}
        part_names = sorted(filter(None, used_parts), reverse=True)
        if len(part_names) > 1:
            raise SetupError(
                f"data.root={recipe.data.root} contains {' and '.join(part_names)} but no train: "
                "name one of these in data.root, or add the shards to train on"
            )
    show = recipe.logging.progress and read_place().local_rank == 0
    indexed_shards = load_indexes([path for path in paths if parts[path] in used_parts], show)
    shards, indexes = zip(*indexed_shards, strict=True)
    counts = [*map(len, indexes)]
    is_test_shard = [held_out is not None and parts[str(shard)] == held_out for shard in shards]
    is_test = np.repeat(np.array(is_test_shard, bool), counts)
    classes, labels, notes = classes_of(root, indexes, is_test)
    whole = ArchivedPhotos(
        root,
        _list_paths(root, indexed_shards),
        labels,
        begins=[archive_prefix(shard, _reader(str(shard)).KIND) for shard in shards],
        shards=np.repeat(np.arange(len(shards), dtype=np.int32), counts),
        places=np.concatenate([index.places for index in indexes]),
    )
    has_class = labels >= 0
    left = LeftOut()
    for index in indexes:
        left.update(index.left)
    if len(classes) < 2 or not (~is_test & has_class).any():
        raise SetupError(
            f"data.root={root} has no images of two classes to train on{left.in_brackets()}: put a "
            ".cls file next to each image (0001.jpg, 0001.cls), or make shards of class folders, "
            "as tar -C photos -cf photos.tar . does"
        )
    notes |= left.notes() | split_notes
    unlabelled = np.flatnonzero(~has_class)
    if len(unlabelled):
        first = whole.where(int(unlabelled[0]))
        notes["left out"] = f"samples with no class: {len(unlabelled):,} ({first})"
        if recipe.data.on_error == "stop":
            raise SetupError(
                f"{notes['left out']}; data.on_error=skip leaves them out, and counts them"
            )
    unused = [os.path.relpath(path, root) for path in paths if parts[path] not in used_parts]
    if unused:
        notes["beside"] = f"not looked at in {root}: {list_some(unused)}"
    train = whole.part(np.flatnonzero(~is_test & has_class))
    val = whole.part(np.flatnonzero(is_test & has_class))
    if held_out is not None and not len(val):
        raise SetupError(
            f"{root}: no image of {held_out} has a class: type {EXAMPLE}, without those shards"
        )
    return photos(
        recipe,
        before,
        train,
        val if held_out else None,
        classes,
        f"what is called {held_out} in {root}",
        notes,
    )


def _list_paths(root: Path, indexed_shards: Sequence[IndexedShard]) -> Iterator[str]:
    """Yield the path below `root` of each image, as if a shard were a directory."""
    for shard, index in indexed_shards:
        shard_name = os.path.relpath(str(shard), root)
        for name in index.list_names():
            yield f"{shard_name}/{name}"


def load_indexes(paths: Sequence[str], show: bool) -> list[IndexedShard]:
    """Load the indexes of shards in parallel, and make the missing ones.

    Args:
        paths: paths of the shards.
        show: whether to show a progress bar.

    Raises:
        SetupError: a shard cannot be read.
    """
    # Ranks use different random orders, so that they share the work of making indexes.
    shuffled = random.sample(paths, len(paths))
    pool = ThreadPoolExecutor(min(THREADS, len(paths)))
    progress = Progress(len(paths), show, "index", "shard")
    try:
        futures = {path: pool.submit(_load_index, path) for path in shuffled}
        for _ in as_completed(futures.values()):
            progress.advance()
        return [futures[path].result() for path in paths]
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def _reader(path: str) -> Any:
    """Return the module that reads this kind of shard."""
    return parquet if path.endswith(".parquet") else tars


def _load_index(path: str) -> IndexedShard:
    try:
        shard = Archive.of(path)
        return shard, _reader(path).index(shard)
    except SetupError:
        # SetupError is a subclass of OSError, so the next clause would wrap it a second time.
        raise
    except OSError as error:
        raise SetupError(f"{path} cannot be read ({error.strerror or error})") from None


def classes_of(
    root: Path,
    indexes: Sequence[ArchiveIndex],
    held_out: Array,
) -> tuple[list[str], Array, dict[str, str]]:
    """Return the classes of all samples of the shards.

    If no sample has a label, the directories are the classes. In each split, these are the
    outermost directories below the path that all images of the split share.

    Args:
        root: directory that contains all shards, for error messages.
        indexes: indexes of the shards.
        held_out: (samples,) bool, whether each sample belongs to the validation split.

    Returns:
        (names, labels, notes): the names of all classes; (samples,) int64 indices into `names`, -1
        for no class; and notes for a run's banner.

    Raises:
        SetupError: the classes of the shards or of the splits do not match.
    """
    texts, codes = _join_tables((index.texts, index.labels) for index in indexes)
    folder_paths, folder_codes = _join_tables((index.below, index.folders) for index in indexes)
    paths = [tuple(filter(None, path.split("/"))) for path in folder_paths]
    has_labels = bool((codes >= 0).any())
    # Check the directories even if the samples have labels, because `_outermost` refuses shards
    # that contain several splits.
    train_folders = _outermost(root, paths, np.unique(folder_codes[~held_out]), has_labels)
    val_folders = _outermost(root, paths, np.unique(folder_codes[held_out]), has_labels)
    if not has_labels:
        texts = train_folders + val_folders
        codes = folder_codes + len(paths) * held_out
    elif all(re.fullmatch(r"-?\d+", text) for text in texts):
        labels = _look_up([*map(_parse_number, texts)], codes)
        names = [escape_non_utf8(class_name(name)) for name in _name_numbers(root, indexes, labels)]
        return names, labels, {}
    train_texts = _used_texts(texts, codes[~held_out])
    val_texts = _used_texts(texts, codes[held_out])
    named = class_names(train_texts, val_texts)
    unknown = sorted(val_texts - {*named.places})
    if train_texts and unknown:
        raise SetupError(
            f"{root}: a validation image has the class '{unknown[0]}', but no training image has it"
        )
    places = [named.places.get(text, -1) for text in texts]
    return named.names, _look_up(places, codes), named.notes


def _used_texts(texts: Sequence[str], codes: Array) -> set[str]:
    """Return the set of strings in `texts` that `codes` selects.

    The index -1 is ignored, and the empty string is left out.
    """
    return {texts[code] for code in np.unique(codes) if code >= 0} - {""}


def _outermost(
    root: Path,
    paths: Sequence[tuple[str, ...]],
    used: Array,
    has_labels: bool,
) -> list[str]:
    """Return for each path its outermost directory below the common parent of all used paths.

    The result is an empty string for a path that has no directory there.

    Args:
        root: directory that contains all shards, for error messages.
        paths: directories in shards, as tuples of names.
        used: indices of the paths that contain images of the split.
        has_labels: whether samples have labels, so that directories are not classes.

    Raises:
        SetupError: the directories are splits such as train and val, not classes.
    """
    used_paths = [paths[code] for code in used]
    # `commonprefix` compares whole names of directories, because the paths are tuples of names. It
    # would compare strings character by character.
    shared = os.path.commonprefix(used_paths)  # noqa: RUF071
    depths = [len(path) - 1 for path in used_paths]
    depth = max(0, min([len(shared), *depths]))
    names = ["/".join(path[depth : depth + 1]) for path in paths]
    outer = {names[code] for code in used}
    parts = {name for name in outer if part_named(name)}
    if parts and len(outer) > 1:
        contain_folders = any(len(path) > depth + 1 and path[depth] in parts for path in used_paths)
        if has_labels or contain_folders or parts == outer:
            folders = "folders" if len(parts) > 1 else "folder"
            raise SetupError(
                f"{root}: shards there hold the {folders} {list_some(sorted(parts))}: make shards "
                "of each part, as tar -C photos/train -cf train.tar . and tar -C photos/val -cf "
                "val.tar ."
            )
    return names


def _join_tables(tables: Iterable[tuple[list[str], Array]]) -> tuple[list[str], Array]:
    """Join tables of strings into one table without duplicates.

    Args:
        tables: pairs of a list of strings and an array of indices into the list. The index -1
            stands for no string.

    Returns:
        (strings, indices): the different strings of all tables, and the concatenated indices of all
        tables, converted to int64 indices into `strings`.
    """
    joined: dict[str, int] = {}
    joined_codes = [np.empty(0, np.int64)]
    for table, table_codes in tables:
        places = [joined.setdefault(text, len(joined)) for text in table]
        joined_codes.append(_look_up(places, table_codes))
    return [*joined], np.concatenate(joined_codes)


def _look_up(values: Sequence[int], codes: Array) -> Array:
    """Return `values[code]` for each code of `codes`, and -1 for the code -1."""
    return np.array([*values, -1], np.int64)[codes]


def _parse_number(text: str) -> int:
    """Parse a class number. Return -1 for a negative number.

    Only the first ten digits of a long number are used, so that the result fits in int64. Even the
    shortened number exceeds the number of classes of any data set, so `_name_numbers` refuses it.
    """
    if text.isdecimal():
        return int(text.lstrip("0")[:10] or 0)
    return -1


def _name_numbers(
    root: Path,
    indexes: Sequence[ArchiveIndex],
    numbers: Array,
) -> list[str]:
    """Return the names of the classes if the labels in the shards are numbers.

    Names come from the shards, or from the file `LIST` next to the shards. If neither exists, the
    numbers are the names.
    """
    count = int(numbers.max(initial=-1)) + 1
    source = root
    lists = sorted({tuple(index.classes) for index in indexes if index.classes})
    if len(lists) > 1:
        raise SetupError(
            f"{root}: the shards name different classes, {list_some(lists[0])} and "
            f"{list_some(lists[1])}"
        )
    names = [*lists[0]] if lists else []
    if not names and (root / LIST).is_file():
        source = root / LIST
        try:
            lines = map(str.strip, files.read(source).decode("utf-8-sig").splitlines())
            names = [*filter(None, lines)]
        except (OSError, UnicodeError) as error:
            raise SetupError(
                f"{source} cannot be read ({error}): write one name per line, as UTF-8"
            ) from None
        if len({*names}) < len(names):
            raise SetupError(
                f"{source} contains a name twice: write the name of each class once, one per line"
            )
    elif not names:
        warning = sparse(numbers)
        if warning:
            raise SetupError(
                f"{root}: {warning}; correct it, or name all classes in {LIST}, one per line"
            )
        return [str(number) for number in range(count)]
    if len(names) < count:
        raise SetupError(
            f"{source} names {len(names)} classes ({list_some(names)}), and a sample has the class "
            f"{count - 1}"
        )
    return names


def shards_of(root: str) -> list[str]:
    """Return the paths of the shards that `data.root` names, sorted by name.

    `data.root` is the path of a shard or of a directory, or a glob pattern.

    Raises:
        SetupError: there are no shards; a file is not a shard; or a directory contains shards of
            both formats.
    """
    pattern = os.path.expanduser(root)
    if os.path.lexists(pattern):
        paths = [pattern]
    else:
        paths = sorted(glob.glob(pattern, recursive=True))
    shards = list[str]()
    for path in paths:
        shards += list_shards(path) if os.path.isdir(path) else [path]
    if not shards:
        problem = packed_or_remote(root)
        if problem:
            raise SetupError(f"data.root={root} is {problem}")
        raise SetupError(f"data.root={root} names no shards: type {EXAMPLE}")
    for path in shards:
        if not path.endswith(SUFFIXES):
            problem = (
                packed_or_remote(path)
                or f"no shard: type {EXAMPLE}; photos in folders are data.name=imagefolder"
            )
            raise SetupError(f"{path} is {problem}")
    suffixes = {os.path.splitext(path)[1] for path in shards}
    if os.path.isdir(pattern) and len(suffixes) > 1:
        raise SetupError(
            f"{root} contains .tar and .parquet: choose one, as in 'data.root={root}/**/*.tar'"
        )
    return [*dict.fromkeys(shards)]


def list_shards(folder: str) -> Iterator[str]:
    """Yield the shards in a directory and its subdirectories, sorted by name."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_junk(name))
        for name in sorted(names):
            if name.endswith(SUFFIXES) and not is_junk(name):
                yield os.path.join(path, name)


def packed_or_remote(root: str) -> str | None:
    """Return a phrase for messages if `root` is a packed archive or a URL; None otherwise."""
    if re.match(r"\w+://", root):
        return (
            "an address, and images are read from this machine: download it first, and type "
            "data.root=FOLDER"
        )
    if root.lower().endswith(ARCHIVES) and not os.path.isdir(os.path.expanduser(root)):
        return (
            "an archive: unpack it first, and type data.root=FOLDER with the folder of its images"
        )
    return None


def part_of(path: str) -> str | None:
    """Return the part (train, val or test) to which a shard belongs, or None if it is unknown.

    The words of the file name are checked first, then the directories of the path from the
    innermost to the outermost. The first name of a part decides.
    """
    *folders, name = path.split("/")
    words = (*re.split(r"[^a-z]+", name.lower()), *reversed(folders))
    return next(filter(None, map(part_named, words)), None)
