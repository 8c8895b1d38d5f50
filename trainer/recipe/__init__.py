"""Recipes: all keys of a run, their YAML and arguments, and checks of combinations.

Nothing here imports torch, so that a typo is reported immediately.
Imports: errors, versions.
"""

from trainer.recipe.loading import (
    find_own_values,
    format_arguments,
    format_typed,
    load,
    notes_on_idle,
)
from trainer.recipe.mode_table import MODES, TRAITS
from trainer.recipe.recipe_files import parse_positive_integer, shipped_recipes, split_arguments
from trainer.recipe.reflection import changed_keys, compare_recipes
from trainer.recipe.schema import (
    IN_TURN,
    MEASURED,
    STREAMS,
    AugmentRecipe,
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
)
from trainer.recipe.text import find_nearest, flatten, format_value, list_some

__all__ = [
    "IN_TURN",
    "MEASURED",
    "MODES",
    "STREAMS",
    "TRAITS",
    "AugmentRecipe",
    "DataRecipe",
    "ModelRecipe",
    "OptimizerRecipe",
    "Recipe",
    "changed_keys",
    "compare_recipes",
    "find_nearest",
    "find_own_values",
    "flatten",
    "format_arguments",
    "format_typed",
    "format_value",
    "list_some",
    "load",
    "notes_on_idle",
    "parse_positive_integer",
    "shipped_recipes",
    "split_arguments",
]
