"""Parquet of encoded images, as the library `datasets` publishes it."""

import os
import pickle
import random
import sys

import pytest
import torch

from tests.data.archives.making import jpeg, opened, parquet
from tests.data.photo_folders import names_of
from trainer.data.archives import parquet as shards
from trainer.data.archives.indexes import Archive
from trainer.data.encoded import read_encoded
from trainer.errors import SetupError

pa = pytest.importorskip("pyarrow", reason="pip install pyarrow")
import pyarrow.parquet as pq  # noqa: E402

IMAGES = [jpeg(n) for n in range(25)]
LABELS = [n % 2 for n in range(25)]


@pytest.fixture(autouse=True)
def nothing_kept():
    shards._GROUPS.clear()
    shards.open_table.cache_clear()


def test_published_tables_are_read(tmp_path):
    for n, part in enumerate(("train", "train", "validation", "test")):
        labels = [-1] * 25 if part == "test" else LABELS
        parquet(
            tmp_path / "data" / f"{part}-{n:05}-of-00002.parquet",
            IMAGES,
            labels,
            ["cat", "dog", "eel"],
            group=7,
        )
    datasets = opened(tmp_path)
    assert (len(datasets.train), len(datasets.val), datasets.classes) == (
        50,
        25,
        ("cat", "dog", "eel"),
    )
    assert datasets.train.labels.tolist() == LABELS * 2
    assert datasets.val.where(0) == f"{tmp_path}/data/validation-00002-of-00002.parquet/0"
    assert "val" in datasets.holdout.split()
    assert datasets.train.where(26) == f"{tmp_path}/data/train-00001-of-00002.parquet/1"
    source = pickle.loads(pickle.dumps(datasets.train))
    order = random.Random(0).sample(range(50), 50)
    assert all(read_encoded(source.address(n)).tobytes() == IMAGES[n % 25] for n in order)
    image, label = source.read(3, 3)
    assert image.dtype == torch.uint8 and image.shape == (3, 30, 40) and label == 1


@pytest.mark.parametrize(
    "options", [{"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"}]
)
@pytest.mark.parametrize(
    ("image", "label"), [("img", "fine_label"), ("image", "label"), ("images", "labels")]
)
def test_however_it_is_written(tmp_path, image, label, options):
    images = [IMAGES[n % 3] for n in range(25)]
    datasets = opened(
        parquet(
            tmp_path / "a.parquet", images, LABELS, ["a", "b"], image, label, group=10, **options
        )
    )
    assert datasets.classes == ("a", "b")
    for source in (datasets.train, datasets.val):
        for n, name in enumerate(names_of(source)):
            assert read_encoded(source.address(n)).tobytes() == images[int(name.rpartition("/")[2])]


@pytest.mark.parametrize("kind", ["", "large_", "_view"])
def test_plain_bytes_and_labels_of_text(tmp_path, kind):
    make = [
        f"{kind}{name}" if kind != "_view" else f"{name}{kind}" for name in ("string", "binary")
    ]
    if not hasattr(pa, make[0]):
        pytest.skip("this pyarrow has no views")
    names = ["dog" if n else "cat" for n in LABELS]
    texts = pa.array(names).cast(getattr(pa, make[0])())
    images = pa.array(IMAGES).cast(getattr(pa, make[1])())
    pq.write_table(
        pa.table({"image": images, "label": texts}), tmp_path / "a.parquet", row_group_size=9
    )
    datasets = opened(tmp_path / "a.parquet")
    for part in (datasets.train, datasets.val):
        rows = [int(name.rpartition("/")[2]) for name in names_of(part)]
        assert [datasets.classes[label] for label in part.labels] == [names[row] for row in rows]
        assert all(
            read_encoded(part.address(n)).tobytes() == IMAGES[row] for n, row in enumerate(rows)
        )


def test_rows_without_a_label_or_an_image(tmp_path):
    path = parquet(
        tmp_path / "a.parquet",
        [*IMAGES, jpeg(), None],
        [*LABELS, None, 1],
    )
    with pytest.raises(SetupError, match=r"a\.parquet/25\b"):
        opened(path)
    datasets = opened(path, "data.on_error=skip")
    assert len(datasets.train) + len(datasets.val) == 26
    rows = [
        (part, n)
        for part in (datasets.train, datasets.val)
        for n in range(len(part))
        if part.name(n).endswith("/26")
    ]
    with pytest.raises(ValueError, match="image"):
        rows[0][0].open(rows[0][1], 3)


def test_other_tables_are_refused(tmp_path):
    for images, labels in (
        (["a"], [0]),
        ([b"a"], [True]),
        ([b"a"], pa.array(["a"]).dictionary_encode()),
    ):
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "a.parquet")
        with pytest.raises(SetupError, match=r"a\.parquet.*\bimage \(\w+\), label \("):
            opened(tmp_path / "a.parquet")
    whole = parquet(tmp_path / "b.parquet", IMAGES, LABELS).read_bytes()
    for damaged in (b"", whole[:-100], b"x" * len(whole)):
        (tmp_path / "b.parquet").write_bytes(damaged)
        with pytest.raises(SetupError, match=r"b\.parquet: .*Parquet"):
            opened(tmp_path / "b.parquet")


def test_names_that_differ_between_shards(tmp_path):
    parquet(tmp_path / "a.parquet", IMAGES, LABELS, ["cat", "dog"])
    parquet(tmp_path / "b.parquet", IMAGES, LABELS, ["dog", "cat"])
    with pytest.raises(SetupError, match=r"\bcat, dog\b.*\bdog, cat\b"):
        opened(tmp_path)


def test_reading_in_order_reads_each_group_once(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS, group=5)
    shard = Archive.of(path)
    reads = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, n, *a, **k: reads.append(n) or read(self, n, *a, **k),
    )
    for n in range(25):
        assert shards.encoded(shard, *divmod(n, 5)).tobytes() == IMAGES[n]
    assert reads == [0, 1, 2, 3, 4]
    monkeypatch.setattr(shards, "CACHE_BYTES", 1)
    for n in (0, 1, 5, 6, 0):
        shards.encoded(shard, *divmod(n, 5))
    assert reads[5:] == [1, 0], "one group is kept however large it is"


def test_a_shard_that_was_exchanged(tmp_path):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS)
    source = opened(path).train
    os.utime(path, ns=(1, 1))
    shards._GROUPS.clear()
    shards.open_table.cache_clear()
    with pytest.raises(OSError, match=r"a\.parquet.* changed"):
        source.open(0, 3)


def test_a_missing_pyarrow_is_answered_with_the_install_command(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", IMAGES, LABELS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"\.parquet.*\bpip install\b.*\bpyarrow\b"):
        opened(path)
