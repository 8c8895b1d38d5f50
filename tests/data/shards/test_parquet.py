"""Parquet of encoded images, as the library `datasets` publishes it."""

import builtins
import os
import pickle
import random

import pytest
import torch

from tests.data.shards.making import jpeg, opened, parquet
from trainer.data.shards import parquet as shards
from trainer.data.shards.indexes import ShardFile
from trainer.errors import SetupError

pa = pytest.importorskip("pyarrow", reason="pip install pyarrow")
import pyarrow.parquet as pq  # noqa: E402

IMAGES = [jpeg(n) for n in range(25)]
LABELS = [n % 2 for n in range(25)]


@pytest.fixture(autouse=True)
def nothing_kept():
    shards._GROUPS.clear()
    shards.opened.cache_clear()


def test_as_it_is_published(tmp_path):
    for n, part in enumerate(("train", "train", "validation", "test")):
        labels = [-1] * 25 if part == "test" else LABELS
        parquet(tmp_path / "data" / f"{part}-{n:05}-of-00002.parquet", IMAGES, labels, ["cat", "dog", "eel"], group=7)
    found = opened(tmp_path)
    assert (len(found.train), len(found.val), found.classes) == (50, 25, ("cat", "dog", "eel"))
    assert found.train.labels.tolist() == LABELS * 2 and found.split.startswith("what is called val")
    assert found.train.where(26) == f"{tmp_path}/data/train-00001-of-00002.parquet/1"
    source = pickle.loads(pickle.dumps(found.train))
    order = random.Random(0).sample(range(50), 50)
    assert all(shards.encoded(*place(source, n)).tobytes() == IMAGES[n % 25] for n in order)
    image, label = source.read(3, 3)
    assert image.dtype == torch.uint8 and image.shape == (3, 30, 40) and label == 1


def place(source, index):
    path, _, size, time, group, row = source.address(index).split(b"\0")
    return ShardFile(path, int(size), int(time)), int(group), int(row)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}])
def test_however_it_is_written(tmp_path, compression, options):
    images = [IMAGES[n % 3] for n in range(25)]
    path = parquet(tmp_path / "a.parquet", images, LABELS, compression=compression, group=10, **options)
    found = opened(path)
    for source in (found.train, found.val):
        for n in range(len(source)):
            assert shards.encoded(*place(source, n)).tobytes() == images[int(source.name(n).rpartition("/")[2])]


@pytest.mark.parametrize(("image", "label"), [("img", "fine_label"), ("image", "label"), ("images", "labels")])
def test_columns_by_other_names(tmp_path, image, label):
    found = opened(parquet(tmp_path / "a.parquet", IMAGES, LABELS, ["a", "b"], image, label))
    assert found.classes == ("a", "b")


def test_plain_bytes_and_labels_of_text(tmp_path):
    for kind in (pa.binary(), pa.large_binary()):
        table = pa.table({"image": pa.array(IMAGES, kind), "label": ["dog" if n else "cat" for n in LABELS]})
        pq.write_table(table, tmp_path / "a.parquet")
        found = opened(tmp_path / "a.parquet")
        assert found.classes == ("cat", "dog") and found.train.read(0, 3)[0].shape == (3, 30, 40)


@pytest.mark.parametrize("kind", ["string_view", "category", "boolean"])
def test_classes_and_images_of_other_types(tmp_path, kind):
    """As pandas writes a column of categories, each row group with names of its own, and others their columns."""
    if kind == "string_view" and not hasattr(pa, kind):
        pytest.skip("this pyarrow has no views")
    names = [str(bool(n)) for n in LABELS] if kind == "boolean" else ["dog" if n else "cat" for n in LABELS]
    if kind == "category":
        labels = pa.chunked_array([pa.array(names[n : n + 9][::-1]).dictionary_encode() for n in range(0, 25, 9)])
        names = labels.cast(pa.string()).to_pylist()
    else:
        labels = pa.array([name == "True" for name in names] if kind == "boolean" else names)
    images = pa.array(IMAGES)
    if kind == "string_view":
        labels, images = labels.cast(pa.string_view()), images.cast(pa.binary_view())
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "a.parquet", row_group_size=9)
    found = opened(tmp_path / "a.parquet")
    for part in (found.train, found.val):
        rows = [int(part.name(n).rpartition("/")[2]) for n in range(len(part))]
        assert [found.classes[label] for label in part.labels] == [names[row] for row in rows]
        assert all(shards.encoded(*place(part, n)).tobytes() == IMAGES[row] for n, row in enumerate(rows))


