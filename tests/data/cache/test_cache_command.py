"""Caches listed and deleted."""

import os
from contextlib import ExitStack

import pytest

from tests.data.cache.test_cached_set import folder_of, words_for
from trainer.data import open_datasets
from trainer.data.cache import cached, homes
from trainer.data.cache.homes import command
from trainer.errors import FolderInUseError, RecipeError
from trainer.processes.resources import locate
from trainer.recipe import load
from trainer.saving import locks


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
