"""Strategies, one file per mode: the forward and backward passes, and the exchange between ranks.

`base` defines the contract. The loop that calls the strategies is in `training`.
Imports: errors, versions, recipe, devices, tasks, memory, processes, distributed, saving, models,
telemetry, data.
"""

from trainer.distributed.world import World
from trainer.modes.base import Strategy
from trainer.modes.context import Context
from trainer.modes.ddp import DistributedDataParallel
from trainer.modes.dp import DataParallel
from trainer.modes.fsdp import FullyShardedDataParallel
from trainer.modes.hogwild import Hogwild
from trainer.modes.local_sgd import LocalSGD
from trainer.modes.pipeline.ranks import ProcessPipeline
from trainer.modes.pipeline.recorded import CapturablePipeline
from trainer.modes.split import Split
from trainer.recipe import Recipe

# Strategy class by name of the mode. `OVER_PROCESSES` overrides entries for several processes.
STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "dp": DataParallel,
    "ddp": DistributedDataParallel,
    "split": Split,
    "pipeline": CapturablePipeline,
    # A single process has no ranks to shard over, so mode `fsdp` trains as mode `single`.
    "fsdp": Strategy,
    "local_sgd": LocalSGD,
    "hogwild": Hogwild,
}
# Strategy class by name of the mode, if there are several processes. Modes that are not listed have
# the same class for any number of processes.
OVER_PROCESSES: dict[str, type[Strategy]] = {
    "pipeline": ProcessPipeline,
    "fsdp": FullyShardedDataParallel,
}


def find_strategy_class(recipe: Recipe, world: World) -> type[Strategy]:
    """Return the class that implements the recipe's mode in this world."""
    if world.size > 1 and recipe.mode in OVER_PROCESSES:
        return OVER_PROCESSES[recipe.mode]
    return STRATEGIES[recipe.mode]


def create(context: Context) -> Strategy:
    """Create the strategy of the recipe's mode on this rank."""
    return find_strategy_class(context.recipe, context.world)(context)


__all__ = ["Context", "Strategy"]
