"""One file a mode: how it does forward, loss and backward, and what ranks exchange. `base` is the contract.

The loop that drives them is in `training`.
Imports: errors, recipe, devices, tasks, processes, saving, models, telemetry, data.
"""

from __future__ import annotations

from trainer.data import DataShare
from trainer.modes.base import Context, Strategy
from trainer.modes.ddp import DistributedDataParallel
from trainer.modes.dp import DataParallel
from trainer.modes.fsdp import FullyShardedDataParallel
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
    "fsdp": FullyShardedDataParallel,
    "local_sgd": LocalSGD,
    "hogwild": Hogwild,
}
OVER_PROCESSES: dict[str, type[Strategy]] = {"pipeline": ProcessPipeline}  # another class where there are several


def kind(recipe: Recipe, world: World) -> type[Strategy]:
    """The class of the recipe's mode."""
    return {**STRATEGIES, **(OVER_PROCESSES if world.size > 1 else {})}[recipe.mode]


def data_share(recipe: Recipe, world: World) -> DataShare:
    """Which part of every global batch this rank reads."""
    return kind(recipe, world).data_share(recipe, world)


def create(context: Context) -> Strategy:
    """The recipe's mode, on this rank."""
    return kind(context.recipe, context.world)(context)


__all__ = ["STRATEGIES", "Context", "Strategy", "create", "data_share"]
