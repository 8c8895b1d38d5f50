"""Command `cache`: what it lists and deletes, also while runs use, remove or build caches."""

import os
import shutil
from contextlib import ExitStack

import pytest

from tests.data.cache.caches import folder_of, once, words_for
from trainer.commands import cache
from trainer.commands.cache import command
from trainer.data import open_datasets
from trainer.data.cache import cached, homes
from trainer.distributed.world_setup import create_world
from trainer.errors import FolderInUseError, RecipeError
from trainer.recipe import load
from trainer.saving import locks


@pytest.fixture
def where(tmp_path):
    return f"data.cache_dir={tmp_path / 'cache'}"


@pytest.fixture
def built(tmp_path):
    recipe = load(None, *words_for(folder_of(tmp_path / "photos"), "data.cache=disk"))
    with ExitStack() as closing:
        cached(open_datasets(recipe), recipe, create_world(recipe), print, closing)
    (home,) = (tmp_path / "cache").iterdir()
    return home


def test_what_there_is_is_listed(built, where, capsys):
    assert command([where]) == command(["list", where]) == 0
    listed = capsys.readouterr().out
    assert (
        f"{built.name} " in listed and " 24 " in listed and "raw 44" in listed and "today" in listed
    )
    assert listed.count("1 cache,") == 2 and str(built.parent.parent / "photos") in listed


def test_no_caches(tmp_path, capsys):
    assert command([f"data.cache_dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("no caches") and "data.cache=disk" in told


def test_deleted_once_one_agrees_and_nobody_uses_it(built, where, capsys):
    with pytest.raises(RecipeError, match="add yes=true"):
        command(["delete", built.name, where])
    with pytest.raises(RecipeError, match=rf"'photos' .*\bno cache .*{built.name}"):
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


@pytest.mark.parametrize("gone", ["block", "folder"])
def test_what_is_removed_while_caches_are_listed_is_left_out(
    built,
    where,
    monkeypatch,
    capsys,
    gone,
):
    if gone == "block":
        (built / f"{'0' * 32}.block").symlink_to("nowhere")  # it is listed, and cannot be found
    else:
        once(monkeypatch, cache, "read_json_or_empty", lambda: shutil.rmtree(built))
    assert command([where]) == 0
    assert (built.name in capsys.readouterr().out) == (gone == "block")


def test_deleting_twice_at_once_deletes_no_cache_of_a_new_run(built, where, monkeypatch):
    """The folder is deleted and a run makes it again, between opening its lock and taking it."""

    def replaced():
        shutil.rmtree(built)
        built.mkdir()
        locks.lock_shared(locks.open_lock(built / homes.USED))
        (built / "new.block").touch()

    once(monkeypatch, locks, "open_lock", replaced)
    with pytest.raises(FolderInUseError):
        command(["delete", built.name, where, "yes=true"])
    assert (built / "new.block").exists()


def test_what_another_process_deletes_first_is_deleted(built, where, monkeypatch):
    real = locks.open_lock
    monkeypatch.setattr(locks, "open_lock", lambda path: shutil.rmtree(built) or real(path))
    assert command(["delete", built.name, where, "yes=true"]) == 0 and not built.exists()


def test_a_run_that_starts_while_its_cache_is_deleted_keeps_what_it_builds(
    built,
    where,
    monkeypatch,
):
    real = os.unlink
    lock = []

    def unlink(path, **named):
        real(path, **named)
        if os.path.basename(path) == homes.USED and not lock:
            lock.append(locks.open_lock(built / homes.USED))
            assert locks.try_exclusive_lock(lock[0])
            (built / "new.block").touch()

    monkeypatch.setattr(os, "unlink", unlink)
    assert command(["delete", built.name, where, "yes=true"]) == 0
    assert {path.name for path in built.iterdir()} == {homes.USED, "new.block"}
    os.close(lock[0])
