"""A model in stages is proven against the whole before the first step: it trains the same, or is
refused by name.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.modes import odd_models
from tests.strategies import CPU, assert_equals_whole, digits, staged
from trainer.errors import RecipeError
from trainer.modes.pipeline import stage_proof, stages


class Annealed(odd_models.Normed):
    """A counter that will matter long after the proof."""

    count = 0

    def forward(self, x):
        self.count += self.training
        return super().forward(x) * (2 if self.count > 1000 else 1)


class InFullPrecision(odd_models.Normed):
    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            x = self.b(x.float())
        return self.out(x)


@pytest.mark.parametrize(
    "words", ["mode=split", "pipeline.microbatches=2 pipeline.deferred_batch_norm=false"]
)
def test_models_whose_stages_would_differ_later_are_refused(words):
    with pytest.raises(RecipeError, match="mode=ddp"):
        staged(Annealed(), [CPU, CPU], words)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_part_in_full_precision_is_refused_where_that_matters(precision):
    with pytest.raises(RecipeError, match="mode=ddp"):
        staged(InFullPrecision(), [CPU, CPU], f"mode=split precision={precision}")
    staged(InFullPrecision(), [CPU, CPU], "mode=split")


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_state_that_each_pass_changes_is_refused_in_micro_batches(norm):
    def model():
        return nn.Sequential(
            nn.Flatten(),
            norm(nn.Linear(64, 16)),
            nn.ReLU(),
            nn.Linear(16, 10),
        )

    staged(model(), [CPU, CPU], "mode=split")
    with pytest.raises(RecipeError, match=r"1\..*_u.*mode=ddp"):
        staged(model(), [CPU, CPU], "pipeline.microbatches=2")


@pytest.mark.parametrize(
    "words", ["mode=split", "pipeline.microbatches=2", "pipeline.microbatches=2 recompute=true"]
)
def test_a_proof_leaves_nothing(words, monkeypatch):
    """Weights, buffers, gradients and generators after it are as without it."""
    collected = []
    for proven in (True, False):
        with monkeypatch.context() as patch:
            if not proven:
                patch.setattr(stages, "check_stages", lambda *_: None)
            torch.manual_seed(0)
            strategy = staged(odd_models.Normed(), [CPU, CPU], f"{words} pipeline.cuts=[b]")
            drawn = torch.rand(()), random.random(), np.random.rand()
            tensors = {**strategy.named_parameters(), **strategy.named_buffers()}
            assert all(parameter.grad is None for parameter in strategy.named_parameters().values())
            collected.append(
                {name: tensor.detach().clone() for name, tensor in tensors.items()}
                | {"drawn": drawn[0]}
            )
    torch.testing.assert_close(*collected, rtol=0, atol=0)


def test_a_model_that_one_row_is_too_few_for_is_proven_with_more():
    """BatchNorm has a single value, and the rows of a batch belong together."""

    class Groups(odd_models.Normed):
        def forward(self, x):
            return super().forward(x).view(-1, 5, 10).flip(1).reshape(-1, 10)

    for model in (odd_models.Normed(), Groups()):
        messages = []
        assert_equals_whole(
            model,
            staged(model, [CPU, CPU], "mode=split", say=messages.append),
            digits(),
        )
        assert messages == [], "it was not held against the whole model"


def test_insufficient_memory_is_reported(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(stage_proof, "observe", full)
    messages = []
    staged(odd_models.NoGrad(), [CPU, CPU], "mode=split", say=messages.append)
    assert any(line.startswith("WARNING") for line in messages)
