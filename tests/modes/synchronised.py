"""torch's own SyncBatchNorm under `torch.compile`, without a GPU: `python -m tests.modes.synchronised RANK FILE`.

Its kernels, which exist for GPUs alone, are written in plain operations here; its collectives, its autograd function
and what the compiler makes of them are torch's. Rank 0 prints the losses of four steps, eager and compiled, and the
number of graphs that were compiled, as JSON.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

from tests.simulated.simcuda.batch_norm import KERNELS
from trainer.modes.sync_batchnorm import convert_sync_batchnorm


def without_gpus():
    """Let torch's layer take CPU tensors, and nothing else of it change."""
    source = textwrap.dedent(inspect.getsource(nn.SyncBatchNorm.forward))
    assert '"cuda",' in source
    exec(source.replace('"cuda",', '"cuda", "cpu",'), vars(batchnorm))
    nn.SyncBatchNorm.forward = vars(batchnorm).pop("forward")
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None  # which refuses CPU modules
    for name, kernel in KERNELS.items():
        setattr(torch, name, kernel)


def losses(rank, compiled):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    model = convert_sync_batchnorm(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5)), torch.device("cuda"))
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
    without_gpus()
    ours = [losses(number, compiled) for compiled in (False, True)]
    if number == 0:
        print(json.dumps([*ours, torch._dynamo.utils.counters["stats"]["unique_graphs"]]))
