"""Samples of a tar, by WebDataset's conventions and by folders, and the tars that are refused."""

import json
import random
import subprocess
import tarfile
import tracemalloc

import pytest

from tests.data.archives.making import in_folders, jpeg, opened, tarred, with_classes
from trainer.data.archives import tars
from trainer.data.archives.indexes import Archive
from trainer.errors import SetupError


def looked(tmp_path, members, **options):
    shard = Archive.of(tarred(tmp_path / "a.tar", members, **options))
    return shard, tars.read_index(shard)


def samples(index):
    """Return (name, class or None) of each sample."""
    texts = [*index.texts, None]
    return [
        (name, texts[label])
        for name, label in zip(index.list_names(), index.labels.tolist(), strict=True)
    ]


def test_an_index_has_the_offsets_of_the_bytes(tmp_path):
    members = in_folders({"cat": 3, "dog": 4})
    shard, index = looked(tmp_path, members)
    assert samples(index) == [(name, None) for name, _ in members]
    for (_, data), (start, size) in zip(members, index.places.tolist(), strict=True):
        assert tars.encoded(shard, start, size).tobytes() == data
    assert [index.below[n] for n in index.folders] == ["cat"] * 3 + ["dog"] * 4
    with pytest.raises(ValueError, match="larger than"):
        tars.encoded(shard, 512, 2**40)


def test_arrays_next_to_photos_are_no_images(tmp_path):
    """Arrays belong to samples of photos or to their own samples, even several of one class.

    Without photos such a sample is refused.
    """
    sample = [("s.mean.npy", b"1"), ("s.std.npy", b"2"), ("s.json", b'{"label": 1}')]
    _, index = looked(tmp_path, [*with_classes([0, 1]), ("000001.npy", b"x"), *sample])
    assert len(samples(index)) == 2 and index.left == {"other file(s) (.npy)": 3}
    with pytest.raises(SetupError, match=r"a\.tar: s\.std\.npy .*\bseveral images\b"):
        looked(tmp_path, sample)


@pytest.mark.parametrize(
    ("suffix", "content", "wanted"),
    [
        ("cls", b"tabby cat\n", "tabby cat"),
        ("json", json.dumps({"label": 4, "url": "x"}).encode(), "4"),
        ("json", json.dumps({"cls": "cat"}).encode(), "cat"),
        ("json", json.dumps({"caption": "cat"}).encode(), None),
        ("meta.json", b'{"url": "x"}', None),
    ],
)
def test_classes_come_from_files_or_folders(tmp_path, suffix, content, wanted):
    _, index = looked(tmp_path, [("a/1.jpg", jpeg()), (f"a/1.{suffix}", content)])
    assert samples(index) == [("a/1.jpg", wanted)]


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("cls", b""),
        ("cls", b"two\nlines"),
        ("cls", b"\xff\xfe"),
        ("meta.json", b'{"label": 3}'),
        ("json", json.dumps({"label": True}).encode()),
        ("json", json.dumps({"label": 3.0}).encode()),
        ("json", json.dumps({"label": 1, "caption": "x" * 2**20}).encode()),
        ("json", b"[" * 100_000),
    ],
)
def test_a_label_that_is_not_understood_is_named_and_no_folder_stands_for_it(
    tmp_path, suffix, content
):
    path = tarred(
        tmp_path / "a.tar", [("a/1.jpg", jpeg()), (f"a/1.{suffix}", content), ("b/2.jpg", jpeg())]
    )
    with pytest.raises(SetupError, match=rf"a\.tar: .*a/1\.{suffix}\b.*data\.root="):
        opened(path, "data.on_error=skip")


@pytest.mark.parametrize(
    ("members", "first"),
    [
        (
            [("1.jpg", jpeg()), ("1.png", jpeg()), ("1.cls", b"1")],
            r"a\.tar: 1\.jpg .*\bseveral images\b",
        ),
        ([("1.jpg", jpeg()), ("2.jpg", jpeg()), ("1.jpg", jpeg())], r"1\.jpg twice"),
        # WebDataset uses the name holiday for both.
        (
            [("h.0.jpg", jpeg()), ("h.0.cls", b"a"), ("h.1.jpg", jpeg()), ("h.1.cls", b"b")],
            r"h\.0\.cls .*NAME\.cls",
        ),
    ],
)
def test_samples_that_make_no_sense(tmp_path, members, first):
    with pytest.raises(SetupError, match=first):
        looked(tmp_path, [("0.jpg", jpeg()), ("0.cls", b"0"), *members])


def test_suffixes_and_dots_in_names(tmp_path):
    names = [
        "1.jpg",
        "2.JPEG",
        "3.png",
        "4.img",
        "5.webp",
        "a.b/6.x.Png",
        "cat/photo.1.jpg",
        "cat/photo.2.jpg",
    ]
    _, index = looked(tmp_path, [(name, jpeg()) for name in names])
    assert [name for name, _ in samples(index)] == names and not index.left


def test_other_files_of_a_sample_are_ignored(tmp_path):
    members = [
        ("1.json", b'{"label": 4}'),
        ("1.cls", b"1"),
        ("1.jpg", jpeg()),
        ("1.mask.png", jpeg()),
    ]
    _, index = looked(tmp_path, [*members, ("1.txt", b"a cat")])
    assert samples(index) == [("1.jpg", "1")] and index.left == {"other file(s) (.txt)": 1}


