"""A model in stages is proven against the whole before the first step: it trains the same, or is refused by name."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.modes import odd_models
from tests.modes.pipeline.test_streams import CPU, ROWS, digits, staged
from trainer.errors import RecipeError
from trainer.modes import proofs
from trainer.modes.pipeline import stages


class Base(odd_models.Normed):
    count = 0


class Annealed(Base):
    """A counter that will matter long after the proof."""

    def forward(self, x):
        self.count += self.training
        return super().forward(x) * (2 if self.count > 1000 else 1)


class InFullPrecision(Base):
    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            x = self.b(x.float())
        return self.out(x)


def hooked(register, hook):
    model = Base()
    register(model, hook)
    return model


REFUSED = {
    **{name: odd_models.ODD[name] for name in ("NoGrad", "NumpyDraw", "OwnNumpy", "Teacher")},
    "Annealed": Annealed,
}
KEPT = {
    "own train": odd_models.OwnTrain,
    "hook": lambda: hooked(nn.Module.register_forward_hook, lambda m, args, out: out * 0.3),
    "hook before": lambda: hooked(nn.Module.register_forward_pre_hook, lambda m, args: (args[0] * 0.3,)),
    "hook of a part": lambda: nn.Sequential(
        hooked(nn.Module.register_full_backward_pre_hook, lambda m, gradient: (gradient[0] * 0.3,)), nn.Linear(10, 10)
    ),
}
MODES = {"split": "mode=split", "streams": "pipeline.microbatches=2 pipeline.deferred_batch_norm=false"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_would_train_otherwise_is_refused(name, mode):
    with pytest.raises(RecipeError, match="mode=ddp"):
        staged(REFUSED[name](), [CPU, CPU], MODES[mode])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_part_in_full_precision_is_refused_where_that_matters(precision):
    with pytest.raises(RecipeError, match="mode=ddp"):
        staged(InFullPrecision(), [CPU, CPU], f"mode=split precision={precision}")
    staged(InFullPrecision(), [CPU, CPU], "mode=split")


@pytest.mark.parametrize("name", KEPT)
def test_an_own_train_and_hooks_are_kept(name):
    """Several steps, by the weights that they lead to."""
    model = KEPT[name]().train()
    strategy = staged(model, [CPU, CPU], "mode=split")
    losses = []
    for number in range(3):
        batch = digits(number=number)
        strategy.train()
        losses.append(strategy.forward_backward(batch, 1 / ROWS))
        model.train()
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        loss.backward()
        torch.testing.assert_close(losses[-1], loss.detach(), rtol=0, atol=0)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(strategy.named_parameters()[key].grad, parameter.grad, rtol=0, atol=0)
    torch.testing.assert_close(strategy.named_buffers(), dict(model.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_state_that_each_pass_changes_is_refused_in_micro_batches(norm):
    def model():
        return nn.Sequential(nn.Flatten(), norm(nn.Linear(64, 16)), nn.ReLU(), nn.Linear(16, 10))

    staged(model(), [CPU, CPU], "mode=split")
    with pytest.raises(RecipeError, match=r"1\..*_u.*mode=ddp"):
        staged(model(), [CPU, CPU], "pipeline.microbatches=2")


@pytest.mark.parametrize("words", ["mode=split", "pipeline.microbatches=2", "pipeline.microbatches=2 recompute=true"])
def test_a_proof_leaves_nothing(words, monkeypatch):
    """Weights, buffers, gradients and generators after it are as without it."""
    found = []
    for proven in (True, False):
        with monkeypatch.context() as patch:
            if not proven:
                patch.setattr(stages, "stages_proven", lambda *_: None)
            torch.manual_seed(0)
            strategy = staged(Base(), [CPU, CPU], f"{words} pipeline.cuts=[b]")
            drawn = torch.rand(()), random.random(), np.random.rand()
            tensors = {**strategy.named_parameters(), **strategy.named_buffers()}
            assert all(parameter.grad is None for parameter in strategy.named_parameters().values())
            found.append({name: tensor.detach().clone() for name, tensor in tensors.items()} | {"drawn": drawn[0]})
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_model_that_one_row_is_too_few_for():
    """BatchNorm over one value, and rows that belong together."""

    class Groups(Base):
        def forward(self, x):
            return super().forward(x).view(-1, 5, 10).flip(1).reshape(-1, 10)

    staged(Base(), [CPU, CPU], "mode=split")
    staged(Groups(), [CPU, CPU], "mode=split")


def test_where_memory_does_not_suffice_it_is_told(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(proofs, "observe", full)
    said = []
    staged(odd_models.NoGrad(), [CPU, CPU], "mode=split", say=said.append)
    assert any(line.startswith("WARNING") for line in said)
