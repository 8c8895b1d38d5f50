"""A cache is built by whoever is there, goes on where a killed one was, and says what does not fit."""

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

from tests import warm
from tests.command_line import PROJECT, environment
from tests.data.photo_folders import photo
from trainer.data.cache import cached_set, stored
from trainer.data.cache.cache_blocks import read
from trainer.data.cache.cached_set import build, bytes_of, missing
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
        warm.nothing()  # so that its workers have that limit too
    build(packed(Path(sys.argv[1])), HOW, Path(sys.argv[2]), workers=1, show=False, patience=60)
"""


def folder_of(root):
    return PhotoFolder(root, sorted(path.name for path in root.glob("*.png")), np.zeros(len(list(root.glob("*.png")))))


def packed(root):
    stored.TOGETHER = 4  # many small blocks
    return pack([folder_of(root)], HOW)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number in range(120):
        photo(root / f"{number:03}.png", (40, 40), number)
    return root


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "TOGETHER", 4)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def require_right(home, photos):
    """Every block is there and holds what its photos are, and nothing else is."""
    found = packed(photos)
    assert {path.name for path in home.iterdir()} == {os.path.basename(block_path("", key)) for key in names(found)}
    for key, paths in zip(names(found), found.paths, strict=True):
        for row, path in enumerate(paths):
            stored = read(block_path(str(home), key), key, row)
            assert np.array_equal(stored.data, prepared(path, HOW).data)


def names(found):
    return [key.tobytes() for key in found.keys]


def started(photos, home, *limit):
    words = [sys.executable, "-c", SCRIPT, str(photos), str(home), *limit]
    return warm.Popen(words, cwd=PROJECT, env=environment(), stderr=subprocess.PIPE, text=True)


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
        before = len(missing(packed(photos), home))
        while len(missing(packed(photos), home)) == before and job.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(drawn.uniform(0, 0.1))
        job.send_signal(signal.SIGKILL)
        job.communicate()
        if not missing(packed(photos), home):
            require_right(home, photos)
            for path in home.iterdir():
                path.unlink()
    build(packed(photos), HOW, home, workers=1, show=False, patience=60)
    require_right(home, photos)


def test_what_another_began_and_does_not_finish_is_given_up(photos, home, monkeypatch):
    monkeypatch.setattr(cached_set, "POLL", 0.01)
    found = packed(photos)
    draft = Path(block_path(str(home), names(found)[0])).with_suffix(".part")
    with locks.claimed(draft) as file:
        assert file is not None
        with pytest.raises(PeerError, match=r"\b1 block.*\b0\.5 s"):
            build(found, HOW, home, workers=1, show=False, patience=0.5)
    build(found, HOW, home, workers=1, show=False, patience=60)
    require_right(home, photos)


@pytest.mark.slow
def test_a_full_disk_says_what_to_do(photos, home):
    told = started(photos, home, "4000").communicate(timeout=120)[1]  # a file's bytes at most
    assert "DiskFullError" in told and "type the same again" in told, told
    assert not list(home.glob("*.part"))
    build(packed(photos), HOW, home, workers=1, show=False, patience=60)
    require_right(home, photos)


def test_the_size_is_about_that_and_what_does_not_fit_is_not_begun(photos, tmp_path, monkeypatch):
    paths = [os.fsencode(path) for path in photos.glob("*.png")]
    assert bytes_of(paths, HOW) == 120 * 24 * 24 * 3 and bytes_of([b"/no/such.png"], HOW) == 0
    monkeypatch.setattr(cached_set, "SPARE", 2**60)
    words = ["data.name=imagefolder", f"data.root={photos}", f"data.cache_dir={tmp_path}", "data.cache=disk"]
    with ExitStack() as closing, pytest.raises(DiskFullError, match=r"\b120 photos\b.*\bfree: data\.cache_format=jpeg"):
        cached_set._filled((folder_of(photos), folder_of(photos)), HOW, load(None, *words), Place(), print, closing)
    assert not [*tmp_path.glob("*/*.block")]


def test_photos_that_are_exchanged_while_they_are_stored_are_not(photos, home, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    for path in sorted(photos.glob("*.png"))[:8]:
        (mine / path.name).write_bytes(path.read_bytes())
    found, real = packed(mine), cached_set.prepared
    monkeypatch.setattr(cached_set, "prepared", lambda path, how: os.utime(path) or real(path, how))
    for key, paths in zip(names(found), found.paths, strict=True):
        with pytest.raises(SetupError, match=rf"{mine}: .*type the same again"):
            cached_set.make(str(home), key, list(paths), HOW)
    assert not list(home.iterdir()) and names(packed(mine)) != names(found)


def test_what_cannot_be_read_is_left_out_and_read_anew(photos, home, monkeypatch):
    def broken(path, how):
        raise OSError(errno.EIO, "broken on purpose")

    monkeypatch.setattr(cached_set, "prepared", broken)
    found = packed(photos)
    cached_set.make(str(home), names(found)[0], found.paths[0], HOW)
    assert read(block_path(str(home), names(found)[0]), names(found)[0], 0) is None
    folder = CachedFolder(folder_of(photos), HOW, 0, home, found)
    row = next(n for n in range(120) if folder.address(n) == found.paths[0][0])
    assert folder.open(row, 3)[0].height == 40 and folder.uncached == 1
