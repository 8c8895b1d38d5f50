"""Files that nobody expects among photos: trained through the cache as without it, or left out and counted."""

import csv
import os
import zlib
from pathlib import Path

import pytest

from tests.command_line import losses, ok, result, trainer
from tests.data.cache.test_cached_set import folder_of, words_for
from tests.data.photo_folders import photo
from tests.data.test_datasets import huge_jpeg


def chunk(kind, data):
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def bomb(path, side=20_000):
    """A PNG of 400 million pixels in half a megabyte."""
    header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    pixels = zlib.compress(bytes((side + 1) * side), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def cut_short(path):
    photo(path, size=(60, 50))
    os.truncate(path, 600)


BAD = {
    "bomb.png": bomb,
    "frame.jpg": huge_jpeg,
    "short.jpg": cut_short,
    "short.png": cut_short,
    "pipe.jpg": os.mkfifo,
    "circle.jpg": lambda path: path.symlink_to(path.name),
    "lost.jpg": lambda path: path.symlink_to("nowhere"),
    "endless.jpg": lambda path: path.symlink_to("/dev/zero"),
    "text.jpg": lambda path: path.write_text("no photo"),
    "noise.webp": lambda path: path.write_bytes(bytes(range(256)) * 40),
}


@pytest.mark.slow
def test_what_is_no_photo_is_skipped_and_counted(tmp_path):
    photos = folder_of(tmp_path / "photos", each=9)
    for name, make in BAD.items():
        make(photos / "cat" / name)
    words = words_for(photos, "data.cache=disk", "data.val_fraction=0.01", f"output={tmp_path / 'run'}", "epochs=1")
    done = trainer(*words)
    assert done.returncode == 3 and "cannot be read (" in done.stderr and "data.on_error=skip" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    ok(*words, "data.on_error=skip")
    with (tmp_path / "run" / "split.csv").open(newline="") as file:
        parts = {Path(row["file"]).name: row["split"] for row in csv.DictReader(file)}
    trained = {name for name in BAD if parts[name] == "train"}
    with (tmp_path / "run" / "skipped.csv").open(newline="") as file:
        skipped = {Path(row["file"]).name for row in csv.DictReader(file) if row["split"] == "train"}
    assert skipped == trained and result(tmp_path / "run")["data"]["skipped"] > 0


def test_what_is_odd_but_a_photo_is_trained_on(tmp_path):
    photos = folder_of(tmp_path / "photos", each=8)
    photo(photos / "cat" / "wide.png", size=(20_000, 1))
    photo(photos / "dog" / "high.png", size=(1, 20_000))
    photo(photos / "dog" / "dot.png", size=(1, 1))
    photo(photos / "cat" / os.fsdecode(b"\xff\xfe.png"), size=(60, 50))
    photo(photos / "cat" / "new\nline.jpg", size=(60, 50))
    (photos / "dog" / "again").symlink_to(photos)  # a circle
    for run, more in {"plain": [], "cached": ["data.cache=disk", "data.cache_size=16384"]}.items():
        ok(*words_for(photos, *more, f"output={tmp_path / run}"))
    assert losses(tmp_path / "plain") == losses(tmp_path / "cached")
    assert result(tmp_path / "cached")["data"]["skipped"] == 0
