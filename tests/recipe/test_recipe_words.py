"""Which word of ours a misspelt one is."""

import pytest

from trainer.cli.command_table import COMMANDS
from trainer.errors import RecipeError
from trainer.recipe import Recipe, flatten, shipped_recipes
from trainer.recipe.recipe_files import split_words
from trainer.recipe.text import misspelt

WORDS = [*COMMANDS, *shipped_recipes(), *flatten(Recipe().to_dict())]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("recips", "recipes"),
        ("resnet5", "resnet50"),
        ("epoch_size", "epochs"),
        ("poch", "epochs"),
        ("optimiser.lr", "optimizer.lr"),
        ("wieght_decay", "optimizer.weight_decay"),
        ("rect", None),
        ("topk", None),
    ],
)
def test_a_slip_is_found_and_a_stranger_is_not(word, found):
    assert misspelt(word, WORDS) == found


def test_a_run_is_no_part_of_its_name():
    assert misspelt("nope", ["pe", "first"]) is None
    assert misspelt("frist", ["pe", "first"]) == "first"
    assert misspelt("digits-20260101", ["digits-20260101-120000"]) == "digits-20260101-120000"


def test_the_same_word_twice_is_one_word():
    assert split_words(["nproc=2", "a", "nproc=2"], ("nproc",)) == ({"nproc": "2"}, ["a"])
    with pytest.raises(RecipeError, match="given twice"):
        split_words(["nproc=2", "nproc=3"], ("nproc",))
