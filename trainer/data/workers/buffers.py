"""Where readers put batches: buffers of their own, or ones that processes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data.photos.photo_reader import Reader, Report
from trainer.data.sets import Datasets, TensorSpec


class Buffers(NamedTuple):
    """Slots for batches: inputs (slots, rows, ...), labels (slots, rows, ...), and indices (slots, rows) to read."""

    inputs: Tensor
    labels: Tensor
    order: Tensor

    @classmethod
    def new(cls, datasets: Datasets, rows: int, count: int, shared: bool) -> Buffers:
        inputs, targets = buffered(datasets), datasets.targets
        made = cls(
            torch.empty(count, rows, *inputs.shape, dtype=inputs.dtype),
            torch.zeros(count, rows, *targets.shape, dtype=targets.dtype),
            torch.zeros(count, rows, dtype=torch.int64),
        )
        for tensor in made if shared else ():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return made


def buffered(datasets: Datasets) -> TensorSpec:
    """A sample's inputs as workers hand them over."""
    size = datasets.image_size
    return datasets.plain or TensorSpec((size, size, datasets.channels), torch.uint8)


Makes = Callable[[Buffers], Sequence[Reader]]  # a reader of each part, which fills these


class Filled(NamedTuple):
    """A batch that has been read: in a slot that is the caller's until it asks for the next."""

    inputs: Tensor
    labels: Tensor
    report: Report
