"""Caches that several processes use: nobody's is removed under him."""

import os

import numpy as np
import pytest

from tests.data.photo_folders import photo_set
from trainer.data.cache import cache_blocks, homes
from trainer.data.cache.stored import Format, pack
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.recipe import DataRecipe
from trainer.saving import locks

HOW = Format("raw", 24, 3)


def opened(photos):
    data = DataRecipe(cache="disk", cache_dir=str(photos.parent / "cache"), root=str(photos))
    return homes.opened(data, HOW, packing_of(photos))


def test_what_one_uses_no_other_removes_and_alone_one_does(photos):
    home, lock = opened(photos)
    (home / f"{'0' * 32}{cache_blocks.SUFFIX}").touch()  # of photos that the second does not have
    second, other = opened(photos)
    assert second == home and len(list(home.glob(f"*{cache_blocks.SUFFIX}"))) == 1
    os.close(lock)  # the second has it still
    tried = locks.open_lock(home / homes.USED)
    assert not locks.lock_alone(tried)
    os.close(tried)
    os.close(other)
    os.close(opened(photos)[1])
    assert not list(home.glob(f"*{cache_blocks.SUFFIX}"))


def test_a_folder_of_somebody_else_may_be_read(photos, monkeypatch):
    home, lock = opened(photos)
    os.close(lock)
    flags, real = [], os.open

    def read_only(path, flag, *more, **named):
        flags.append(flag)
        if flag & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flag, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    again, lock = opened(photos)
    assert again == home and any(flag & os.O_RDWR for flag in flags)
    os.close(lock)


@pytest.fixture
def photos(tmp_path):
    return photo_set(tmp_path / "photos", {"cat": 3})


def packing_of(root):
    return pack([PhotoFolder(root, [f"cat/{n}.jpg" for n in range(3)], np.zeros(3))], HOW)


def test_a_root_is_the_same_however_it_is_typed(photos, monkeypatch):
    (photos.parent / "link").symlink_to(photos)
    monkeypatch.chdir(photos.parent)
    typed = [photos, photos.parent / "link", photos.relative_to(photos.parent)]
    assert len({tuple(map(bytes, packing_of(root).keys)) for root in typed}) == 1
    names = [homes.name_of(DataRecipe(root=str(root)), HOW) for root in typed]
    assert len({*names}) == 1 and names[0] != homes.name_of(DataRecipe(root=str(photos), labels="a.csv"), HOW)
