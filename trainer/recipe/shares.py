"""How many images of every batch each rank computes: numbers of any scale, as whole images. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from trainer.errors import RecipeError
from trainer.recipe.schema import Recipe
from trainer.recipe.text import typed


def portions(total: int, numbers: Sequence[float]) -> list[int]:
    """`total` divided in proportion to the numbers, by largest remainders; of equal ones the first get more."""
    whole = sum(map(Fraction, numbers))
    exact = [total * Fraction(number) / whole for number in numbers]
    parts = [math.floor(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda n: parts[n] - exact[n])
    for n in order[: total - sum(parts)]:
        parts[n] += 1
    return parts


def bounded(total: int, numbers: Sequence[float], least: int, most: Sequence[int]) -> list[int]:
    """As `portions`, none below `least` or above its own `most`, between which there is a division."""
    fixed: dict[int, int] = {}
    while True:
        free = [n for n in range(len(numbers)) if n not in fixed]
        parts = dict(zip(free, portions(total - sum(fixed.values()), [numbers[n] for n in free]), strict=True))
        over = {n: most[n] for n, part in parts.items() if part > most[n]}
        fixed |= (bounds := over or {n: least for n, part in parts.items() if part < least})
        if not bounds or len(fixed) == len(numbers):
            return [(parts | fixed)[n] for n in range(len(numbers))]


def given(recipe: Recipe) -> tuple[float, ...]:
    """The recipe's own numbers; empty where shares are equal, or measured."""
    return tuple(recipe.shares) if isinstance(recipe.shares, list) else ()


def units(recipe: Recipe, accumulate: int | None = None) -> int:
    """Images, or pairs that stay together, of a global batch's micro-batch, which ranks divide."""
    return recipe.batch_size // ((accumulate or recipe.pieces) * recipe.augment.together)


def rows_of(
    recipe: Recipe, count: int, accumulate: int | None = None, numbers: Sequence[float] | None = None
) -> list[int]:
    """Images of a micro-batch of each of `count` ranks, by `numbers`, by default the recipe's; equal without any."""
    numbers = (given(recipe) if numbers is None else numbers) or [1] * count
    return [recipe.augment.together * part for part in portions(units(recipe, accumulate), numbers)]


def check_shares(recipe: Recipe, processes: int) -> None:
    """Raises RecipeError where the recipe's numbers are not one for each process, or leave one without an image."""
    if recipe.shares == "auto" and recipe.sync_bn and processes > 1:
        raise RecipeError(
            "shares=auto times each rank's passes, in which ranks wait for each other with sync_bn=true: type numbers, "
            "as in shares=[3,1], or sync_bn=false"
        )
    numbers, every = given(recipe), units(recipe)
    if not numbers:
        return
    word = _word(numbers)
    if len(numbers) != processes:
        many = f"there {'are' if processes > 1 else 'is'} {processes}"
        raise RecipeError(
            f"{word} divides every batch among {len(numbers)} processes, and {many}: type nproc={len(numbers)}, or "
            f"shares={'auto' if processes > 1 else 'null'}"
        )
    parts = portions(every, numbers)
    if 0 in parts:
        what = f"micro-batch of {recipe.batch_size // recipe.pieces}"
        nearest = bounded(every, numbers, 1, [every] * processes)
        raise RecipeError(
            f"{word} leaves rank {parts.index(0)} without an image of a {what}: type {_word(nearest)}, or a larger "
            "batch_size"
        )


def _word(numbers: Sequence[float]) -> str:
    return f"shares=[{','.join(map(typed, numbers))}]"
