"""A cache is built by whoever is there, goes on where a killed one was, and says what does not fit."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import warm
from tests.command_line import PROJECT, environment
from trainer.data.cache import building, stored
from trainer.data.cache.building import Estimate, build, estimate, missing, require_room
from trainer.data.cache.cache_blocks import read
from trainer.data.cache.stored import Format, block_path, pack, prepared
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.errors import DiskFullError, PeerError
from trainer.saving import locks

HOW = Format("raw", 24, 3)
SCRIPT = """
import resource, sys
from pathlib import Path
from tests import warm
from tests.data.cache.test_building import HOW, folder_of, packed
from trainer.data.cache.building import build
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
    drawn = np.random.default_rng(0)
    for number in range(120):
        Image.fromarray(drawn.integers(0, 256, (40, 40, 3), np.uint8)).save(root / f"{number:03}.png")
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
    monkeypatch.setattr(building, "POLL", 0.01)
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


def test_what_does_not_fit_is_not_begun(home):
    with pytest.raises(DiskFullError, match=r"\b10 photos\b.*\b1,048,576\.00 GiB.*data\.cache_format="):
        require_room(home, Estimate(10, 2**50, 1.0), HOW)
    require_room(home, Estimate(10, 1000, 1.0), HOW)


def test_an_estimate_is_near(photos):
    paths = [os.fsencode(path) for path in photos.glob("*.png")]
    found = estimate(paths, HOW)
    assert found.photos == 120 and found.bytes == 120 * 24 * 24 * 3 and found.seconds > 0
    assert estimate([b"/no/such.png"], HOW).bytes == 0


def test_a_photo_that_is_exchanged_while_it_is_stored_is_not(photos, home, tmp_path, monkeypatch):
    """Its block is not made, and nobody waits for it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for path in sorted(photos.glob("*.png"))[:8]:
        (mine / path.name).write_bytes(path.read_bytes())
    found = packed(mine)
    real = building.prepared

    def exchanging(path, how):
        os.utime(path)
        return real(path, how)

    monkeypatch.setattr(building, "prepared", exchanging)
    made = [
        building.make(str(home), key, list(paths), HOW) for key, paths in zip(names(found), found.paths, strict=True)
    ]
    assert {*made} == {building.Made.EXCHANGED} and not list(home.iterdir())
    again = packed(mine)
    assert names(again) != names(found)
    for path in sorted(mine.glob("*.png"))[:1]:
        os.utime(path)
    build(again, HOW, home, workers=1, show=False, patience=1)  # returns, with the others made
    assert len(missing(again, home)) == 1


@pytest.mark.parametrize(("number", "passes"), [(errno.EIO, True), (errno.ENOENT, False), (None, False)])
def test_what_may_pass_is_no_reason_to_leave_a_photo_out(photos, home, monkeypatch, number, passes):
    def broken(path, how):
        raise OSError(number, "broken on purpose") if number else OSError("broken on purpose")

    monkeypatch.setattr(building, "prepared", broken)
    found = packed(photos)
    words = str(home), names(found)[0], found.paths[0], HOW
    if passes:
        with pytest.raises(building.UnreadableError, match=r"\.png .*broken on purpose"):
            building.make(*words)
        assert not list(home.iterdir())
    else:
        assert building.make(*words) is building.Made.BUILT
        assert read(block_path(str(home), words[1]), words[1], 0) is None
