"""`ddp`: a replica on every rank, gradients averaged while the backward pass still runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704). Torch calls the
model as it is, but for `sync_bn`, whose layers are checked one by one: unlike stages and shards it needs no proof of
`models.equivalence`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.models.host_state import of_library
from trainer.models.norms import acts_as_batch_norm, unlike
from trainer.models.undisturbed import undisturbed
from trainer.modes.base import Communication, Strategy, by_type, in_a_row, put_back
from trainer.modes.sync_batchnorm import synchronise_batch_norm
from trainer.processes.world import lost_peers
from trainer.recipe.versions import torch_has
from trainer.telemetry.clocks import synchronise

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

PAIRS = 8  # passes with and without communication, at most, to find what it costs
LOOKS = 4  # passes that tell whether a model leaves parameters unused: by chance, some do in one and not in another


def read_in_training(model: nn.Module) -> bool:
    """Whether the model has buffers that a training step may read, so that every rank needs rank 0's at each.

    Batch norm only writes its own then: rank 0's are the same with and without a broadcast, and `sync_weights` spreads
    them.
    """
    holders = {name: module for name, module in model.named_modules() if any(True for _ in module.buffers(False))}
    return bool(unlike(holders, acts_as_batch_norm))


def mean_in_bf16(bucket: GradBucket, ranks: int) -> torch.futures.Future[Tensor]:
    """A bucket's mean over all ranks, sent as bf16, by which every rank gets the same numbers.

    As torch's `bf16_compress_hook`, which divides what is rounded already, and which a torch without CUDA refuses.
    """
    gradients = bucket.buffer()
    summed = dist.all_reduce(gradients.bfloat16(), async_op=True).get_future()
    return summed.then(lambda done: gradients.copy_(done.value()[0]).div_(ranks))


def warn_of_none_unused() -> None:
    """Let torch say now, and to nobody, what it says once a process: that no parameter was unused, so not to look."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)(torch.zeros(1, 1))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


