"""The suggested spelling for a misspelled argument."""

import pytest

from trainer.cli.command_table import COMMANDS
from trainer.errors import RecipeError
from trainer.recipe import Recipe, flatten, shipped_recipes
from trainer.recipe.recipe_files import split_arguments
from trainer.recipe.text import find_nearest

WORDS = [*COMMANDS, *shipped_recipes(), *flatten(Recipe().to_dict())]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("recips", "recipes"),
        ("resnet5", "resnet50"),
        ("poch", "epochs"),
        ("optimiser.lr", "optimizer.lr"),
        ("wieght_decay", "optimizer.weight_decay"),
        ("layer_decay", "optimizer.layer_decay"),
        ("optimizer.lrr", "optimizer.lr"),
        ("rect", None),
        ("knn", None),
    ],
)
def test_a_slip_is_found_and_a_stranger_is_not(word, found):
    assert find_nearest(word, WORDS) == found


def test_the_same_word_twice_is_one_word():
    assert split_arguments(["nproc=2", "a", "nproc=2"], ("nproc",)) == ({"nproc": "2"}, ["a"])
    with pytest.raises(RecipeError, match="given twice"):
        split_arguments(["nproc=2", "nproc=3"], ("nproc",))