def test_labels_without_names_are_numbers(tmp_path):
    for kind in (pa.int64(), pa.uint8(), pa.int32()):
        path = parquet(tmp_path / "a.parquet", IMAGES, pa.array([2 * n for n in LABELS], kind))
        assert opened(path).classes == ("0", "1", "2")


def test_rows_without_a_label_or_an_image(tmp_path):
    path = parquet(tmp_path / "a.parquet", [*IMAGES, jpeg(), None], [*LABELS, None, 1])
    with pytest.raises(SetupError, match=r"a\.parquet/25\b"):
        opened(path)
    found = opened(path, "data.on_error=skip")
    assert len(found.train) + len(found.val) == 26
    source = next(
        part for part in (found.train, found.val) if "a.parquet/26" in {part.name(n) for n in range(len(part))}
    )
    row = next(n for n in range(len(source)) if source.name(n) == "a.parquet/26")
    with pytest.raises(ValueError, match="image"):
        source.open(row, 3)


def test_what_is_no_such_table(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), tmp_path / "a.parquet")
    with pytest.raises(SetupError, match=r"a\.parquet.*\btext \(string\), label \(int64\)"):
        opened(tmp_path / "a.parquet")
    whole = parquet(tmp_path / "b.parquet", IMAGES, LABELS).read_bytes()
    for damaged in (b"", b"no parquet", whole[:-100], b"x" * len(whole)):
        (tmp_path / "b.parquet").write_bytes(damaged)
        with pytest.raises(SetupError, match=r"b\.parquet: .*Parquet"):
            opened(tmp_path / "b.parquet")


def test_names_that_differ_between_shards(tmp_path):
    parquet(tmp_path / "a.parquet", IMAGES, LABELS, ["cat", "dog"])
    parquet(tmp_path / "b.parquet", IMAGES, LABELS, ["dog", "cat"])
    with pytest.raises(SetupError, match=r"\bcat, dog\b.*\bdog, cat\b"):
        opened(tmp_path)


def test_a_group_too_large_is_refused_with_what_to_type(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS, ["cat", "dog"])
    monkeypatch.setattr(shards, "GROUP", 10_000)
    with pytest.raises(SetupError, match=r"row_group_size=100\b"):
        opened(path)
    pq.write_table(pq.read_table(path), tmp_path / "b.parquet", row_group_size=4)
    assert opened(tmp_path / "b.parquet").classes == ("cat", "dog")


def test_in_order_each_group_is_read_once(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS, group=5)
    shard, reads = ShardFile.of(path), []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, n, *a, **k: reads.append(n) or read(self, n, *a, **k)
    )
    for n in range(25):
        assert shards.encoded(shard, *divmod(n, 5)).tobytes() == IMAGES[n]
    assert reads == [0, 1, 2, 3, 4]
    monkeypatch.setattr(shards, "KEPT", 1)
    for n in (0, 1, 5, 6, 0):
        shards.encoded(shard, *divmod(n, 5))
    assert reads[5:] == [1, 0], "one group is kept however large it is"


def test_what_it_costs_is_told_where_no_cache_mends_it(tmp_path):
    path = parquet(tmp_path / "a.parquet", [jpeg(n, (300, 200)) for n in range(20)], LABELS[:20], group=10)
    told = opened(path).notes["parquet"]
    assert "10 rows" in told and "data.cache=disk" in told
    assert "parquet" not in opened(path, "data.cache=disk").notes


def test_a_shard_that_was_exchanged(tmp_path):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS)
    source = opened(path).train
    os.utime(path, ns=(1, 1))
    shards._GROUPS.clear()
    shards.opened.cache_clear()
    with pytest.raises(OSError, match=r"a\.parquet.* changed"):
        source.open(0, 3)


def test_without_pyarrow(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS)
    importing = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SetupError, match=r"\.parquet.*pip install pyarrow"):
        opened(path)
