"""Addresses mean the same in every process, and say whether an image may have changed."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.archives.making import in_folders, tarred
from trainer.data.archives import tars
from trainer.data.archives.indexes import Archive
from trainer.data.archives.opening import ArchivedPhotos
from trainer.data.encoded import encoded, header_file, identity, in_archive
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.data.photos.decoding import open_encoded


@pytest.fixture
def pair(tmp_path):
    """The same three images in files and in a tar."""
    members = in_folders({"cat": 3})
    for name, data in members:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    shard = Archive.of(tarred(tmp_path / "a.tar", members))
    index = tars.look(shard)
    names, labels = [name for name, _ in members], np.arange(3)
    begins, rows = [in_archive(shard, tars.KIND)], np.zeros(3, np.int32)
    inside = ArchivedPhotos(tmp_path, [f"a.tar/{name}" for name in names], labels, begins, rows, index.places)
    return PhotoFolder(tmp_path, names, labels), inside


def test_the_same_bytes_and_headers(pair):
    for one, other in zip(*([part.address(n) for n in range(3)] for part in pair), strict=True):
        assert encoded(one).tobytes() == encoded(other).tobytes()
        assert header_file(one).read() == header_file(other).read()
        assert open_encoded(encoded(other), 3).height == 30


def test_a_part_is_some_of_them(pair):
    for whole in pair:
        part = pickle.loads(pickle.dumps(whole.part(np.array([2, 0]))))
        assert [part.address(0), part.address(1)] == [whole.address(2), whole.address(0)]
        assert part.labels.tolist() == [2, 0] and part.name(1) == whole.name(0) and len(whole) == 3
        assert part.digest() != whole.digest()


def test_an_identity_changes_with_the_file(pair):
    folder, inside = pair
    before = identity(folder.address(0))
    os.utime(folder.where(0), ns=(1, 1))
    assert identity(folder.address(0)) != before
    address = inside.address(0)
    shard = Path(os.fsdecode(address.partition(b"\0")[0]))
    os.utime(shard, ns=(1, 1))
    assert in_archive(Archive.of(shard), tars.KIND) not in address and identity(address) == address
