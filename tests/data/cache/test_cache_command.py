"""Caches listed, made beforehand and deleted."""

import os

import pytest

from tests.command_line import ok, trainer
from tests.data.cache.test_cached_set import folder_of, words_for
from trainer.data.cache import homes
from trainer.data.cache.cache_command import command
from trainer.errors import FolderInUseError, RecipeError
from trainer.saving import locks


@pytest.fixture
def photos(tmp_path):
    return folder_of(tmp_path / "photos")


@pytest.fixture
def where(photos):
    return f"data.cache_dir={photos.parent / 'cache'}"


@pytest.fixture
def built(photos, where, capsys):
    command(["build", *words_for(photos)])
    capsys.readouterr()
    (home,) = (photos.parent / "cache").iterdir()
    return home


def test_what_was_made_beforehand_is_used(photos, where):
    said = ok("cache", "build", *words_for(photos)).stdout
    assert "24 photos to" in said
    listed = ok("cache", where).stdout
    assert (
        "photos-" in listed and " 24 " in listed and "raw 44" in listed and "today" in listed and "1 cache," in listed
    )
    run = ok(*words_for(photos, "data.cache=disk", "max_steps=1", f"output={photos.parent / 'run'}")).stdout
    assert "whole" in run


def test_no_caches(tmp_path, capsys):
    assert command([f"data.cache_dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("no caches") and "data.cache=disk" in told and "cache build recipe=" in told


def test_deleted_once_one_agrees(built, where, capsys):
    with pytest.raises(RecipeError, match="add yes=true"):
        command(["delete", built.name, where])
    assert built.exists()
    command(["delete", built.name, where, "yes=true"])
    assert not built.exists() and "deleted" in capsys.readouterr().out


def test_what_is_in_use_is_not_deleted(built, where):
    lock = locks.open_lock(built / homes.USED)
    locks.lock_shared(lock)
    with pytest.raises(FolderInUseError, match=rf"{built.name} .*in use"):
        command(["delete", built.name, where, "yes=true"])
    assert built.exists()
    os.close(lock)
    command(["delete", built.name, where, "yes=true"])
    assert not built.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dlete", "x"], "is not understood: type cache, cache build"),
        (["delete"], "needs names"),
        (["delete", "nothing"], "'nothing' is no cache"),
        (["verify"], "is not understood"),
        (["list", "--all"], "--all"),
        (["delete", "a=b"], "a"),
        (["build", "recipe=digits"], "need no cache: for your photos, cache build recipe=finetune data.root=FOLDER"),
        (["build", "data.root=."], "type recipe=finetune, or data.name=imagefolder"),
        (["build", "recipe=nothing"], "nothing"),
    ],
)
def test_what_is_not_meant(tmp_path, words, told):
    done = trainer("cache", *words, *([] if words[0] == "build" else [f"data.cache_dir={tmp_path}"]))
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_two_names_of_one_beginning(photos, built, where):
    command(["build", *words_for(photos, "data.cache_format=jpeg")])
    with pytest.raises(RecipeError, match=r"'photos'.*\bphotos-.*\bphotos-"):
        command(["delete", "photos", where])
