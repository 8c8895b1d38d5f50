"""Caches that several processes use: nobody's is removed under him."""

import os

import numpy as np
import pytest

from tests.data.photo_folders import photo_set
from trainer.data.cache import cache_blocks, homes
from trainer.data.cache.stored import Format, pack
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.saving import locks

HOW = Format("raw", 24, 3)


@pytest.fixture
def photos(tmp_path):
    return photo_set(tmp_path / "photos", {"cat": 3})


def packing_of(root):
    return pack([PhotoFolder(root, [f"cat/{n}.jpg" for n in range(3)], np.zeros(3))], HOW)


def opened(photos, kind="disk", **more):
    data = DataRecipe(cache=kind, cache_dir=str(photos.parent / "cache"), root=str(photos), **more)
    return homes.opened(data, HOW, packing_of(photos))


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_what_one_uses_no_other_removes(photos, kind):
    first = opened(photos, kind)
    (first.path / f"{'0' * 32}{cache_blocks.SUFFIX}").touch()  # of photos that the second does not have
    second = opened(photos, kind)
    homes.sweep()
    assert second.path == first.path and len(list(first.path.glob(f"*{cache_blocks.SUFFIX}"))) == 1
    first.close()  # the second has it still
    homes.sweep()
    assert second.path.is_dir()
    lock = locks.open_lock(second.path / homes.USED)
    assert not locks.lock_alone(lock)
    os.close(lock)
    second.close()
    assert second.path.is_dir() == (kind == "disk")


def test_alone_one_removes_what_lies_there_for_nothing(photos):
    opened(photos).close()
    home = opened(photos)
    old = home.path / f"{'0' * 32}{cache_blocks.SUFFIX}"
    old.touch()
    home.close()
    opened(photos).close()
    assert not old.exists()


def test_a_root_is_the_same_however_it_is_typed(photos, monkeypatch):
    (photos.parent / "link").symlink_to(photos)
    monkeypatch.chdir(photos.parent)
    typed = [photos, photos.parent / "link", photos.relative_to(photos.parent)]
    assert len({tuple(map(bytes, packing_of(root).keys)) for root in typed}) == 1
    names = [homes.name_of(DataRecipe(root=str(root)), HOW) for root in typed]
    assert len({*names}) == 1 and names[0] != homes.name_of(DataRecipe(root=str(photos), labels="a.csv"), HOW)


def test_of_killed_processes_nothing_stays_in_memory(photos):
    home = opened(photos, "ram")
    os.close(home.lock)  # as the kernel does
    homes.sweep()
    assert not home.path.exists()


def test_a_folder_of_somebody_else_may_be_read(photos, monkeypatch):
    home = opened(photos)
    home.close()
    flags = []
    real = os.open

    def read_only(path, flag, *more, **named):
        flags.append(flag)
        if flag & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flag, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    again = opened(photos)
    assert again.path == home.path and any(flag & os.O_RDWR for flag in flags)
    again.close()


def test_a_folder_that_is_a_file_is_one_line(photos):
    (photos.parent / "cache").write_text("")
    with pytest.raises(SetupError, match=r"/cache .*data\.cache_dir="):
        opened(photos)
