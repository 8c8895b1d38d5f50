"""Reference of all keys of a recipe: default, values, comment and example, from the schema."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.recipe.recipe_files import shipped_recipes
from trainer.recipe.reflection import choices, defaults
from trainer.recipe.schema import EXTENDS, EXTENDS_COMMENT, Recipe, key_fields, readers
from trainer.recipe.text import format_value, format_yaml
from trainer.recipe.unused import find_unread


@dataclass(frozen=True)
class Key:
    """Row of the key reference.

    Attributes:
        name: dotted name of the key.
        default: the default, as it is typed.
        values: all possible values, separated by commas. Empty if they cannot be listed, or are
            only true, false and null.
        comment: description of the key.
        example: arguments that set the key.
    """

    name: str
    default: str
    values: str
    comment: str
    example: str

    @property
    def section(self) -> str:
        """Return the section of the key; empty at the top level."""
        return self.name.rpartition(".")[0]


def keys() -> dict[str, Key]:
    """Return every key of a recipe by its dotted name, in the order of the schema."""
    first_recipe = next(iter(shipped_recipes()))
    reference = {EXTENDS: Key(EXTENDS, "none", "", EXTENDS_COMMENT, f"{EXTENDS}: {first_recipe}")}
    for name, field in key_fields():
        default = format_yaml(defaults()[name])
        values = ", ".join(choices().get(name, ()))
        # The values of a boolean are not listed, because users know them.
        if values in ("true, false", "true, false, null"):
            values = ""
        example = _example(name, field.examples or ())
        reference[name] = Key(name, default, values, str(field.description), example)
    return reference


def sections() -> dict[str, str]:
    """Return the comment of every section; the top level has the empty name."""
    comments = {"": "The run."}
    for name, section in Recipe():
        if name not in defaults():
            comments[name] = str(section.__doc__)
    return comments


def _example(name: str, examples: Sequence[Any]) -> str:
    """Format the argument that sets a key.

    If only some optimizers or schedules read the key, an argument that chooses one of them precedes
    the key's argument.

    Args:
        name: dotted name of the key.
        examples: examples of the schema. The first one that is not the default is used, else
            another possible value, else the default.
    """
    values = []
    for example in (defaults()[name], *examples):
        if isinstance(example, list):
            values.append(format_value(example))
        elif isinstance(example, dict) and example:
            (argument, argument_value), *_ = example.items()
            return f"{name}.{argument}={format_yaml(argument_value)}"
        else:
            values.append(format_yaml(example))
    default, *others = values
    candidates = (*others, *choices().get(name, ()))
    value = next((value for value in candidates if value != default), default)
    arguments = [f"{chooser}={readers(name)[0]}" for _, chooser in find_unread(defaults(), [name])]
    return " ".join([*arguments, f"{name}={value}"])
