"""Sizes of the local batches in whole images, from the proportions in the key `shares`."""

import math
from collections.abc import Sequence
from fractions import Fraction

from trainer.errors import RecipeError
from trainer.recipe.schema import Recipe
from trainer.recipe.text import format_yaml


def divide_in_proportion(total: int, numbers: Sequence[float]) -> list[int]:
    """Divide `total` in proportion to `numbers`, by the method of largest remainders.

    If several remainders are equal, those that come first in `numbers` are rounded up first.
    """
    # Exact fractions are used, because rounding errors of floats would decide between remainders
    # that are equal.
    fractions = [Fraction(number) for number in numbers]
    unit = total / sum(fractions)
    quotas = [unit * fraction for fraction in fractions]
    sizes = [math.floor(quota) for quota in quotas]
    # The sort is stable, so the first of equal remainders comes first.
    by_remainder = sorted(range(len(sizes)), key=lambda n: sizes[n] - quotas[n])
    for n in by_remainder[: total - sum(sizes)]:
        sizes[n] += 1
    return sizes


def divide_within_limits(
    total: int, numbers: Sequence[float], least: int, most: Sequence[int]
) -> list[int]:
    """Divide like `divide_in_proportion`, within limits.

    Args:
        total: number to divide.
        numbers: proportions.
        least: minimum of every size.
        most: maximum of each size. The limits must allow a division.
    """
    fixed: dict[int, int] = {}
    while True:
        free = [n for n in range(len(numbers)) if n not in fixed]
        rest = total - sum(fixed.values())
        free_sizes = divide_in_proportion(rest, [numbers[n] for n in free])
        sizes = dict(zip(free, free_sizes, strict=True))
        # Sizes that are too large are fixed first, because this leaves more for those that are too
        # small.
        bounds = {n: most[n] for n, size in sizes.items() if size > most[n]}
        if not bounds:
            bounds = {n: least for n, size in sizes.items() if size < least}
        fixed |= bounds
        if not bounds or len(fixed) == len(numbers):
            sizes |= fixed
            return [sizes[n] for n in range(len(numbers))]


def fixed_shares(recipe: Recipe) -> tuple[float, ...]:
    """Return the proportions in the recipe; empty if local batches are equal or measured."""
    if isinstance(recipe.shares, list):
        return tuple(recipe.shares)
    return ()


def count_units(recipe: Recipe, accumulate: int | None = None) -> int:
    """Return the number of images, or of mixed pairs, in a micro-batch over all ranks."""
    return recipe.batch_size // ((accumulate or recipe.pieces) * recipe.augment.together)


def count_rows(
    recipe: Recipe,
    count: int,
    accumulate: int | None = None,
    numbers: Sequence[float] | None = None,
) -> list[int]:
    """Return the number of images of a micro-batch on each rank.

    Args:
        recipe: the recipe of the run.
        count: number of ranks that divide the global batch.
        accumulate: number of micro-batches; the recipe's by default.
        numbers: proportions of the ranks; the recipe's by default. If they are empty, all ranks
            have the same proportion.
    """
    if numbers is None:
        numbers = fixed_shares(recipe)
    sizes = divide_in_proportion(count_units(recipe, accumulate), numbers or [1] * count)
    return [recipe.augment.together * size for size in sizes]


def split_rows(rows: int, devices: int) -> list[int]:
    """Return the number of a batch's rows that each device of `nn.DataParallel` gets.

    The rule is that of `torch.chunk`, so few rows use few devices.
    """
    size = -(-rows // devices)
    return [min(size, rows - start) for start in range(0, rows, size)]


def check_shares(recipe: Recipe, processes: int) -> None:
    """Check the key `shares`.

    Raises:
        RecipeError: a process would have no image, the number of proportions is wrong, or
            several processes have shares=auto and an option with which passes wait for each other.
    """
    if recipe.shares == "auto" and processes > 1:
        # Replayed passes contain the exchange of gradients, and of weights in shards.
        has_captured_exchange = recipe.graphs is True and recipe.traits.exchanges_in_passes
        waiting = (("sync_bn", recipe.sync_bn), ("graphs", has_captured_exchange))
        for option, is_on in waiting:
            if is_on:
                raise RecipeError(
                    "shares=auto times each rank's passes, in which ranks wait for each other with "
                    f"{option}=true: type numbers, as in shares=[3,1], or {option}=false"
                )
    numbers = fixed_shares(recipe)
    every = count_units(recipe)
    if not numbers:
        return
    argument = _format_argument(numbers)
    if len(numbers) != processes:
        alternative = "null"
        if processes > 1:
            alternative = "auto"
        raise RecipeError(
            f"{argument} divides every batch among {len(numbers)} processes, but the run has "
            f"{processes}: type nproc={len(numbers)}, or shares={alternative}"
        )
    sizes = divide_in_proportion(every, numbers)
    if 0 in sizes:
        nearest = divide_within_limits(every, numbers, 1, [every] * processes)
        raise RecipeError(
            f"{argument} leaves rank {sizes.index(0)} without an image of a micro-batch of "
            f"{recipe.batch_size // recipe.pieces}: type {_format_argument(nearest)}, or a larger "
            "batch_size"
        )


def _format_argument(numbers: Sequence[float]) -> str:
    return f"shares=[{','.join(map(format_yaml, numbers))}]"
