"""Addresses of images mean the same in every process, and show if an image may have changed."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data.archives.making import in_folders, tarred
from trainer.data.archives import tars
from trainer.data.archives.indexes import Archive
from trainer.data.archives.opening import ArchivedPhotos
from trainer.data.encoded import archive_prefix, compute_identity, open_header, read_encoded
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
    index = tars.read_index(shard)
    names = [name for name, _ in members]
    labels = np.arange(3)
    begins = [archive_prefix(shard, tars.KIND)]
    rows = np.zeros(3, np.int32)
    inside = ArchivedPhotos(
        tmp_path, [f"a.tar/{name}" for name in names], labels, begins, rows, index.places
    )
    return PhotoFolder(tmp_path, names, labels), inside


def test_the_same_bytes_and_headers(pair):
    for one, other in zip(*([part.address(n) for n in range(3)] for part in pair), strict=True):
        assert read_encoded(one).tobytes() == read_encoded(other).tobytes()
        assert open_header(one).read() == open_header(other).read()
        assert open_encoded(read_encoded(other), 3).height == 30


def test_a_part_is_some_of_them(pair):
    for whole in pair:
        part = pickle.loads(pickle.dumps(whole.part(np.array([2, 0]))))
        assert [part.address(0), part.address(1)] == [whole.address(2), whole.address(0)]
        assert part.labels.tolist() == [2, 0]
        assert part.name(1) == whole.name(0)
        assert len(whole) == 3
        assert part.digest() != whole.digest()


def test_an_identity_changes_with_the_file(pair):
    folder, inside = pair
    before = compute_identity(folder.address(0))
    os.utime(folder.where(0), ns=(1, 1))
    assert compute_identity(folder.address(0)) != before
    address = inside.address(0)
    shard = Path(os.fsdecode(address.partition(b"\0")[0]))
    os.utime(shard, ns=(1, 1))
    assert (
        archive_prefix(Archive.of(shard), tars.KIND) not in address
        and compute_identity(address) == address
    )
