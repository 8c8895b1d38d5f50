"""`ddp`: a replica on every rank, gradients averaged while the backward pass still runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.models.norms import unlike, writes_statistics_only
from trainer.models.undisturbed import undisturbed
from trainer.modes.base import Communication, Strategy
from trainer.modes.sync_batchnorm import synchronise_batch_norm
from trainer.processes.world import lost_peers
from trainer.recipe.versions import torch_has
from trainer.telemetry.clocks import synchronise

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

PAIRS = 8  # passes with and without communication, at most, to find what it costs


def read_in_training(model: nn.Module) -> bool:
    """Whether the model has buffers that a training step may read, so that every rank needs rank 0's at each.

    Batch norm only writes its own then: rank 0's are the same with and without a broadcast, and `settle` spreads them.
    """
    holders = {name: module for name, module in model.named_modules() if any(True for _ in module.buffers(False))}
    return bool(unlike(holders, writes_statistics_only))


def mean_in_bf16(bucket: GradBucket, ranks: int) -> torch.futures.Future[Tensor]:
    """A bucket's mean over all ranks, sent as bf16, by which every rank gets the same numbers.

    As torch's `bf16_compress_hook`, which divides what is rounded already, and which a torch without CUDA refuses.
    """
    gradients = bucket.buffer()
    summed = dist.all_reduce(gradients.bfloat16(), async_op=True).get_future()
    return summed.then(lambda done: gradients.copy_(done.value()[0]).div_(ranks))


class DistributedDataParallel(Strategy):
    """`torch.nn.parallel.DistributedDataParallel`, with bucket views and `no_sync` while accumulating."""

    wrapped: nn.parallel.DistributedDataParallel | None = None

    def place(self, model: nn.Module) -> None:
        self._broadcasts = read_in_training(model)
        if self.recipe.sync_bn and self.world.size > 1:
            synchronise_batch_norm(model)
        super().place(model)

    def finish(self) -> None:
        super().finish()
        if self.world.size == 1:
            return
        in_forward = "forward_sync_buffers" if torch_has("forward_sync_buffers") else "broadcast_buffers"
        synced: dict[str, Any] = {in_forward: self._broadcasts}
        with lost_peers(), undisturbed([self.module], self.device):
            # Under accumulation a static graph fails inside the reducer.
            static_graph = self.recipe.accumulate == 1 and self.world.broadcast_object(self._leaves_parameters_unused())
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.module,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                static_graph=static_graph,
                **synced,
            )
            if self.recipe.ddp.compress == "bf16":
                # Torch looks at a hook's annotations, which a lambda has none of.
                self.wrapped.register_comm_hook(self.world.size, lambda ranks, bucket: mean_in_bf16(bucket, ranks))
            # DDP rebuilds its buckets after its first backward pass, and from three ranks on the order of a sum in gloo
            # depends on a gradient's place in its bucket: every start has to have the buckets of a resumed run.
            for _ in range(2):
                self._pass_zeros(None if self.recipe.compile else 2)  # another shape would be compiled a second time
        self.module.zero_grad()

    def _leaves_parameters_unused(self) -> bool:
        """Whether a pass does: then DDP needs a static graph, which takes time for each parameter in each step.

        Not compiled here: inside DDP a graph is cut at its buckets, and outside it is not.
        """
        with torch.compiler.set_stance("force_eager"):
            self._pass_zeros(2)
        unused = any(p.requires_grad and p.grad is None for p in self._parameters)
        self.module.zero_grad()
        return unused

    def _pass_zeros(self, rows: int | None) -> None:
        """Forward and backward on zeros."""
        self.train()
        inputs = self.context.example.zeros(self.device, rows, self.recipe.channels_last).inputs
        self.outputs(inputs).sum().backward()  # type: ignore[no-untyped-call]

    def outputs(self, inputs: Tensor) -> Tensor:
        if self.wrapped is None or not torch.is_grad_enabled():
            return super().outputs(inputs)
        try:
            return self.in_precision(self.wrapped, inputs)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            name = self.recipe.model.name
            if self.recipe.accumulate == 1:
                raise RecipeError(
                    f"model.name={name} has parameters that some passes use and others do not, which ddp cannot "
                    "average: use mode=single"
                ) from None
            raise RecipeError(
                f"model.name={name} has parameters that a pass does not use, and ddp cannot accumulate over those: set "
                "accumulate=1, or mode=single"
            ) from None

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        if self.wrapped is None:
            return super().forward_backward(batch, weight, sync)
        with lost_peers(), nullcontext() if sync else self.wrapped.no_sync():
            # DDP divides the sum of gradients by the ranks, and `weight` has done so already.
            size = self.world.size
            return super().forward_backward(batch, weight * size, sync) / size

    def settle(self, averages: Mapping[str, Tensor]) -> None:
        """Rank 0's buffers are the truth: the others' are its own from here on."""
        if self.wrapped is not None:
            self.broadcast_buffers(averages)

    def close(self) -> None:
        """Free DDP while others still hold the process group.

        Were its reducer the last, it would wait for gloo's thread with the interpreter's lock, which that thread may
        want for the last tensor it was given: with torch 2.11 one run in dozens would never end.
        """
        self.wrapped = None

    def communication(self, steps: int, step_seconds: float, budget: float) -> Communication:
        """Passes with and without DDP around the model, in turn; where there is no time for these, one all-reduce of as
        many bytes, of which some may be hidden."""
        if self.wrapped is None:
            return Communication(0.0)
        each = 2 * step_seconds / self.recipe.accumulate
        pairs, budget = self.world.broadcast_object((min(PAIRS, int(budget / each) - 1), budget))
        with undisturbed([self.module], self.device):
            measured = self._exposed(pairs) if pairs > 0 else self._exchanged(budget)
        self.module.zero_grad()
        return measured

    def _exposed(self, pairs: int) -> Communication:
        batch = self.context.example.zeros(self.device, channels_last=self.recipe.channels_last)
        self.train()
        wrapped, times = self.wrapped, {True: [0.0], False: [0.0]}
        synchronise([self.device])
        for n in range(2 * (1 + pairs)):
            together = n % 2 == 0
            self.wrapped = wrapped if together else None
            self.world.barrier()
            begun = time.perf_counter()
            self.forward_backward(batch, 1.0)
            synchronise([self.device])
            times[together].append(time.perf_counter() - begun)
            self.module.zero_grad()
        self.wrapped = wrapped
        with_ddp, without = (statistics.median(times[key][2:]) for key in (True, False))  # the first are to warm up
        return Communication(self._mean(max(0.0, with_ddp - without)))

    def _exchanged(self, budget: float) -> Communication:
        size = sum(p.numel() * p.element_size() for p in self._parameters if p.requires_grad)
        size //= 2 if self.recipe.ddp.compress else 1
        return Communication(self.all_reduce_seconds(size, budget), at_most=True)
