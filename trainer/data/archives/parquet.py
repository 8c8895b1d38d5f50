"""Parquet shards: files with a column of encoded images and a column of labels, read with pyarrow.

Parquet compresses the rows of a row group together, so reading one image means reading its whole
group. A process keeps the most recently used groups in memory. Each group is therefore read only
once if images are read in file order: when small images are loaded at the start, in evaluation,
and when a cache is built. Training without a cache reads images in random order, and therefore
reads about one group per image.
"""

import json
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.data.archives.indexes import (
    MAX_OPEN_SHARDS,
    Archive,
    ArchiveIndex,
    load_or_make,
)
from trainer.data.items import INPUTS, TARGETS
from trainer.data.photos.decoding import Bytes, describe_failure
from trainer.errors import SetupError, load_extra

KIND = b"parquet"
# Maximum total size in bytes of the row groups that a process keeps in memory. The most recently
# used group is kept even if it is larger.
CACHE_BYTES = 2**28
# Names of pyarrow's types of bytes and of text.
BYTES_TYPES = ("binary", "large_binary", "binary_view")
TEXT_TYPES = ("string", "large_string", "string_view")


def index(shard: Archive) -> ArchiveIndex:
    """Return the index of a shard's rows.

    Raises:
        SetupError: the shard is damaged or not supported, or pyarrow is not installed.
        OSError: the shard cannot be accessed.
    """
    pyarrow()
    return load_or_make(shard, "parquet", read_index)


def encoded(shard: Archive, group: int, row: int) -> Bytes:
    """Return the encoded bytes of an image.

    Args:
        shard: the shard.
        group: index of the row group.
        row: index of the row in the group.

    Raises:
        ValueError: the row contains no image.
        Exception: pyarrow can raise any exception.
    """
    value = images_of(shard, group)[row].as_buffer()
    if value is None:
        raise ValueError("the row does not contain the bytes of an image, perhaps only a path")
    # Without a copy, the image would keep the whole row group in memory.
    return np.frombuffer(value, np.uint8).copy()


def pyarrow() -> Any:
    """Import pyarrow, and return the module.

    Raises:
        SetupError: pyarrow is not installed.
    """
    return load_extra("data.name=shards of .parquet files", "pyarrow", "pyarrow.parquet")


def read_index(shard: Archive) -> ArchiveIndex:
    """Make the index of a shard from its metadata and its column of labels.

    Raises:
        SetupError: the shard is damaged, or lacks a column of images or labels.
    """
    try:
        table = open_table(shard)
        schema = table.schema_arrow
        image = image_column(schema)
        label = label_column(schema)
        group_sizes = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        labels = []
        if label:
            labels = table.read([label], use_threads=False).column(0).to_pylist()
    except Exception as error:
        # pyarrow can raise any exception for a damaged file.
        raise SetupError(
            f"{shard}: it cannot be read as Parquet ({describe_failure(error)})"
        ) from None
    if label is None or image is None:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)[:200]
        raise SetupError(
            f"{shard} needs a column of encoded images ({', '.join(INPUTS[:3])}; binary) and a "
            f"column of classes ({', '.join(TARGETS[:2])}; whole numbers or text), but its columns "
            f"are {columns}"
        )
    if len(labels) != sum(group_sizes):
        raise SetupError(
            f"{shard}: it has {len(labels):,} labels for {sum(group_sizes):,} rows: write the "
            "shard again"
        )
    texts: dict[str, int] = {}
    rows: dict[bytes, tuple[int, int, int, int]] = {}
    for group, size in enumerate(group_sizes):
        for row in range(size):
            number = len(rows)
            value = labels[number]
            code = -1
            if value is not None:
                code = texts.setdefault(str(value).strip(), len(texts))
            rows[b"%d" % number] = (group, row, code, 0)
    names = None
    # Hugging Face's library `datasets` writes the names of the classes into the metadata. Other
    # files have no names there.
    with suppress(KeyError, ValueError, TypeError):
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = [*map(str, features[label]["names"])] or None
    return ArchiveIndex.of(rows, [*texts], names, [""], {})


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def open_table(shard: Archive) -> Any:
    """Open a shard as pyarrow's ParquetFile.

    Raises:
        OSError: the shard has changed.
        Exception: pyarrow can raise any exception.
    """
    if Archive.of(str(shard)) != shard:
        raise OSError(f"{shard} was changed after this run began")
    return pyarrow().parquet.ParquetFile(str(shard))


def image_column(schema: Any) -> str | None:
    """Return the column of encoded images, such as "image" or "image.bytes"; None without one."""
    for name in INPUTS:
        if name not in schema.names:
            continue
        kind = schema.field(name).type
        if str(kind) in BYTES_TYPES:
            return name
        if pyarrow().types.is_struct(kind) and any(
            part.name == "bytes" and str(part.type) in BYTES_TYPES for part in kind
        ):
            return f"{name}.bytes"
    return None


def label_column(schema: Any) -> str | None:
    """Return the name of the column that contains each image's class, if any.

    Classes are whole numbers or text.
    """
    for name in TARGETS:
        if name in schema.names:
            kind = schema.field(name).type
            if pyarrow().types.is_integer(kind) or str(kind) in TEXT_TYPES:
                return name
    return None


_LOCK = threading.Lock()
# Encoded images of the most recently used row groups, as pyarrow arrays. The key is the shard and
# the index of the row group. The least recently used group comes first.
_GROUPS: OrderedDict[tuple[Archive, int], Any] = OrderedDict()


def images_of(shard: Archive, group: int) -> Any:
    """Return the encoded images of a row group as a pyarrow array of bytes.

    Raises:
        Exception: pyarrow can raise any exception.
    """
    key = shard, group
    with _LOCK:
        if key not in _GROUPS:
            table = open_table(shard)
            image = str(image_column(table.schema_arrow))
            rows = table.read_row_group(group, [image], use_threads=False)
            column = rows.column(0).combine_chunks()
            if hasattr(column, "chunk"):
                column = column.chunk(0)
            if image.endswith(".bytes"):
                column = column.flatten()[0]
            _GROUPS[key] = column
        _GROUPS.move_to_end(key)
        while len(_GROUPS) > 1 and sum(column.nbytes for column in _GROUPS.values()) > CACHE_BYTES:
            _GROUPS.popitem(last=False)
        return _GROUPS[key]
