"""Two processes at one cache: one removes or builds what another one is about to use.

A hook does the other process's part exactly between two system calls of the first.
"""

import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.cache.caches import once, opened
from trainer.data.cache import cache_blocks, homes, stored
from trainer.data.cache.cached_set import build_block, check_photos, list_missing
from trainer.data.cache.stored import CachedFolder, Format, block_path, pack
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.errors import SetupError
from trainer.saving import locks

HOW = Format("raw", 8, 3)


class Cache:
    """A cache of one block, of six uncompressed photos, so that all files have the same size."""

    def __init__(self, folder):
        self.root = folder / "photos"
        self.home = folder / "home"
        self.root.mkdir()
        self.home.mkdir()
        for number in range(6):
            self.save(number, number)
        self.packing = pack([self.folder()], HOW)
        self.key, self.paths = self.packing.keys[0], self.packing.paths[0]
        self.block = Path(block_path(str(self.home), self.key))
        self.build()

    def save(self, number, colour):
        path = self.root / f"{number}.png"
        times = path.stat() if path.exists() else None
        Image.fromarray(np.full((9, 9, 3), colour, np.uint8)).save(
            self.root / "new.png", compress_level=0
        )
        if times is not None:
            os.utime(self.root / "new.png", ns=(times.st_atime_ns, times.st_mtime_ns))
        (self.root / "new.png").replace(path)

    def folder(self):
        return PhotoFolder(
            self.root,
            [f"{number}.png" for number in range(6)],
            np.zeros(6),
        )

    def build(self):
        """Another run builds the block, whatever is there."""
        self.block.unlink(missing_ok=True)
        build_block(str(self.home), self.key, self.paths, HOW)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "PHOTOS_PER_BLOCK", 2**60)
    return Cache(tmp_path)


def test_a_block_that_another_run_built_again_is_not_removed_as_damaged(cache, monkeypatch):
    """Damage is read, another run builds the block again, and only then the reader removes what it
    read.
    """
    content = cache.block.read_bytes()
    cache.block.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    completed = once(monkeypatch, os, "preadv", cache.build)
    folder = CachedFolder(cache.folder(), HOW, 0, cache.home, cache.packing)
    folder.open(5, 3)
    assert completed and folder.uncached == 1
    assert list_missing(cache.packing, cache.home) == [] and [*cache.home.iterdir()] == [
        cache.block
    ]
    folder.open(5, 3)
    assert folder.uncached == 1


def test_a_block_that_another_run_built_again_is_not_removed_as_changed(cache, monkeypatch):
    cache.save(2, 200)
    completed = once(monkeypatch, stored, "hash_content", cache.build)
    check_photos(cache.packing, cache.home)
    assert completed and list_missing(cache.packing, cache.home) == []
    folder = CachedFolder(cache.folder(), HOW, 0, cache.home, cache.packing)
    assert folder.read(2, 3)[0].unique().tolist() == [200]
    assert folder.uncached == 0


def test_a_changed_block_is_removed_once_another_process_lets_go_of_its_draft(cache, monkeypatch):
    """The block is never kept, because its pixels are those of another photo."""
    cache.save(2, 200)
    with ExitStack() as other:
        other.enter_context(locks.claim_file(cache.block.with_suffix(cache_blocks.DRAFT)))
        monkeypatch.setattr(stored, "RETRY_SECONDS", 0)
        with pytest.raises(OSError, match="claimed"):
            check_photos(cache.packing, cache.home)
        monkeypatch.setattr(stored.time, "sleep", lambda seconds: other.close())
        check_photos(cache.packing, cache.home)
    assert list_missing(cache.packing, cache.home) == [0] and not [*cache.home.iterdir()]


def test_photos_are_not_written_into_a_block_of_other_photos(cache, monkeypatch):
    """The photos were copied: the block gets their new paths, unless it has been replaced."""
    for number in range(6):
        cache.save(number, number)
    left = []

    def rebuild():
        cache.save(2, 200)
        cache.build()
        left.append(cache.block.read_bytes())

    once(monkeypatch, stored, "hash_content", rebuild)
    check_photos(cache.packing, cache.home)
    assert left and cache.block.read_bytes() == left[0]


def test_a_draft_that_another_process_claimed_stays_its_own(cache, monkeypatch):
    """A builder renames its draft to the block.

    The block is removed at once, and another process builds it.
    """
    draft = cache.block.with_suffix(cache_blocks.DRAFT)
    cache.block.unlink()
    with ExitStack() as other:

        def claim():
            cache.block.unlink()
            assert other.enter_context(locks.claim_file(draft)) is not None

        done = once(monkeypatch, os, "replace", claim)
        build_block(str(cache.home), cache.key, cache.paths, HOW)
        assert done and draft.exists()
    assert not draft.exists()


def test_drafts_that_are_written_to_stay_and_others_go(photos):
    """A worker may outlive its run for a moment and would rename its draft over ours."""
    home, lock = opened(photos)
    os.close(lock)
    used = home / "1.part"
    left = home / "2.part"
    left.touch()
    with locks.claim_file(used):
        os.close(opened(photos)[1])
        assert used.exists() and not left.exists()
    os.close(opened(photos)[1])
    assert not used.exists()


def test_a_folder_that_is_deleted_while_it_is_opened_is_made_again(photos, monkeypatch):
    real = os.mkdir
    refused = []

    def vanishing(path, *words, **named):
        if Path(path).parent.name == "cache" and not refused:
            refused.append(path)
            # The folder existed, and has been deleted since.
            raise FileExistsError(17, "File exists", str(path))
        return real(path, *words, **named)

    monkeypatch.setattr(os, "mkdir", vanishing)
    home, lock = opened(photos)
    assert refused and locks.is_at(lock, home / homes.USED)
    os.close(lock)


@pytest.mark.parametrize("link", ["folder", "above"])
def test_a_dangling_link_instead_of_a_folder_is_refused(photos, tmp_path, link):
    home, lock = opened(photos)
    os.close(lock)
    shutil.rmtree(home.parent)
    place = home if link == "folder" else home.parent
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "nowhere")
    cache_dir = re.escape(str(home.parent))
    with pytest.raises(SetupError, match=rf"^{cache_dir} .*data\.cache_dir="):
        opened(photos)
