"""Sums of an evaluation. Nothing here waits for a device in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass
class Sums:
    """Evaluation sums, 0-dim float64 on the device: added over batches and ranks, divided once."""

    loss: Tensor
    correct1: Tensor
    correct5: Tensor
    count: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Sums:
        return cls(*torch.zeros(4, dtype=torch.float64, device=device).unbind())

    def add(self, outputs: Tensor, targets: Tensor, count: int) -> None:
        """Count the first `count` rows of logits (N, classes) against class indices (N,); the rest is padding."""
        outputs, targets = outputs[:count].float(), targets[:count]
        self.loss += cross_entropy(outputs, targets, reduction="sum")
        best = outputs.topk(min(5, outputs.shape[1])).indices
        hits = best == targets[:, None]
        self.correct1 += hits[:, 0].sum()
        self.correct5 += hits.sum()
        self.count += count

    def as_tensor(self) -> Tensor:
        """(4,) on the CPU: loss, correct1, correct5, count."""
        return torch.stack([self.loss, self.correct1, self.correct5, self.count]).cpu()
