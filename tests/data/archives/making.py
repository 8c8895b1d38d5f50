"""Small shards, as people have them."""

import io
import tarfile
from functools import partial

import pytest

from tests.data import photo_folders

opened = partial(photo_folders.opened, name="shards")


def jpeg(seed=0):
    """The bytes of an image of noise; other noise for each seed."""
    file = io.BytesIO()
    photo_folders.noise(seed).save(file, "JPEG")
    return file.getvalue()


def tarred(path, members, **options):
    """Write a tar of (name, bytes) members; None instead of bytes means a folder, and a str a
    link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type = tarfile.SYMTYPE
                member.linkname = content
            else:
                member.size = len(content)
            file.addfile(member, io.BytesIO(content) if member.size else None)
    return path


def in_folders(classes, first=0):
    """Return the members of a tar that has a folder for each class; `classes` maps a name to its
    number of images.
    """
    return [
        (f"{name}/{n}.jpg", jpeg(first + n))
        for name, count in classes.items()
        for n in range(count)
    ]


def with_classes(labels, first=0, images=None):
    """Members of a WebDataset: an image and its class each."""
    members = []
    for n, label in enumerate(labels, first):
        members += [
            (f"{n:06}.cls", str(label).encode()),
            (f"{n:06}.jpg", images[n] if images else jpeg(n)),
        ]
    return members


def parquet(
    path,
    images,
    labels,
    names=None,
    column="image",
    label="label",
    group=100,
    **options,
):
    """A table as the library `datasets` publishes one."""
    pa = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    import json

    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        None if image is None else {"bytes": image, "path": f"{n}.jpg"}
        for n, image in enumerate(images)
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({column: pa.array(rows, kind), label: pa.array(labels)})
    if names is not None:
        features = {
            label: {"names": list(names), "_type": "ClassLabel"},
            column: {"_type": "Image"},
        }
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    pq.write_table(table, path, row_group_size=group, **options)
    return path
