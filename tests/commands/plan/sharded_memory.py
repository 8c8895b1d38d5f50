"""Memory of the ranks of mode=fsdp, by the storages that are alive.

Run as `sharded_memory.py FOLDER WORDS` under torchrun.

With TRAINER_TEST_CARDS each rank has a simulated card, and what is on the host is not counted.

Storages are asked for their size at every operator, as torch gives those of gathered weights back
by resizing them. What gloo allocates inside of its collectives is not counted: NCCL has buffers of
one size.
"""

import json
import os
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.commands.plan.plans import real, recipe_of, size
from trainer.distributed.world_setup import create_world
from trainer.optim.optimization import Updater
from trainer.optim.optimizers import build_optimizer, name_optimizer_state


class Alive(TorchDispatchMode):
    """Maximum number of bytes in live storages."""

    def __init__(self, known, counts):
        super().__init__()
        self.counts = counts  # whether a storage is one of the device's
        self.peak = 0
        self.storages = {}
        for tensor in known:
            self.add(tensor)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) in (Tensor, torch.nn.Parameter):
                self.add(tensor)
        alive = {
            key: storage for key, seen in self.storages.items() if (storage := seen()) is not None
        }
        self.storages = {key: self.storages[key] for key in alive}
        self.peak = max(
            self.peak, sum(storage.nbytes() for key, storage in alive.items() if self.counts(key))
        )
        return out


def main(folder, *words):
    counts = bool
    if "TRAINER_TEST_CARDS" in os.environ:
        from tests.simulated.simcuda import plugin

        counts = plugin.machine.memory.blocks.__contains__
    recipe = recipe_of("mode=fsdp", "data.val_samples=8", "optimizer.name=adamw", *words)
    world = create_world(recipe)
    world.connect(100.0)
    strategy, batch = real(recipe, world)
    parameters = strategy.named_parameters()
    optimizer = build_optimizer(parameters, recipe.optimizer)
    updater = Updater(optimizer, recipe, strategy.gradient_device, None)
    state = [*name_optimizer_state(optimizer, parameters).values()]
    known_names = [
        *parameters.values(),
        *strategy.module.buffers(),
        *state,
        batch.inputs,
        batch.targets,
    ]
    with Alive(known_names, counts) as alive:
        for step in range(2):
            if step:
                alive.peak = 0
            for micro in range(recipe.accumulate):
                last = micro == recipe.accumulate - 1
                loss = strategy.forward_backward(batch, 1 / recipe.batch_size, sync=last)
            strategy.reduce_gradients()
            gradients = size(p.grad for p in parameters.values() if p.grad is not None)
            updater.step(loss, strategy, False)
            optimizer.zero_grad()
    kept = {
        "parameters": size(parameters.values()),
        "gradients": gradients,
        "optimizer": size(state),
    }
    whole = 4 * sum(shape.numel() for shape in strategy.shapes.values())
    Path(folder, f"{world.rank}.json").write_text(
        json.dumps({**kept, "whole": whole, "peak": alive.peak})
    )
    world.close()
    os._exit(0)  # gloo may abort in the interpreter's own end


if __name__ == "__main__":
    main(*sys.argv[1:])