class DistributedDataParallel(Strategy):
    """`torch.nn.parallel.DistributedDataParallel`, with bucket views and `no_sync` while accumulating."""

    wrapped: nn.parallel.DistributedDataParallel | None = None

    def to_device(self, model: nn.Module) -> None:
        self._broadcasts = read_in_training(model)
        if self.exchanges_after_passes and self._broadcasts:
            raise RecipeError(
                f"model.name={self.recipe.model.name} has buffers that a pass may read, so ranks exchange them within "
                "it, which cannot be recorded: set graphs=false"
            )
        if self.recipe.sync_bn and self.world.size > 1:
            synchronise_batch_norm(model)
        super().to_device(model)

    def connect(self) -> None:
        super().connect()
        if self.world.size == 1:
            return
        # Passes of a user's own code may change weights, and other parameters may be unused in each.
        own = any(not of_library(type(part)) for part in self.module.modules())
        with lost_peers(), undisturbed([self.module], self.device, weights=own):
            looks = LOOKS if own else 1
            unused = bool(self.world.max_(torch.tensor(float(self._leaves_parameters_unused(looks)))))
            if self.exchanges_after_passes and unused:
                raise RecipeError(
                    f"model.name={self.recipe.model.name} leaves parameters unused, of which ranks have to tell each "
                    "other within a pass, which cannot be recorded: set graphs=false"
                )
            if unused:
                warn_of_none_unused()
            try:
                if not self.exchanges_after_passes:
                    self._replicate(find_unused_parameters=unused)
            except RuntimeError as error:  # looked for, parameters inside of a reentrant checkpoint seem unused
                if not unused or "ready only once" not in str(error):
                    raise
                if self.recipe.pieces > 1:  # a static graph fails inside the reducer
                    raise RecipeError(
                        f"model.name={self.recipe.model.name} leaves parameters unused and has a reentrant checkpoint, "
                        "which ddp cannot accumulate over: set accumulate=1, or checkpoint(..., use_reentrant=False)"
                    ) from None
                self._replicate(static_graph=True)
        self.module.zero_grad()
        if self.exchanges_after_passes:  # rank 0's weights on every rank, as DDP does it
            for tensors in by_type([*self._parameters, *self.named_buffers().values()]):
                put_back(self.world.broadcast_(in_a_row(tensors)), [tensor.detach() for tensor in tensors])

    def _replicate(self, **graph: bool) -> None:
        """Put DDP around the module."""
        in_forward = "forward_sync_buffers" if torch_has("forward_sync_buffers") else "broadcast_buffers"
        options: dict[str, Any] = {in_forward: self._broadcasts, **graph}
        self.wrapped = nn.parallel.DistributedDataParallel(
            self.module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **options,
        )
        if self.recipe.ddp.compress == "bf16":
            # Torch looks at a hook's annotations, which a lambda has none of.
            self.wrapped.register_comm_hook(self.world.size, lambda ranks, bucket: mean_in_bf16(bucket, ranks))
        self.passes_apart = not (self._broadcasts or self.recipe.sync_bn or self.wrapped.static_graph)
        # DDP rebuilds its buckets after its first backward pass, and from three ranks on the order of a sum in gloo
        # depends on a gradient's place in its bucket: every start has to have the buckets of a resumed run.
        for _ in range(2):
            self._pass_zeros(None if self.recipe.compile else 2)  # another shape would be compiled a second time

    def reduce_gradients(self) -> None:
        """Where passes exchange nothing: all gradients of a type in one message, after them."""
        if not self.exchanges_after_passes:
            return
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if any(parameter.grad is None for parameter in trained):
            raise self._left_out()
        with lost_peers():
            self._sum([parameter.grad for parameter in trained if parameter.grad is not None])

    def _sum(self, trained: Sequence[Tensor]) -> None:
        for gradients in by_type(trained):
            sizes = [gradient.numel() for gradient in gradients]
            row = torch.empty(sum(sizes), dtype=gradients[0].dtype, device=self.device)
            pairs = zip(torch.split(row, sizes), gradients, strict=True)
            # Of the same strides, or a copy would be made of each.
            views = [part.as_strided(g.shape, g.stride(), part.storage_offset()) for part, g in pairs]
            torch._foreach_copy_(views, gradients)
            if self.recipe.ddp.compress == "bf16":
                row.copy_(self.world.sum_(row.bfloat16()))
            else:
                self.world.sum_(row)
            torch._foreach_copy_(gradients, views)

    def _leaves_parameters_unused(self, looks: int) -> bool:
        """Whether one of so many passes does: then DDP looks for them in each, which takes time for each parameter.

        Others may leave out other ones, so that a static graph would not do. Not compiled here: inside DDP a graph is
        cut at its buckets, and outside it is not.
        """
        unused = False
        for _ in range(looks):
            with torch.compiler.set_stance("force_eager"):
                self._pass_zeros(2)
            unused |= any(p.requires_grad and p.grad is None for p in self._parameters)
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
        return self.in_precision(self.wrapped, inputs)

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        if self.wrapped is None:
            return super().forward_backward(batch, weight, sync)
        with lost_peers(), nullcontext() if sync else self.wrapped.no_sync():
            # DDP divides the sum of gradients by the ranks, and `weight` has done so already.
            size = self.world.size
            loss = super().forward_backward(batch, weight * size, sync) / size
        if sync:
            try:
                self.wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError:  # this rank's pass left out what others used: its gradients are no averages
                raise self._left_out() from None
        return loss

    def _left_out(self) -> RecipeError:
        return RecipeError(
            f"model.name={self.recipe.model.name} left parameters out of this pass, and ddp, which saw it use all "
            "of them at the start, cannot average the others any more; no weight was changed: use mode=single"
        )

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Rank 0's buffers are the truth: the others' are its own from here on."""
        if self.wrapped is not None or self.exchanges_after_passes:
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
        if self.exchanges_after_passes:
            return self._exchanged(self.world.broadcast_object(budget))._replace(at_most=False)  # nothing hides it
        if self.wrapped is None:
            return Communication(0.0)
        each = 2 * step_seconds / self.recipe.pieces
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
