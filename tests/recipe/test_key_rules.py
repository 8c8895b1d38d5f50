"""Words that nothing reads are refused, and only those that the user typed."""

import pytest
import yaml

from tests.recipe.refusals import refusal
from trainer.recipe import OptimizerRecipe, flatten, load
from trainer.recipe.loading import words_of
from trainer.recipe.reflection import READERS
from trainer.recipe.schema import ScheduleRecipe


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("optimizer.name=adamw optimizer.nesterov=true", "optimizer.name=sgd or muon"),
        ("optimizer.name=adam optimizer.momentum=0.8", "optimizer.name=sgd or muon"),
        ("optimizer.betas=[0.9,0.99]", "optimizer.betas=[0.9, 0.99] does nothing with optimizer.name=sgd"),
        ("schedule.gamma=0.5", "schedule.gamma=0.5 does nothing with schedule.name=cosine"),
        ("schedule.name=step schedule.min_lr=0.001", "schedule.name=cosine"),
    ],
)
def test_what_nothing_reads_is_refused(words, says):
    assert says in refusal(load, "digits", *words.split())


@pytest.mark.parametrize(
    "words",
    [
        "optimizer.name=adamw",  # the recipe's own nesterov and momentum are sgd's
        "optimizer.name=adamw optimizer.nesterov=false",  # what is off anyway
        "optimizer.name=muon optimizer.nesterov=true optimizer.betas=[0.9,0.95]",
        "schedule.name=step schedule.gamma=0.5 schedule.step_epochs=2",
    ],
)
def test_what_is_read_or_comes_from_the_recipe_is_taken(words):
    taken = flatten(load("digits", *words.split()).to_dict())
    assert all(taken[key] == yaml.safe_load(value) for key, value in (word.split("=") for word in words.split()))


def test_a_saved_recipe_goes_on_being_read(tmp_path):
    """It holds every key, those that nothing reads as well."""
    recipe = load("digits", "optimizer.name=adamw")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = load(tmp_path)
    assert again.to_dict() == recipe.to_dict()
    assert load(None, *words_of(again)).optimizer.name == "adamw", "and what it tells to type is accepted"


def test_every_reader_is_one():
    known = {"optimizer": OptimizerRecipe, "schedule": ScheduleRecipe}
    for key, readers in READERS.items():
        section, _, field = key.partition(".")
        fields = known[section].model_fields
        assert field in fields and set(readers) <= set(fields["name"].annotation.__args__)
