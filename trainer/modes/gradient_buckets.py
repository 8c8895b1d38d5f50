"""Sums of gradients over the ranks that start while the backward pass still runs, in Python.

`torch.nn.parallel.DistributedDataParallel` (DDP) does the same in C++, and keeps state on the host
that the replay of a CUDA graph would not change. So `ddp` uses these sums for passes that are
captured. Buckets are as in section 3.2.3 of Li et al. (arXiv:2006.15704).
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.modes.flattening import view_with_strides

# Maximum number of bytes of the first bucket, and of every other one, as in DDP. The first bucket
# is small, so that the exchange starts early.
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20


@dataclass
class Bucket:
    """Parameters whose gradients are summed by one message.

    Attributes:
        free: Number of bytes for further parameters.
        parameters: Parameters of one data type.
        missing: The parameters, by id, whose gradients the running pass has not computed yet.
        message: Flat gradients that are being sent.
        work: The running sum. None before it starts.
    """

    free: int
    parameters: list[Tensor] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    message: Tensor | None = None
    work: Any = None

    @property
    def gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters]
        assert all(gradient is not None for gradient in gradients)
        return gradients  # type: ignore[return-value]


def fill_buckets(parameters: Sequence[Tensor]) -> list[Bucket]:
    """Distribute parameters over buckets.

    Args:
        parameters: In the order in which the backward pass computes their gradients.

    Returns:
        The buckets, in the order in which they become complete.
    """
    buckets: list[Bucket] = []
    # The bucket of each data type that is not full.
    filling: dict[torch.dtype, Bucket] = {}
    for parameter in parameters:
        bucket = filling.get(parameter.dtype)
        if bucket is None or bucket.free < parameter.nbytes:
            bucket = Bucket(free=BUCKET if buckets else FIRST_BUCKET)
            buckets.append(bucket)
            filling[parameter.dtype] = bucket
        bucket.parameters.append(parameter)
        bucket.free -= parameter.nbytes
    turns = {id(parameter): turn for turn, parameter in enumerate(parameters)}
    return sorted(buckets, key=lambda bucket: turns[id(bucket.parameters[-1])])


class GradientBuckets:
    """Sums gradients over all ranks, each bucket as soon as the backward pass has computed it."""

    def __init__(self, world: World, parameters: Sequence[Tensor], compress: bool) -> None:
        """Register a hook for each parameter.

        Args:
            world: The ranks.
            parameters: As in `fill_buckets`, in the same order on all ranks.
            compress: Whether to send bf16.
        """
        self._world = world
        self._compress = compress
        self.buckets = fill_buckets(parameters)
        # Number of buckets whose sums have started in this pass.
        self._started = 0
        self._is_active = False
        self._hooks = []
        # Hooks of tensors are invisible to the garbage collector, so they do not refer to this
        # object, which refers to the tensors.
        reference = weakref.ref(self)
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                note = partial(_note_gradient, reference, index)
                hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def sum_in_pass(self) -> Iterator[None]:
        """Sum the gradients of the backward pass in this block; the sums are complete at its end.

        The block has one backward pass. If a parameter got no gradient, nothing is copied back, and
        `is_complete` is False.
        """
        for bucket in self.buckets:
            bucket.missing = {id(parameter) for parameter in bucket.parameters}
        self._started = 0
        self._is_active = True
        try:
            yield
            if self.is_complete:
                for bucket in self.buckets:
                    self._finish(bucket)
        finally:
            self._is_active = False
            for bucket in self.buckets:
                bucket.message = None
                bucket.work = None

    @property
    def is_complete(self) -> bool:
        """Whether the last pass computed the gradients of all parameters."""
        return self._started == len(self.buckets)

    def note_gradient(self, index: int, parameter: Tensor) -> None:
        """Start the sums of complete buckets, on all ranks in the same order.

        Args:
            index: Index of the bucket of the parameter.
            parameter: A parameter whose gradient has been computed.
        """
        if not self._is_active:
            return
        missing = self.buckets[index].missing
        if id(parameter) not in missing:
            raise RecipeError(
                "the backward pass computes a gradient in two parts, of which the first may have "
                "been sent to other ranks: use checkpoint(..., use_reentrant=False), or "
                "graphs=false"
            )
        missing.remove(id(parameter))
        while not self.is_complete and not self.buckets[self._started].missing:
            self._start(self.buckets[self._started])
            self._started += 1

    def _start(self, bucket: Bucket) -> None:
        gradients = bucket.gradients
        flat = torch.empty(
            sum(map(Tensor.numel, gradients)),
            dtype=gradients[0].dtype,
            device=gradients[0].device,
        )
        torch._foreach_copy_(view_with_strides(flat, gradients), gradients)
        bucket.message = flat.bfloat16() if self._compress else flat
        bucket.work = self._world.start_sum(bucket.message)

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.message is not None
        self._world.wait(bucket.work)
        gradients = bucket.gradients
        torch._foreach_copy_(gradients, view_with_strides(bucket.message, gradients))


def _note_gradient(reference: weakref.ref[GradientBuckets], index: int, parameter: Tensor) -> None:
    buckets = reference()
    if buckets is not None:
        buckets.note_gradient(index, parameter)
