"""What a run is to do: every key, its YAML and words, and what goes together with what.

No torch in this room, so that a typo is answered at once.
Imports: errors.
"""

from trainer.recipe.field_types import DEVICE
from trainer.recipe.loading import load, origins, words_of
from trainer.recipe.mode_table import MODES, TRAITS, Traits
from trainer.recipe.recipe_files import find, shipped_recipes
from trainer.recipe.reflection import changed_keys, differing
from trainer.recipe.schema import (
    IN_TURN,
    MEASURED,
    STREAMS,
    AugmentRecipe,
    DataRecipe,
    LoggingRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    Schedule,
)
from trainer.recipe.text import flatten, nearest, neighbours

__all__ = [
    "DEVICE",
    "IN_TURN",
    "MEASURED",
    "MODES",
    "STREAMS",
    "TRAITS",
    "AugmentRecipe",
    "DataRecipe",
    "LoggingRecipe",
    "ModelRecipe",
    "OptimizerRecipe",
    "Recipe",
    "Schedule",
    "Traits",
    "changed_keys",
    "differing",
    "find",
    "flatten",
    "load",
    "nearest",
    "neighbours",
    "origins",
    "shipped_recipes",
    "words_of",
]
