"""One file a mode. The base class is the contract and is itself `single`."""

from __future__ import annotations

from trainer.recipe import Recipe
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DistributedDataParallel
from trainer.world import World

STRATEGIES: dict[str, type[Strategy]] = {"single": Strategy, "ddp": DistributedDataParallel}


def create(recipe: Recipe, world: World) -> Strategy:
    """The recipe's mode, on this rank."""
    return STRATEGIES[recipe.mode](recipe, world)


__all__ = ["STRATEGIES", "Strategy", "create"]
