"""`ddp`: a replica on every rank; gradients are averaged while the backward pass still runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(arXiv:2006.15704). DDP calls the model unchanged, so the outputs are not compared with those of the
plain model. `check_gradients` compares the gradients.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainer.data import Batch
from trainer.distributed.peers import translate_peer_errors
from trainer.errors import RecipeError, is_out_of_memory
from trainer.memory.measuring import count_bytes
from trainer.models.equivalence import NOISE, relative_error
from trainer.models.norms import select_unlike_batch_norm
from trainer.models.reachable import is_own
from trainer.models.undisturbed import restore_after
from trainer.modes.base import Strategy
from trainer.modes.flattening import apply_collective
from trainer.modes.gradient_buckets import GradientBuckets
from trainer.modes.measures import Communication
from trainer.modes.proofs import FLOOR, SHARDED_TOLERANCE, seed_alike
from trainer.modes.sync_batchnorm import synchronise_batch_norm
from trainer.telemetry.clocks import synchronise
from trainer.versions import torch_has

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

# Maximum number of timed pairs of passes, one with and one without communication.
MEASURED_PAIRS = 8
# Number of passes over the same inputs that `find_probe_inputs` runs to find out whether a model of
# the user's own code leaves parameters unused, because this may vary from pass to pass. For other
# models, a single pass is run.
PROBE_PASSES = 4
_NO_EXCHANGE = nullcontext()


def needs_broadcasts(strategy: Strategy, model: nn.Module) -> bool:
    """Return whether rank 0 must copy its buffers to the other ranks before each pass.

    Raises:
        RecipeError: it must, and CUDA graphs capture the passes.
    """
    is_read = read_in_training(model)
    if is_read and strategy.captures_exchange:
        raise RecipeError(
            f"model.name={strategy.recipe.model.name} has buffers that a pass may read, so ranks "
            "copy them before it, which is not captured: set graphs=false"
        )
    return is_read


def read_in_training(model: nn.Module) -> bool:
    """Return True if a training step may read buffers, so that ranks must share them in each step.

    In training, BatchNorm only writes its buffers. Ranks need not share such buffers in each step,
    because `sync_weights` copies rank 0's buffers to the other ranks before evaluation and
    checkpoints.
    """
    holders = {
        name: module
        for name, module in model.named_modules()
        if next(module.buffers(False), None) is not None
    }
    return bool(select_unlike_batch_norm(holders))


def average_in_bf16(bucket: GradBucket, ranks: int) -> torch.futures.Future[Tensor]:
    """Average the gradients of a bucket over all ranks, which send them as bf16.

    All ranks get the same average. Torch's `bf16_compress_hook` is similar, but divides the rounded
    gradients before the sum, and raises an error if torch was built without CUDA.
    """
    gradients = bucket.buffer()
    summed = dist.all_reduce(gradients.bfloat16(), async_op=True).get_future()

    def write_mean(finished: torch.futures.Future[list[Tensor]]) -> Tensor:
        total = finished.value()[0]
        return gradients.copy_(total).div_(ranks)

    return summed.then(write_mean)


def swallow_unused_warning() -> None:
    """Trigger torch's warning that no parameter was unused, with stderr redirected to /dev/null.

    Torch prints this warning once per process, so the user's model does not trigger it again.
    """
    stderr = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)
        ddp(torch.zeros(1, 1))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


class DistributedDataParallel(Strategy):
    """A replica of the model on every rank, whose gradients are averaged over the ranks.

    Without CUDA graphs, `torch.nn.parallel.DistributedDataParallel` (DDP) does this. Gradients are
    then views of DDP's buckets, and if a step has several passes, all except the last one use
    `no_sync`. With CUDA graphs, `GradientBuckets` sums the gradients, in the eager passes before
    the capture, too. A single rank uses neither.
    """

    wrapped: nn.parallel.DistributedDataParallel | None = None
    gradient_buckets: GradientBuckets | None = None

    def to_device(self, model: nn.Module) -> None:
        self._broadcasts = needs_broadcasts(self, model)
        if self.recipe.sync_bn and self.world.size > 1:
            synchronise_batch_norm(model)
        super().to_device(model)

    def connect(self) -> None:
        super().connect()
        self.retrain()

    def retrain(self) -> None:
        """Prepare the exchange of the gradients of the parameters that train now.

        Without CUDA graphs, the module is wrapped in a new DDP. With CUDA graphs, rank 0's weights
        are copied to all ranks. A single rank does nothing.
        """
        if self.world.size == 1:
            return
        self.close()
        # A model of the user's own code is run several times, because the unused parameters may
        # vary. Weights are restored afterwards, because such code may change them in a pass.
        is_users_model = any(is_own(type(part)) for part in self.module.modules())
        with translate_peer_errors(), restore_after([self.module], self.device, weights=True):
            inputs, has_unused = self.find_probe_inputs(is_users_model)
            self._probe_inputs = inputs
            has_unused = self.world.is_any(has_unused)
            if self.captures_exchange and has_unused:
                raise self._describe_unused()
            if has_unused:
                swallow_unused_warning()
            try:
                if self.captures_exchange:
                    self.gradient_buckets = self._make_buckets(inputs)
                else:
                    self._replicate(inputs, find_unused_parameters=has_unused)
            except RuntimeError as error:
                # Torch's search for unused parameters marks those inside a reentrant checkpoint as
                # ready, and the backward pass marks them a second time. A static graph does not
                # need the search.
                if not has_unused or "ready only once" not in str(error):
                    raise
                # A static graph fails inside the reducer when gradients accumulate, so a step of
                # several passes is refused.
                if self.recipe.pieces > 1:
                    raise RecipeError(
                        f"model.name={self.recipe.model.name} leaves parameters unused and has a "
                        "reentrant checkpoint, which ddp cannot accumulate over: set accumulate=1, "
                        "or checkpoint(..., use_reentrant=False)"
                    ) from None
                self._replicate(inputs, static_graph=True)
        self.module.zero_grad()
        # DDP's constructor copies rank 0's weights to every rank. Without DDP they are copied here.
        if self.captures_exchange:
            tensors = [*self._parameters, *self.named_buffers().values()]
            apply_collective(map(Tensor.detach, tensors), self.world.broadcast_)

    def _replicate(self, inputs: Tensor, **graph: bool) -> None:
        """Wrap the module in DDP and run two passes.

        The passes use `inputs`, or with `compile=true` a whole micro-batch instead.
        """
        broadcast_option = "broadcast_buffers"
        if torch_has("forward_sync_buffers"):
            broadcast_option = "forward_sync_buffers"
        # Restore `requires_grad` first: the model's own `forward` may have unfrozen parameters, and
        # DDP reads the flags only once, in its constructor.
        self.train_for_probe()
        options: dict[str, Any] = {broadcast_option: self._broadcasts, **graph}
        self.wrapped = nn.parallel.DistributedDataParallel(
            self.module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **options,
        )
        if self.recipe.ddp.compress == "bf16":
            # The hook is a lambda, which has no annotations: torch compares the annotations of a
            # hook with types, and in this file annotations are strings.
            self.wrapped.register_comm_hook(
                self.world.size, lambda ranks, bucket: average_in_bf16(bucket, ranks)
            )
        self.has_local_passes = not (
            self._broadcasts or self.recipe.sync_bn or self.wrapped.static_graph
        )
        # DDP rebuilds its buckets after its first backward pass, and with three ranks or more the
        # order of a sum in gloo depends on a gradient's position in its bucket. Two passes make
        # the buckets of a new run equal those of a resumed one.
        if self.recipe.compile:
            # Use inputs of the shape of a step, because another shape would be compiled in
            # addition.
            inputs = self.context.sample()
        for _ in range(2):
            self._pass(inputs)

    def _make_buckets(self, inputs: Tensor) -> GradientBuckets:
        """Build buckets in the order in which rank 0 computes gradients.

        A resumed run finds the same order, and so the same bits of each sum.
        """
        order: list[nn.Parameter] = []
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        hooks = []
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(order.append)  # type: ignore[no-untyped-call]
            hooks.append(hook)
        with torch.compiler.set_stance("force_eager"):
            self._pass(inputs)
        for hook in hooks:
            hook.remove()
        # A gradient in two parts is in the order twice, and the hooks of the buckets refuse it.
        numbers = {parameter: number for number, parameter in enumerate(trained)}
        own_order = [numbers[parameter] for parameter in dict.fromkeys(order)]
        if self.world.is_any(len(own_order) < len(trained)):
            raise self._describe_unused()
        ordered = [trained[number] for number in self.world.broadcast_object(own_order)]
        self.has_local_passes = not self.recipe.sync_bn
        return GradientBuckets(self.world, ordered, self.recipe.ddp.compress == "bf16")

    def check_gradients(self) -> None:
        if self.wrapped is None and self.gradient_buckets is None:
            return
        # DDP copies rank 0's buffers to all ranks before a pass. The passes without DDP must start
        # from the same buffers.
        if self._broadcasts:
            self.broadcast_buffers({})
        alone = self._gradients_of(self.module)
        # In some models rounding decides which path a pass takes, for example if a layer selects
        # the larger of two nearly equal scores. Two passes of one rank then differ too, so their
        # difference is measured and a multiple of it is allowed.
        repeated = self._gradients_of(self.module)
        # The images and random numbers of all ranks are equal, so the average over the ranks should
        # equal the gradient of each rank.
        together = self._gradients_together()
        tolerance = SHARDED_TOLERANCE["bf16" if self.recipe.ddp.compress else self.recipe.precision]
        floor = FLOOR * get_total_norm([*alone.values()]).item()
        error = None
        # Compare only parameters that got a gradient in all three passes, because a model may use a
        # parameter in some passes only.
        for name in alone.keys() & together.keys() & repeated.keys():
            noise = relative_error(alone[name], repeated[name], floor)
            allowed = max(tolerance, NOISE * noise)
            if relative_error(alone[name], together[name], floor) > allowed:
                error = RecipeError(
                    f"model.name={self.recipe.model.name}: rank {self.world.rank} alone finds "
                    f"another gradient of {name} than all ranks together, for the same images: its "
                    "passes depend on the rank; use mode=single"
                )
        self.world.raise_any(error)

    def _gradients_together(self) -> dict[str, Tensor]:
        """Return the gradients of one pass, averaged over the ranks."""
        if self.gradient_buckets is None:
            assert self.wrapped is not None
            return self._gradients_of(self.wrapped)
        sums = self._gradients_of(self.module, self.gradient_buckets.sum_in_pass())
        if not self.gradient_buckets.is_complete:
            raise self._describe_left_out()
        return {name: total / self.world.size for name, total in sums.items()}

    def _gradients_of(
        self, module: nn.Module, exchange: AbstractContextManager[None] = _NO_EXCHANGE
    ) -> dict[str, Tensor]:
        """Return the gradients of one pass through `module`, which runs in the context `exchange`.

        Weights, buffers and random states are restored afterwards.
        """
        self.module.zero_grad()
        with (
            torch.compiler.set_stance("force_eager"),
            translate_peer_errors(),
            restore_after([self.module], self.device, weights=True),
        ):
            seed_alike()
            self.train_for_probe()
            with exchange:
                outputs = self.context.in_precision(module, self._probe_inputs)
                outputs.float().square().sum().backward()  # type: ignore[no-untyped-call]
            gradients = {
                name: parameter.grad.detach().clone()
                for name, parameter in self.named_parameters().items()
                if parameter.grad is not None
            }
        self.module.zero_grad()
        return gradients

    def find_probe_inputs(self, is_users_model: bool) -> tuple[Tensor, bool]:
        """Find inputs that the model accepts, and check whether a pass leaves parameters unused.

        If a pass does, DDP has to search for unused parameters in each pass, which costs time per
        parameter. In a model of the user's own code, the unused parameters may vary by chance or
        with the number of samples, so such a model runs several passes.

        Args:
            is_users_model: True if a class of the model is defined outside of installed libraries.

        Returns:
            (inputs, has_unused): the inputs, and True if some trained parameter got no gradient.
        """
        inputs = self.context.sample(2)
        try:
            has_unused = self._leaves_parameters_unused(inputs)
        except Exception as error:
            # Try again with a whole micro-batch: the model may need more than two samples, for
            # example to cut a batch into parts.
            if is_out_of_memory(error):
                raise
            self.module.zero_grad()
            inputs = self.context.sample()
            has_unused = self._leaves_parameters_unused(inputs)
        if is_users_model:
            for _ in range(PROBE_PASSES - 1):
                has_unused |= self._leaves_parameters_unused(inputs)
            # Under sync_bn ranks communicate in this pass, so if one rank ran out of memory, the
            # others would wait for it.
            if not self.recipe.sync_bn:
                with suppress(Exception):
                    has_unused |= self._leaves_parameters_unused(self.context.sample())
        return inputs, has_unused

    def _leaves_parameters_unused(self, inputs: Tensor) -> bool:
        """Return True if some trained parameter gets no gradient in a pass over `inputs`.

        The pass is not compiled: here the model would be compiled as one graph, but under DDP the
        compiler cuts the graph at DDP's buckets.
        """
        with torch.compiler.set_stance("force_eager"):
            self._pass(inputs)
        has_unused = any(p.requires_grad and p.grad is None for p in self._parameters)
        self.module.zero_grad()
        return has_unused

    def _pass(self, inputs: Tensor) -> None:
        """Run a forward and a backward pass."""
        self.train_for_probe()
        self.outputs(inputs).sum().backward()  # type: ignore[no-untyped-call]

    def outputs(self, inputs: Tensor) -> Tensor:
        if self.wrapped is None or not torch.is_grad_enabled():
            return super().outputs(inputs)
        return self.context.in_precision(self.wrapped, inputs)

    def forward_backward(
        self,
        batch: Batch,
        weight: float,
        sync: bool = True,
    ) -> Tensor:
        if self.gradient_buckets and sync:
            with self.gradient_buckets.sum_in_pass():
                loss = super().forward_backward(batch, weight, sync)
            if not self.gradient_buckets.is_complete:
                raise self._describe_left_out()
            return loss
        if self.wrapped is None:
            return super().forward_backward(batch, weight, sync)
        with translate_peer_errors(), nullcontext() if sync else self.wrapped.no_sync():
            # DDP divides the sum of gradients by the number of ranks. `weight` contains this
            # division already, so it is multiplied by the number of ranks.
            size = self.world.size
            loss = super().forward_backward(batch, weight * size, sync) / size
        if sync:
            try:
                self.wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError:
                # This rank did not use a parameter that other ranks used, so the gradients are not
                # averages.
                raise self._describe_left_out() from None
        return loss

    def _describe_unused(self) -> RecipeError:
        return RecipeError(
            f"model.name={self.recipe.model.name} leaves parameters unused, and with graphs=true "
            "ranks exchange all gradients: set graphs=false"
        )

    def _describe_left_out(self) -> RecipeError:
        return RecipeError(
            f"model.name={self.recipe.model.name} left parameters out of this pass, but its passes "
            "at the start used all of them, so ddp cannot average the gradients; no weight was "
            "changed: use mode=single"
        )

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Copy rank 0's buffers and their moving averages to the other ranks.

        Before the copy, the buffers of the other ranks are stale.
        """
        if self.wrapped is not None or self.captures_exchange:
            self.broadcast_buffers(averages)

    def close(self) -> None:
        """Remove the hooks of buckets, and free DDP while others refer to the process group.

        If DDP's reducer is the last to refer to the group, it waits for gloo's thread while it
        holds the interpreter's lock, which that thread may need to free its last tensor. With torch
        2.11, one run in several dozen would hang.
        """
        if self.gradient_buckets:
            self.gradient_buckets.close()
        self.gradient_buckets = None
        self.wrapped = None

    def communication(
        self,
        steps: int,
        step_seconds: float,
        budget: float,
    ) -> Communication:
        """Measure the time that communication adds to a step.

        The time is the difference between passes with and without DDP, which alternate. If `budget`
        is too short for a pair of passes, a single all-reduce of the same number of bytes is timed
        instead. This duration is an upper bound, because the backward pass may hide a part of the
        all-reduce. With CUDA graphs, an all-reduce is always timed by itself, because a replay has
        no variant without communication.
        """
        if self.captures_exchange:
            return self._exchanged(self.world.broadcast_object(budget))
        if self.wrapped is None:
            return Communication(0.0)
        pair_seconds = 2 * step_seconds / self.recipe.pieces
        pairs = min(MEASURED_PAIRS, int(budget / pair_seconds) - 1)
        pairs, budget = self.world.broadcast_object((pairs, budget))
        with restore_after([self.module], self.device):
            if pairs > 0:
                measured = self._exposed(pairs)
            else:
                measured = self._exchanged(budget)
        self.module.zero_grad()
        return measured

    def _exposed(self, pairs: int) -> Communication:
        """Measure the communication that the backward pass does not hide.

        Args:
            pairs: number of measured passes with DDP. As many passes without DDP are measured.
        """
        batch = self.context.example.batch(self.device, channels_last=self.recipe.channels_last)
        self.train_for_probe()
        wrapped = self.wrapped
        # Seconds of passes with DDP (True) and without it (False).
        times = {True: [0.0], False: [0.0]}
        synchronise([self.device])
        for n in range(2 * (1 + pairs)):
            uses_ddp = n % 2 == 0
            self.wrapped = wrapped if uses_ddp else None
            self.world.barrier()
            start = time.perf_counter()
            self.forward_backward(batch, 1.0)
            synchronise([self.device])
            times[uses_ddp].append(time.perf_counter() - start)
            self.module.zero_grad()
        self.wrapped = wrapped
        # Leave out the initial 0.0 and the first pass of each kind, which warms up.
        with_ddp = statistics.median(times[True][2:])
        without = statistics.median(times[False][2:])
        return Communication(self.average_over_ranks(max(0.0, with_ddp - without)))

    def _exchanged(self, budget: float) -> Communication:
        """Measure one all-reduce of the number of bytes that a step sends."""
        size = count_bytes(*(p for p in self._parameters if p.requires_grad))
        if self.recipe.ddp.compress:
            size //= 2
        return Communication(self.all_reduce_seconds(size, budget), at_most=True)
