"""Families of models under mode=fsdp compared with the whole model.

Run as `sharded_families.py FOLDER NAME:SIZE...` under torchrun.

Rank 0 writes FOLDER/families.json: by name, how far the losses and gradient norms of two steps and
the outputs in evaluation are from those of one process, as a part of them, or the sentence with
which the model is refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.strategies import create_strategy
from trainer.data import Batch
from trainer.distributed.world_setup import create_world
from trainer.errors import RecipeError
from trainer.models.zoo import build
from trainer.recipe import ModelRecipe, load

ROWS = 4
CLASSES = 5
RATE = 1e-3
# The seed of dropout and stochastic depth.
NOISE = (
    "p",
    "drop_prob",
    "drop_rate",
    "dropout",
    "attention_dropout",
)


def model_of(name, size):
    torch.manual_seed(0)
    model = build(ModelRecipe(name=name), CLASSES, 3, size).double()
    for module in model.modules():
        for key in NOISE:
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    return model


def distance(value, reference):
    return ((value - reference).norm() / reference.norm()).item()


def distances(name, size, world):
    recipe = load(
        None,
        "mode=fsdp",
        "devices=[cpu]",
        "sync_bn=true",
        "channels_last=false",
        f"model.name={name}",
    )
    inputs = torch.randn(
        ROWS,
        3,
        size,
        size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    targets = torch.arange(ROWS) % CLASSES
    each = ROWS // world.size
    rows = slice(each * world.rank, each * (world.rank + 1))
    shape = (each, 3, size, size)
    plain = model_of(name, size).train()
    sharded = create_strategy(recipe, world, shape, classes=CLASSES, dtype=torch.float64)
    sharded.setup(model_of(name, size))
    apart = []
    for _ in range(2):
        sharded.train()
        plain.train()
        loss = world.sum_(
            sharded.forward_backward(Batch(inputs[rows], targets[rows], each), 1 / ROWS)
        )
        sharded.reduce_gradients()
        reference = cross_entropy(plain(inputs).float(), targets)
        reference.backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        apart += [distance(loss, reference.detach()), distance(sharded.grad_norm(), norm)]
        with torch.no_grad():
            for p in [*plain.parameters(), *sharded.named_parameters().values()]:
                if p.grad is not None:
                    p -= RATE / norm * p.grad
                    p.grad = None
        sharded.sync_weights({})
        sharded.train(False)
        plain.eval()
        with torch.no_grad():
            apart.append(distance(sharded.forward(inputs), plain(inputs)))
    return apart


def main():
    world = create_world(load(None, "mode=fsdp", "devices=[cpu]"))
    world.connect(300.0)
    collected = {}
    for case in sys.argv[2:]:
        name, _, size = case.rpartition(":")
        try:
            collected[name] = distances(name, int(size), world)
        except RecipeError as error:
            collected[name] = str(error)
        if world.is_main:
            (Path(sys.argv[1]) / "families.json").write_text(json.dumps(collected))
    world.close()
    os._exit(0)  # Deleting all modules at exit takes a second.


if __name__ == "__main__":
    main()
