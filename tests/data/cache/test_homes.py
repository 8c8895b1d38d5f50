"""Caches that several processes use: nobody's is removed under him; and what lists and deletes them."""

import os
from contextlib import ExitStack

import numpy as np
import pytest

from tests.data.cache.test_cached_set import folder_of, words_for
from tests.data.photo_folders import photo_set
from trainer.data import open_datasets
from trainer.data.cache import cache_blocks, cached, homes
from trainer.data.cache.homes import command
from trainer.data.cache.stored import Format, pack
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.errors import FolderInUseError, RecipeError
from trainer.processes.resources import locate
from trainer.recipe import DataRecipe, load
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


@pytest.fixture
def where(tmp_path):
    return f"data.cache_dir={tmp_path / 'cache'}"


@pytest.fixture
def built(tmp_path):
    recipe = load(None, *words_for(folder_of(tmp_path / "photos"), "data.cache=disk"))
    with ExitStack() as closing:
        cached(open_datasets(recipe), recipe, locate(recipe), print, closing)
    (home,) = (tmp_path / "cache").iterdir()
    return home


def test_what_there_is_is_listed(built, where, capsys):
    assert command([where]) == command(["list", where]) == 0
    listed = capsys.readouterr().out
    assert f"{built.name} " in listed and " 24 " in listed and "raw 44" in listed and "today" in listed
    assert listed.count("1 cache,") == 2 and str(built.parent.parent / "photos") in listed


def test_no_caches(tmp_path, capsys):
    assert command([f"data.cache_dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("no caches") and "data.cache=disk" in told


def test_deleted_once_one_agrees_and_nobody_uses_it(built, where, capsys):
    with pytest.raises(RecipeError, match="add yes=true"):
        command(["delete", built.name, where])
    with pytest.raises(RecipeError, match=rf"'photos' is no cache .*{built.name}"):
        command(["delete", built.name, "photos", where, "yes=true"])
    lock = locks.open_lock(built / homes.USED)
    locks.lock_shared(lock)
    with pytest.raises(FolderInUseError, match=rf"{built.name} .*in use"):
        command(["delete", built.name, where, "yes=true"])
    assert built.exists()
    os.close(lock)
    command(["delete", built.name, where, "yes=true"])
    assert not built.exists() and "deleted" in capsys.readouterr().out


def test_what_is_not_meant(where):
    for words in (["build", "recipe=finetune"], ["verify"], ["delete"], ["list", "--all"]):
        with pytest.raises(RecipeError):
            command([*words, where])
