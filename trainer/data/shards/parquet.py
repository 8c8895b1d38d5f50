"""Parquet files of encoded images, as published with a column of images and one of labels. Read through pyarrow.

Parquet compresses the rows of a group together: reading one image means reading its group. A process keeps the groups
that it read last, so what is read in the order of the file is read once: small images that are decoded at the start,
evaluation, building a cache. Training without a cache reads a group for each image.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.data.items import INPUTS, TARGETS
from trainer.data.photos.decoding import LARGEST, reason
from trainer.data.shards.indexes import OPEN, Bytes, Contents, ShardFile, ShardIndex, kept
from trainer.errors import SetupError
from trainer.telemetry.readable import as_size

KIND = b"parquet"
KEPT = 2**28  # bytes of row groups that a process keeps
GROUP = 2**30  # bytes of images in a row group, at most
BYTES, TEXT = ((kind, f"large_{kind}", f"{kind}_view") for kind in ("binary", "string"))


def index(shard: ShardFile) -> ShardIndex:
    """The index of its rows. Raises SetupError, OSError."""
    pyarrow()
    return kept(shard, "parquet", look)


def encoded(shard: ShardFile, group: int, row: int) -> Bytes:
    """An image's bytes, of a row of a row group. Raises OSError, ValueError."""
    value = images_of(shard, group)[row].as_buffer()
    if value is None:
        raise ValueError("the row holds no image's bytes, perhaps a path")
    if value.size > LARGEST:
        raise ValueError(f"the image is larger than {LARGEST:,} bytes")
    return np.frombuffer(value, np.uint8).copy()  # the group need not stay for it


def pyarrow() -> Any:
    """The package. Raises SetupError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SetupError("data.name=shards reads .parquet files with pyarrow: pip install pyarrow") from None
    return pyarrow


def look(shard: ShardFile) -> ShardIndex:
    """Read the metadata and the labels."""
    try:
        table = opened(shard)
        schema = table.schema_arrow
        image, label = image_column(schema), label_column(schema)
        groups = [table.metadata.row_group(n) for n in range(table.num_row_groups)]
        if label is None or image is None:
            columns = ", ".join(f"{field.name} ({field.type})" for field in schema)[:200]
            raise SetupError(
                f"{shard} needs a column of encoded images ({', '.join(INPUTS[:3])}; binary) and one of classes "
                f"({', '.join(TARGETS[:2])}; whole numbers or text); its columns are {columns}"
            )
        column = table.read([label], use_threads=False).column(0)
        labels = column.cast(_plain(column.type)).to_pylist()
    except SetupError:
        raise
    except Exception as error:  # pyarrow raises anything at all for a damaged file
        return ShardIndex.of((), (), (), (), Contents([], broken=f"it cannot be read as Parquet ({reason(error)})"))
    sizes = [_bytes(group, image) for group in groups]
    largest = max(sizes, default=0)
    if largest > GROUP:
        raise SetupError(
            f"{shard}: a row group holds {as_size(largest)} of images, and is read as a whole: write it anew with "
            "fewer rows a group (row_group_size=100 of pyarrow.parquet.write_table)"
        )
    texts: dict[str, int] = {}
    codes = [-1 if each is None else texts.setdefault(str(each).strip(), len(texts)) for each in labels]
    rows = [(n, row) for n, group in enumerate(groups) for row in range(group.num_rows)]
    most = max((group.num_rows for group in groups), default=0)
    note = f"{most:,} rows of {as_size(largest)}" if most > 1 else ""
    contents = Contents([*texts], names_in_schema(schema, label), note=note)
    return ShardIndex.of((b"%d" % n for n in range(len(rows))), rows, codes, [0] * len(rows), contents)


def _images(table: Any, group: int, image: str) -> Any:
    """The bytes of the images of a row group, an array of pyarrow's."""
    column = table.read_row_group(group, [image], use_threads=False).column(0).combine_chunks()
    column = column.chunk(0) if hasattr(column, "chunk") else column
    return column.flatten()[0] if image.endswith(".bytes") else column


def _bytes(group: Any, image: str) -> int:
    columns = (group.column(n) for n in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == image)


@lru_cache(maxsize=OPEN)
def opened(shard: ShardFile) -> Any:
    """A Parquet file of pyarrow's.

    Raises whatever opening raises.
    """
    if ShardFile.of(str(shard)) != shard:
        raise OSError(f"{shard} was changed since this run began")
    return pyarrow().parquet.ParquetFile(str(shard))


def image_column(schema: Any) -> str | None:
    """The path of the column with the images' bytes."""
    for name in (name for name in INPUTS if name in schema.names):
        kind = schema.field(name).type
        if str(kind) in BYTES:
            return name
        if pyarrow().types.is_struct(kind) and any(part.name == "bytes" and str(part.type) in BYTES for part in kind):
            return f"{name}.bytes"
    return None


def label_column(schema: Any) -> str | None:
    """The column with a class for each image: a whole number, or its name."""
    types = pyarrow().types
    for name in (name for name in TARGETS if name in schema.names):
        kind = _plain(schema.field(name).type)
        if types.is_integer(kind) or types.is_boolean(kind) or str(kind) in TEXT:
            return name
    return None


def _plain(kind: Any) -> Any:
    """The type of a column's values: of pandas' categories that of their names."""
    kind = kind.value_type if pyarrow().types.is_dictionary(kind) else kind
    return pyarrow().string() if str(kind) in TEXT else kind


def names_in_schema(schema: Any, label: str) -> list[str] | None:
    """The names of the classes, where the schema has them as the library `datasets` writes them."""
    with suppress(KeyError, ValueError, TypeError):
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
        return [str(name) for name in names] or None
    return None


_LOCK = threading.Lock()
_GROUPS: OrderedDict[tuple[ShardFile, int], Any] = OrderedDict()  # arrays of pyarrow's, of those that were read last


def images_of(shard: ShardFile, group: int) -> Any:
    """The images of a row group, an array of bytes. Raises whatever reading raises."""
    key = shard, group
    with _LOCK:
        if key not in _GROUPS:
            file = opened(shard)
            _GROUPS[key] = _images(file, group, str(image_column(file.schema_arrow)))
        _GROUPS.move_to_end(key)
        while len(_GROUPS) > 1 and sum(column.nbytes for column in _GROUPS.values()) > KEPT:
            _GROUPS.popitem(last=False)
        return _GROUPS[key]
