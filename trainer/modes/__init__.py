"""One file a mode: how it does forward, loss and backward, and what ranks exchange. `base` is the contract.

The loop that drives them is in `training`.
Imports: errors, recipe, processes, saving, data, models, telemetry.
"""

from __future__ import annotations

from trainer.modes.base import Strategy
from trainer.modes.ddp import DistributedDataParallel
from trainer.modes.dp import DataParallel
from trainer.modes.hogwild import Hogwild
from trainer.modes.local_sgd import LocalSGD
from trainer.modes.pipeline.ranks import ProcessPipeline
from trainer.modes.pipeline.streams import StreamPipeline
from trainer.modes.split import Split
from trainer.processes.world import World
from trainer.recipe import Recipe

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
