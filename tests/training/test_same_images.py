"""Ranks that found other images say so before the first step."""

import pytest

from tests.data.photo_folders import opened, photo, photo_set
from tests.worlds import on_ranks
from trainer.data.splits import Before
from trainer.errors import SetupError
from trainer.training.same_images import check_same_images

PETS = {"cat": 10, "dog": 10}


def errors(*data):
    """What each rank raises that found its part of `data`."""

    def work(world):
        try:
            check_same_images(world, data[world.rank])
        except SetupError as error:
            return str(error)
        return None

    return on_ranks(len(data), work)


def test_the_same_images_elsewhere_are_the_same(tmp_path):
    here, there = (opened(photo_set(tmp_path / name, PETS)) for name in ("here", "there"))
    assert errors(here, there, here) == [None] * 3


def test_other_images_are_told_on_every_rank(tmp_path):
    here = opened(photo_set(tmp_path / "here", PETS))
    photo(photo_set(tmp_path / "there", PETS) / "cat" / "new.jpg")
    told = errors(here, here, opened(tmp_path / "there"))
    assert len(set(told)) == 1
    assert "rank 2 on " in told[0] and "(training images: 17 there, 16 here)" in told[0] and "split.csv" in told[0]
    (told, _) = errors(here, opened(tmp_path / "here", "data.image_size=32"))
    assert "(shape: 3 x 32 x 32 there, 3 x 224 x 224 here)" in told


@pytest.mark.parametrize("other", ["held out", "renamed"])
def test_as_many_images_that_are_others_are_told(tmp_path, other):
    here, there = (opened(photo_set(tmp_path / name, PETS)) for name in ("here", "there"))
    if other == "held out":
        names = frozenset(there.train.name(index) for index in (0, 1, 8, 9))
        there = opened(tmp_path / "there", before=Before(names))
    else:
        trained = tmp_path / "there" / there.train.name(0)
        trained.rename(trained.with_name("other.jpg"))
        there = opened(tmp_path / "there", before=Before(frozenset(here.val.name(n) for n in range(4))))
    assert "rank 1 on" in errors(here, there)[0] and "trains on other files than rank 0" in errors(here, there)[0]
