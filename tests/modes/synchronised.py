"""Synchronised BatchNorm under `torch.compile`: `python -m tests.modes.synchronised RANK FILE`.

Rank 0 prints the losses of four steps, eager and compiled, and the number of graphs that were compiled, as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.modes.sync_batchnorm import synchronise_batch_norm


def losses(rank, compiled):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))
    synchronise_batch_norm(model)
    if compiled:
        model.compile(backend="aot_eager")
    ddp, found = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(10 + 2 * step + rank)
        loss = ddp(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    number, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=2)
    ours = [losses(number, compiled) for compiled in (False, True)]
    if number == 0:
        print(json.dumps([*ours, torch._dynamo.utils.counters["stats"]["unique_graphs"]]))
