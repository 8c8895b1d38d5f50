"""One evaluation, used by training and by everything that comes after it: every sample counts exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer.data import Batch
from trainer.metrics import Sums
from trainer.strategies import Strategy
from trainer.world import World


def evaluate(
    strategy: Strategy,
    batches: Iterator[Batch],
    world: World,
    boundary: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Loss and accuracy of the model as it stands.

    Args:
        strategy: its weights already settled.
        batches: this rank's share of the held-out set, full-shape batches of which `count` rows are real.
        world: sums are added over its ranks, once.
        boundary: called after every batch with the number done.

    Returns:
        val_loss (mean cross-entropy, without label smoothing), val_top1, val_top5 (fractions), val_samples.
    """
    strategy.train(False)
    sums = Sums.zero(world.device)
    for done, batch in enumerate(batches, 1):
        outputs = strategy.forward(batch.inputs)
        if outputs is not None:
            sums.add(outputs, batch.targets, batch.count)
        boundary(done)
    loss, correct1, correct5, count = world.sum_(sums.as_tensor()).tolist()
    strategy.train(True)
    total = max(1.0, count)
    return {
        "val_loss": loss / total if count else torch.nan,
        "val_top1": correct1 / total,
        "val_top5": correct5 / total,
        "val_samples": int(count),
    }
