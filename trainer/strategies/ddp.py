"""`ddp`: a replica on every rank, gradients averaged while the backward pass still runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data import Batch, Shard
from trainer.strategies.base import Strategy
from trainer.strategies.sync_batchnorm import convert_sync_batchnorm
from trainer.world import lost_peers


class DistributedDataParallel(Strategy):
    """`torch.nn.parallel.DistributedDataParallel`, with bucket views and `no_sync` while accumulating."""

    def shard(self) -> Shard:
        return Shard(self.world.rank, self.world.size)

    def setup(self, model: nn.Module) -> None:
        self.wrapped: nn.parallel.DistributedDataParallel | None = None
        if self.world.size == 1:
            super().setup(model)
            return
        if self.recipe.sync_bn:
            model = convert_sync_batchnorm(model, self.device)
        super().setup(model)
        with lost_peers():
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.module,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # Under accumulation a static graph fails inside the reducer.
                static_graph=self.recipe.accumulate == 1,
            )

    def outputs(self, inputs: Tensor) -> Tensor:
        if self.wrapped is None or not torch.is_grad_enabled():
            return super().outputs(inputs)
        with self.autocast():
            out: Tensor = self.wrapped(inputs)
        return out

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        if self.wrapped is None:
            return super().forward_backward(batch, weight, sync)
        with lost_peers(), nullcontext() if sync else self.wrapped.no_sync():
            # DDP divides the sum of gradients by the ranks, and `weight` has done so already.
            size = self.world.size
            return super().forward_backward(batch, weight * size, sync) / size

    def settle(self) -> None:
        """Rank 0's buffers are the truth: DDP broadcasts them at every forward pass, so the last step's are missing."""
        if self.wrapped is not None:
            with lost_peers():
                for buffer in self.module.buffers():
                    dist.broadcast(buffer, src=0)
