"""Caches that several processes use: a cache in use is not removed."""

import os

from tests.data.cache.caches import HOW, opened, packing_of
from trainer.data.cache import cache_blocks, homes
from trainer.recipe import DataRecipe
from trainer.saving import locks


def test_a_block_in_use_is_kept_and_an_unused_one_is_removed(photos):
    home, lock = opened(photos)
    # A block of photos that the second run does not have.
    (home / f"{'0' * 32}{cache_blocks.SUFFIX}").touch()
    second, other = opened(photos)
    assert second == home and len(list(home.glob(f"*{cache_blocks.SUFFIX}"))) == 1
    os.close(lock)  # the second has it still
    tried = locks.open_lock(home / homes.USED)
    assert not locks.try_exclusive_lock(tried)
    os.close(tried)
    os.close(other)
    os.close(opened(photos)[1])
    assert not list(home.glob(f"*{cache_blocks.SUFFIX}"))


def test_a_folder_of_somebody_else_may_be_read(photos, monkeypatch):
    home, lock = opened(photos)
    os.close(lock)
    flags = []
    real = os.open

    def read_only(path, flag, *more, **named):
        flags.append(flag)
        if flag & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flag, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    again, lock = opened(photos)
    assert again == home and any(flag & os.O_RDWR for flag in flags)
    os.close(lock)


def test_a_root_is_the_same_however_it_is_typed(photos, monkeypatch):
    (photos.parent / "link").symlink_to(photos)
    monkeypatch.chdir(photos.parent)
    typed = [photos, photos.parent / "link", photos.relative_to(photos.parent)]
    assert len({tuple(map(bytes, packing_of(root).keys)) for root in typed}) == 1
    names = [homes.name_of(DataRecipe(root=str(root)), HOW) for root in typed]
    assert len({*names}) == 1 and names[0] != homes.name_of(
        DataRecipe(root=str(photos), labels="a.csv"), HOW
    )
