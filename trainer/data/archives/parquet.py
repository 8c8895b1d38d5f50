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

from trainer.data.archives.indexes import OPEN, Archive, ArchiveIndex, Bytes, kept
from trainer.data.items import INPUTS, TARGETS
from trainer.data.photos.decoding import reason
from trainer.errors import SetupError

KIND = b"parquet"
KEPT = 2**28  # bytes of row groups that a process keeps
BYTES, TEXT = ((kind, f"large_{kind}", f"{kind}_view") for kind in ("binary", "string"))


def index(shard: Archive) -> ArchiveIndex:
    """The index of its rows. Raises SetupError, OSError."""
    pyarrow()
    return kept(shard, "parquet", look)


def encoded(shard: Archive, group: int, row: int) -> Bytes:
    """An image's bytes, of a row of a row group. Raises OSError, ValueError."""
    value = images_of(shard, group)[row].as_buffer()
    if value is None:
        raise ValueError("the row holds no image's bytes, perhaps a path")
    return np.frombuffer(value, np.uint8).copy()  # the group need not stay for it


def pyarrow() -> Any:
    """The package. Raises SetupError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SetupError("data.name=shards reads .parquet files with pyarrow: pip install pyarrow") from None
    return pyarrow


def look(shard: Archive) -> ArchiveIndex:
    """Read the metadata and the labels."""
    try:
        table = opened(shard)
        schema = table.schema_arrow
        image, label = image_column(schema), label_column(schema)
        groups = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        labels = table.read([label], use_threads=False).column(0).to_pylist() if label else []
    except Exception as error:  # pyarrow raises anything at all for a damaged file
        raise SetupError(f"{shard}: it cannot be read as Parquet ({reason(error)})") from None
    if label is None or image is None:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)[:200]
        raise SetupError(
            f"{shard} needs a column of encoded images ({', '.join(INPUTS[:3])}; binary) and one of classes "
            f"({', '.join(TARGETS[:2])}; whole numbers or text); its columns are {columns}"
        )
    texts: dict[str, int] = {}
    codes = [-1 if each is None else texts.setdefault(str(each).strip(), len(texts)) for each in labels]
    places = ((n, row) for n, count in enumerate(groups) for row in range(count))
    rows = {b"%d" % n: (*place, code, 0) for n, (place, code) in enumerate(zip(places, codes, strict=True))}
    names = None
    with suppress(KeyError, ValueError, TypeError):  # as the library `datasets` writes them
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = [str(name) for name in features[label]["names"]] or None
    return ArchiveIndex.of(rows, [*texts], names, [""], {})


@lru_cache(maxsize=OPEN)
def opened(shard: Archive) -> Any:
    """A Parquet file of pyarrow's. Raises whatever opening raises."""
    if Archive.of(str(shard)) != shard:
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
    kinds = {name: schema.field(name).type for name in TARGETS if name in schema.names}
    return next((name for name, kind in kinds.items() if pyarrow().types.is_integer(kind) or str(kind) in TEXT), None)


_LOCK = threading.Lock()
_GROUPS: OrderedDict[tuple[Archive, int], Any] = OrderedDict()  # arrays of pyarrow's, of those that were read last


def images_of(shard: Archive, group: int) -> Any:
    """The images of a row group, an array of bytes. Raises whatever reading raises."""
    key = shard, group
    with _LOCK:
        if key not in _GROUPS:
            table = opened(shard)
            image = str(image_column(table.schema_arrow))
            column = table.read_row_group(group, [image], use_threads=False).column(0).combine_chunks()
            column = column.chunk(0) if hasattr(column, "chunk") else column
            _GROUPS[key] = column.flatten()[0] if image.endswith(".bytes") else column
        _GROUPS.move_to_end(key)
        while len(_GROUPS) > 1 and sum(column.nbytes for column in _GROUPS.values()) > KEPT:
            _GROUPS.popitem(last=False)
        return _GROUPS[key]
