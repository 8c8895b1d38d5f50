"""Blocks are found by what they are made of: one photo more, less or changed is one block anew."""

import os
from pathlib import Path

import numpy as np
import pytest

from trainer.data.cache.stored import MOST, Format, pack
from trainer.data.folders.photo_folders import PhotoFolder

HOW = Format("raw", 256, 3)


def folder(root, names):
    return PhotoFolder(root, names, np.zeros(len(names), np.int64))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    names = [f"{number:05}.jpg" for number in range(3000)]
    for name in names:
        (root / name).write_bytes(name.encode())
    return root, names


def keys(packing):
    return {key.tobytes() for key in packing.keys}


def test_every_photo_lies_where_it_is_said(photos):
    root, names = photos
    parts = [folder(root, names[::3]), folder(root, names[1::3][::-1])]
    packing = pack(parts, HOW)
    assert sum(map(len, packing.paths)) == 2000 and max(map(len, packing.paths)) <= MOST and len(packing.paths) > 1
    for part, places in zip(parts, packing.places, strict=True):
        found = [packing.paths[block][row] for block, row in places]
        assert found == [os.fsencode(part.where(index)) for index in range(len(part))]


def test_however_they_are_divided_the_blocks_are_the_same(photos):
    root, names = photos
    one = pack([folder(root, names[:100]), folder(root, names[100:])], HOW)
    other = pack([folder(root, names[1500:]), folder(root, names[:1500])], HOW)
    twice = pack([folder(root, names), folder(root, names)], HOW)
    assert keys(one) == keys(other) == keys(twice)


def test_what_changes_one_photo_changes_one_block(photos, tmp_path):
    root, names = photos
    packing = pack([folder(root, names)], HOW)
    before = keys(packing)
    path = Path(os.fsdecode(next(block[0] for block in packing.paths if 1 < len(block) < MOST)))  # not a block's end
    assert keys(pack([folder(root, names)], HOW)) == before
    less = keys(pack([folder(root, [name for name in names if name != path.name])], HOW))
    assert len(before - less) == 1 == len(less - before)
    facts = path.stat()
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    changed = keys(pack([folder(root, names)], HOW))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert len(before - changed) == 1 == len(changed - before)
    path.write_bytes(b"longer than before")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert len(before - keys(pack([folder(root, names)], HOW))) == 1
    path.write_bytes(path.name.encode())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert keys(pack([folder(root, names)], HOW)) == before


@pytest.mark.parametrize("how", [Format("jpeg", 256, 3), Format("raw", 255, 3), Format("raw", 256, 1)])
def test_another_preparation_is_another_block(photos, how):
    root, names = photos
    assert not keys(pack([folder(root, names)], HOW)) & keys(pack([folder(root, names)], how))