def test_files_that_are_no_photos_are_counted(tmp_path):
    members = [
        ("cat", None),
        ("cat/1.jpg", jpeg()),
        ("cat/._1.jpg", b"x"),
        ("cat/3.jpg", "1.jpg"),
        ("b/1.cls", b"1"),
    ]
    _, index = looked(
        tmp_path, [*members, ("README", b"x"), ("cat/4.txt", b"x"), ("cat/5.jpg.gz", b"x")]
    )
    others = [f"other file(s) ({suffix})" for suffix in ("without a suffix", ".txt", ".gz", ".cls")]
    assert index.left == dict.fromkeys([*others, "hidden file(s)", "link(s) in shards"], 1)
    assert len(index) == 1


def test_images_are_not_read_to_index_them(tmp_path):
    """200 MB of image, in a file that is mostly hole."""
    path = tarred(tmp_path / "a.tar", in_folders({"cat": 1}))
    member = tarfile.TarInfo("cat/big.jpg")
    member.size = 200 * 2**20
    with open(path, "r+b") as file:
        file.write(member.tobuf())
        file.truncate(member.size + 512 + 1024)
    tracemalloc.start()
    index = tars.read_index(Archive.of(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert index.places.tolist() == [[512, member.size]]
    assert peak < 3 * 2**20


LONG = "a" * 90 + "/" + "é" * 60 + "/" + "c" * 120 + ".jpg"
SIZES = (1, 511, 512, 513, 5000, 40_000)
RAW = [(f"{n // 9}/{n:04}.jpg", random.Random(n).randbytes(SIZES[n % 6])) for n in range(40)]


def raw(path):
    """(name, bytes) of all images of a tar; or what is wrong with it."""
    shard = Archive.of(path)
    try:
        index = tars.read_index(shard)
    except SetupError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return str(error)
    places = (tars.encoded(shard, start, size).tobytes() for start, size in index.places.tolist())
    return [*zip(index.list_names(), places, strict=True)]


@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "posix"])
def test_tars_of_gnu_tar_are_read(tmp_path, kind):
    members = RAW if kind == "v7" else [*RAW, (LONG, b"long")]
    for name, data in members:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    command = [
        "tar",
        f"--format={kind}",
        "--sort=name",
        "-C",
        tmp_path / "in",
        "-cf",
        tmp_path / "a.tar",
        ".",
    ]
    subprocess.run(command, check=True)
    assert raw(tmp_path / "a.tar") == members


def test_every_cut_is_noticed_or_loses_nothing(tmp_path):
    expected = RAW[:8]
    whole = tarred(tmp_path / "a.tar", expected).read_bytes()
    cuts = [*range(0, len(whole), 509), *range(0, len(whole), 512)]
    for end in cuts:
        (tmp_path / "cut.tar").write_bytes(whole[:end])
        actual = raw(tmp_path / "cut.tar")
        assert isinstance(actual, str) or actual == expected, end


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path):
    """Bits of the second header are flipped, where tarfile stops without an error.

    Some bits of the checksum do not change its meaning.
    """
    path = tmp_path / "b.tar"
    members = RAW[1:4]
    whole = tarred(tmp_path / "a.tar", members, format=tarfile.USTAR_FORMAT).read_bytes()
    for bit in range(1024 * 8, 1524 * 8, 13):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        actual = raw(path)
        assert isinstance(actual, str) or (148 <= bit // 8 - 1024 < 156 and actual == members)


def test_a_header_that_is_zeros_is_no_end_and_joined_tars_are_refused(tmp_path):
    path = tmp_path / "b.tar"
    members = RAW[1:4]
    whole = tarred(tmp_path / "a.tar", members).read_bytes()
    for damaged in (whole[:1024] + bytes(512) + whole[1536:], whole + whole):
        path.write_bytes(damaged)
        assert "tar -A" in raw(path)


def test_noise_ends_in_a_sentence(tmp_path):
    draw = random.Random(0)
    path = tmp_path / "a.tar"
    whole = tarred(
        tmp_path / "b.tar",
        [(LONG, b"one"), ("two.jpg", b"x" * 700)],
        format=tarfile.PAX_FORMAT,
    )
    whole = whole.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 20)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        raw(path)
    with tarfile.open(path, "w:gz") as file:
        file.add(__file__)
    for other in (path.read_bytes(), b"<html>not found</html>" * 100, b""):
        path.write_bytes(other)
        assert "byte 0, compressed" in raw(path)


@pytest.mark.parametrize("kind", ["gnu", "posix"])
def test_sparse_files_are_refused(tmp_path, kind):
    with open(tmp_path / "hole.jpg", "wb") as file:
        file.truncate(2**20)
    path = tmp_path / "a.tar"
    subprocess.run(
        ["tar", f"--format={kind}", "-S", "-C", tmp_path, "-cf", path, "hole.jpg"], check=True
    )
    actual = raw(path)
    assert "hole.jpg" in actual and "--sparse" in actual
