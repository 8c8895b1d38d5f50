"""Training from the cache is training from the photos: the same order, crops, flips and, stored
whole, pixels.
"""

import shutil
from contextlib import ExitStack

import pytest

from tests.command_line import QUIET, losses, ok, result, trainer
from tests.data.cache.caches import folder_of, words_for
from trainer.data import open_datasets
from trainer.data.cache import as_stored, cache_blocks, cached
from trainer.distributed.world_setup import create_world
from trainer.recipe import load


@pytest.fixture
def photos(tmp_path):
    return folder_of(tmp_path / "photos")


def train(photos, name, *more):
    """Losses of every step and figures of the end."""
    run = photos.parent / name
    output = ok(*words_for(photos, f"output={run}", *more)).stdout
    return losses(run), result(run)["val_loss"], output


def blocks_of(folder):
    """Return the blocks, usually one: the paths of the photos determine their number, and each test
    has another folder.
    """
    return sorted(folder.glob(f"*/*{cache_blocks.SUFFIX}"))


@pytest.mark.slow
def test_photos_stored_at_full_size_train_the_same(photos):
    """Photos of 60 x 50 in a cache for a shorter side of 50."""
    plain = train(photos, "plain")
    first = train(photos, "first", "data.cache=disk", "data.cache_size=50")
    second = train(photos, "second", "data.cache=disk", "data.cache_size=50", "data.workers=0")
    assert plain[:2] == first[:2] == second[:2]
    assert "24 photos to" in first[2] and "complete" in second[2] and "cache:" not in plain[2]


@pytest.mark.slow
def test_ranks_build_it_together_and_train_as_one(photos):
    words = "data.cache=disk", "data.cache_size=50"
    two = train(photos, "two", "mode=ddp", "nproc=2", *words)
    one = train(photos, "one", *words)
    assert two[0] == pytest.approx(one[0], rel=1e-4)
    assert two[2].count("cache:") == 1


@pytest.mark.slow
def test_a_continued_run_keeps_its_pixels_wherever_they_lie(photos):
    words = "data.cache_format=jpeg", "data.cache_size=44", "save.every_steps=1"
    whole = train(photos, "whole", "data.cache=disk", *words)
    for kind in ("off", "disk"):
        cut = words_for(photos, f"output={photos.parent / kind}", *words, "data.cache=disk")
        assert trainer(*cut, env={"TRAINER_FAULT": "kill@0:3"}).returncode != 0
        assert train(photos, kind, *words, f"data.cache={kind}", "resume=auto")[:2] == whole[:2]
    digests = [
        (photos.parent / name / "last.safetensors").read_bytes() for name in ("whole", "disk")
    ]
    assert digests[0] == digests[1]
    plain = words_for(photos, f"output={photos.parent / 'plain'}", "save.every_steps=1")
    assert trainer(*plain, env={"TRAINER_FAULT": "kill@0:3"}).returncode != 0
    completed = trainer(*plain, "data.cache=disk", "resume=auto")
    assert completed.returncode == 2 and "data.cache: off" in completed.stderr


@pytest.mark.slow
def test_damaged_blocks_are_never_trained_on_and_are_rebuilt(photos):
    words = "data.cache=disk", "data.cache_size=50"
    whole = train(photos, "whole", *words)
    right = {block: block.read_bytes() for block in blocks_of(photos.parent / "cache")}
    for block, content in right.items():
        wrong = bytearray(content)
        for place in range(0, len(wrong), 1009):
            wrong[place] ^= 1 << place % 8
        block.write_bytes(wrong)
    damaged = train(photos, "damaged", *words)
    assert damaged[:2] == whole[:2] and not blocks_of(photos.parent / "cache")
    lost = result(photos.parent / "damaged")["data"]["uncached"]
    assert lost > 0 and f"{lost} times" in damaged[2]
    assert result(photos.parent / "whole")["data"]["uncached"] == 0
    assert train(photos, "again", *words)[:2] == whole[:2]
    assert right == {block: block.read_bytes() for block in blocks_of(photos.parent / "cache")}


@pytest.mark.slow
def test_a_run_is_evaluated_with_the_pixels_that_it_had(photos):
    _, loss, _ = train(
        photos, "run", "data.cache=disk", "data.cache_format=jpeg", "data.cache_size=44"
    )
    shutil.rmtree(photos.parent / "cache")
    evaluated = ok("evaluate", photos.parent / "run", "last").stdout
    assert f"{loss:.4f}" in evaluated and not (photos.parent / "cache").exists()


def test_sets_that_lie_in_memory_need_none(photos):
    recipe = load("digits", "data.cache=disk")
    data = open_datasets(recipe)
    with ExitStack() as closing:
        assert cached(data, recipe, create_world(recipe), print, closing) == (data, recipe)
    assert as_stored(data, recipe) is data


def test_a_folder_that_cannot_be_written_is_one_line(photos):
    (photos.parent / "cache").write_text("")
    completed = trainer(*words_for(photos, "data.cache=disk", f"output={photos.parent / 'run'}"))
    assert completed.returncode == 3 and "data.cache_dir=" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("off", "off"), ("'off'", "off"), ("false", "off"), ("none", "off"), ("on", "disk")],
)
def test_off_is_a_word_and_no_false(typed, meant, tmp_path):
    (tmp_path / "a.yaml").write_text(f"data:\n  cache: {typed}\n")
    loaded = load(str(tmp_path / "a.yaml"))
    assert loaded.data.cache == load(None, f"data.cache={typed}").data.cache == meant
    (tmp_path / "b.yaml").write_text(loaded.to_yaml())
    assert load(str(tmp_path / "b.yaml")).data == loaded.data


def test_a_cache_of_images_in_memory_has_no_effect_and_is_reported(tmp_path):
    words = ["recipe=digits", "mode=single", "model.name=mlp", "max_steps=1", *QUIET]
    assert "data.cache=disk" in ok(*words, "data.cache=disk", f"output={tmp_path / 'a'}").stdout
    assert "data.cache" not in ok(*words, f"output={tmp_path / 'b'}").stdout
