"""One file a mode. The base class is the contract and is itself `single`."""

from __future__ import annotations

from trainer.recipe import Recipe
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DistributedDataParallel
from trainer.strategies.dp import DataParallel
from trainer.strategies.hogwild import Hogwild
from trainer.strategies.local_sgd import LocalSGD
from trainer.strategies.pipeline import ProcessPipeline
from trainer.strategies.split import Split
from trainer.strategies.streams import StreamPipeline
from trainer.world import World

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "dp": DataParallel,
    "ddp": DistributedDataParallel,
    "split": Split,
    "pipeline": StreamPipeline,
    "local_sgd": LocalSGD,
    "hogwild": Hogwild,
}


def create(recipe: Recipe, world: World) -> Strategy:
    """The recipe's mode, on this rank."""
    if recipe.mode == "pipeline" and world.size > 1:
        return ProcessPipeline(recipe, world)
    return STRATEGIES[recipe.mode](recipe, world)


__all__ = ["STRATEGIES", "Strategy", "create"]
