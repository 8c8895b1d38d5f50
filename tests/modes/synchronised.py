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

from trainer.modes.sync_batchnorm import convert_sync_batchnorm

AXES = [0, 2, 3]


def column(values):
    return values.view(1, -1, 1, 1)


def stats(x, eps):
    return x.mean(AXES), torch.rsqrt(x.var(AXES, unbiased=False) + eps)


def gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    total, share = counts.sum(), counts[:, None] / counts.sum()
    mean = (means * share).sum(0)
    variance = ((invstds**-2 - eps + means**2) * share).sum(0) - mean**2
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, torch.rsqrt(variance + eps)


def elemt(x, weight, bias, mean, invstd, eps):
    return (x - column(mean)) * column(invstd * weight) + column(bias)


def backward_reduce(gradient, x, mean, invstd, weight, *wanted):
    products = (gradient * (x - column(mean))).sum(AXES)
    return gradient.sum(AXES), products, products * invstd, gradient.sum(AXES)


def backward_elemt(gradient, x, mean, invstd, weight, sums, products, counts):
    total = counts.sum()
    inner = gradient - column(sums / total) - (x - column(mean)) * column(invstd**2 * products / total)
    return inner * column(invstd * weight)


def without_gpus():
    """Let torch's layer take CPU tensors, and nothing else of it change."""
    source = textwrap.dedent(inspect.getsource(nn.SyncBatchNorm.forward))
    assert '"cuda",' in source
    exec(source.replace('"cuda",', '"cuda", "cpu",'), vars(batchnorm))
    nn.SyncBatchNorm.forward = vars(batchnorm).pop("forward")
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None  # which refuses CPU modules
    torch.batch_norm_stats, torch.batch_norm_gather_stats_with_counts = stats, gather_stats
    torch.batch_norm_elemt = elemt
    torch.batch_norm_backward_reduce, torch.batch_norm_backward_elemt = backward_reduce, backward_elemt


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
