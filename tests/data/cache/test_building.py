"""A cache is built by any process, continues after a kill, and reports what does not fit."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import warm
from tests.command_line import PROJECT, environment
from tests.data.photo_folders import photo
from trainer.data.cache import cached_set, stored
from trainer.data.cache.cache_blocks import read
from trainer.data.cache.cached_set import build, check_photos, estimate_bytes, list_missing
from trainer.data.cache.stored import CachedFolder, Format, block_path, pack, prepared
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.errors import DiskFullError, PeerError, SetupError
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.saving import locks

HOW = Format("raw", 24, 3)
SCRIPT = """
import resource, sys
from pathlib import Path
from tests import warm
from tests.data.cache.test_building import HOW, folder_of, packed
from trainer.data.cache.cached_set import build
if __name__ == "__main__":
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
        warm.start_none_warm()  # so that its workers have that limit too
    build(packed(Path(sys.argv[1])), HOW, Path(sys.argv[2]), workers=1, show=False, patience=60)
"""


def folder_of(root):
    return PhotoFolder(
        root,
        sorted(path.name for path in root.glob("*.png")),
        np.zeros(len(list(root.glob("*.png")))),
    )


def packed(root):
    stored.PHOTOS_PER_BLOCK = 4  # many small blocks
    return pack([folder_of(root)], HOW)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number in range(120):
        photo(root / f"{number:03}.png", (40, 40), number)
    return root


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "PHOTOS_PER_BLOCK", 4)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def require_right(home, photos):
    """Assert that the cache has all blocks of the photos, with the right contents, and no other
    file.
    """
    cache = packed(photos)
    assert {path.name for path in home.iterdir()} == {
        os.path.basename(block_path("", key)) for key in names(cache)
    }
    for key, paths in zip(names(cache), cache.paths, strict=True):
        for row, path in enumerate(paths):
            stored = read(block_path(str(home), key), key, row)
            assert np.array_equal(stored.data, prepared(path, HOW).data)


def names(found):
    return found.keys


def started(photos, home, *limit):
    words = [sys.executable, "-c", SCRIPT, str(photos), str(home), *limit]
    return warm.Popen(
        words,
        cwd=PROJECT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_jobs_at_once_make_one_cache(photos, home):
    jobs = [started(photos, home) for _ in range(2)]
    ended = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ended
    require_right(home, photos)


def test_killed_at_any_moment_it_goes_on(photos, home, full):
    """The moments are random; what was whole stays, and what was begun is no block."""
    drawn = random.Random(1)
    for _ in range(200 if full else 1):
        job = started(photos, home)
        limit = time.monotonic() + 60
        before = len(list_missing(packed(photos), home))
        while (
            len(list_missing(packed(photos), home)) == before
            and job.poll() is None
            and time.monotonic() < limit
        ):
            time.sleep(0.01)
        time.sleep(drawn.uniform(0, 0.1))
        job.send_signal(signal.SIGKILL)
        job.communicate()
        if not list_missing(packed(photos), home):
            require_right(home, photos)
            for path in home.iterdir():
                path.unlink()
    build(packed(photos), HOW, home, workers=1, show=False, patience=60)
    require_right(home, photos)


def replace_file(path, content):
    """Replace a file by one with the same time, which has another place on the disk."""
    times = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(content)
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)


def test_a_photo_of_the_same_size_and_time_is_noticed_and_a_copy_changes_nothing(home, tmp_path):
    root = tmp_path / "arrays"
    root.mkdir()
    for number in range(40):
        Image.fromarray(np.full((9, 9, 3), number, np.uint8)).save(
            root / f"{number:03}.png", compress_level=0
        )
    build(packed(root), HOW, home, workers=1, show=False, patience=60)
    for path in root.iterdir():
        replace_file(path, path.read_bytes())
    found = packed(root)
    check_photos(found, home)
    assert list_missing(found, home) == []
    for key, paths in zip(names(found), found.paths, strict=True):
        with open(block_path(str(home), key), "rb") as file:
            known_names = stored.cache_blocks.read_origins(file, len(paths))
        assert known_names["placing"].tolist() == [stored.hash_location(path) for path in paths], (
            "compared at each start"
        )
    first = root / "003.png"
    last = root / "030.png"
    contents = first.read_bytes(), last.read_bytes()
    assert len(contents[0]) == len(contents[1])
    replace_file(first, contents[1])
    check_photos(packed(root), home)
    assert len(list_missing(packed(root), home)) == 1
    build(packed(root), HOW, home, workers=1, show=False, patience=60)
    require_right(home, root)


def test_blocks_of_earlier_versions_are_read(home, photos):
    cache = packed(photos)
    for key, paths in zip(names(cache), cache.paths, strict=True):
        with open(block_path(str(home), key), "wb+") as file:
            stored.cache_blocks.write(
                file, key, (prepared(path, HOW) for path in paths), len(paths)
            )
    check_photos(cache, home)
    assert list_missing(cache, home) == []
    require_right(home, photos)


def test_what_another_began_and_does_not_finish_is_given_up(photos, home, monkeypatch):
    monkeypatch.setattr(cached_set, "POLL_SECONDS", 0.01)
    cache = packed(photos)
    draft = Path(block_path(str(home), names(cache)[0])).with_suffix(".part")
    with locks.claim_file(draft) as file:
        assert file is not None
        with pytest.raises(PeerError, match=r"\b1 block.*\b0\.5 s"):
            build(cache, HOW, home, workers=1, show=False, patience=0.5)
    build(cache, HOW, home, workers=1, show=False, patience=60)
    require_right(home, photos)


@pytest.mark.slow
def test_a_full_disk_says_what_to_do(photos, home):
    message = started(photos, home, "4000").communicate(timeout=120)[1]  # a file's bytes at most
    assert f"DiskFullError: {home}: " in message, message
    assert "data.cache_format=jpeg" in message, message
    assert not list(home.glob("*.part"))
    build(packed(photos), HOW, home, workers=1, show=False, patience=60)
    require_right(home, photos)


def test_the_size_is_about_that_and_what_does_not_fit_is_not_begun(photos, tmp_path, monkeypatch):
    paths = [os.fsencode(path) for path in photos.glob("*.png")]
    assert (
        estimate_bytes(paths, HOW) == 120 * 24 * 24 * 3
        and estimate_bytes([b"/no/such.png"], HOW) == 0
    )
    monkeypatch.setattr(cached_set, "RESERVED_BYTES", 2**60)
    words = [
        "data.name=imagefolder",
        f"data.root={photos}",
        f"data.cache_dir={tmp_path}",
        "data.cache=disk",
    ]
    with (
        ExitStack() as closing,
        pytest.raises(DiskFullError, match=r"\b120 photos\b.*\bfree: .*data\.cache_format=jpeg"),
    ):
        cached_set._open_complete(
            (folder_of(photos), folder_of(photos)), HOW, load(None, *words), Place(), print, closing
        )
    assert not [*tmp_path.glob("*/*.block")]


def test_photos_that_are_exchanged_while_they_are_stored_are_not(
    photos, home, tmp_path, monkeypatch
):
    own = tmp_path / "mine"
    own.mkdir()
    for path in sorted(photos.glob("*.png"))[:8]:
        (own / path.name).write_bytes(path.read_bytes())
    cache = packed(own)
    real = cached_set.prepared
    monkeypatch.setattr(cached_set, "prepared", lambda path, how: os.utime(path) or real(path, how))
    for key, paths in zip(names(cache), cache.paths, strict=True):
        with pytest.raises(SetupError, match=rf"{own}: "):
            cached_set.build_block(str(home), key, list(paths), HOW)
    assert not list(home.iterdir()) and names(packed(own)) != names(cache)


def test_unreadable_photos_are_left_out_and_read_again(photos, home, monkeypatch):
    def broken(path, how):
        raise OSError(errno.EIO, "broken on purpose")

    monkeypatch.setattr(cached_set, "prepared", broken)
    found = packed(photos)
    cached_set.build_block(str(home), names(found)[0], found.paths[0], HOW)
    assert read(block_path(str(home), names(found)[0]), names(found)[0], 0) is None
    folder = CachedFolder(folder_of(photos), HOW, 0, home, found)
    row = next(n for n in range(120) if folder.address(n) == found.paths[0][0])
    assert folder.open(row, 3)[0].height == 40 and folder.uncached == 1
