"""Models that are more than their operations: hooks, draws of their own, state that a pass changes, and the like.

`ODD` has each by its name. All take images of 8 x 8 with one channel; each is small, and none has dropout or the like
unless it is about that. What draws is in `DRAWS`: only its spread can be compared, unless one process computes the
whole batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from trainer import register_model

PIXELS, WIDTH, CLASSES = 64, 16, 10


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def body(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x.flatten(1)))))

    def head(self, x):
        return self.out(torch.tanh(self.c(x)))

    def forward(self, x):
        return self.head(self.body(x))


class NoGrad(Plain):
    """A linear probe."""

    def forward(self, x):
        with torch.no_grad():
            x = self.body(x)
        return self.head(x)


class Detached(Plain):
    def forward(self, x):
        return self.head(self.body(x).detach())


class Branches(Plain):
    """A part that is fed without a gradient, beside one with."""

    def forward(self, x):
        x = self.body(x)
        return self.head(x) + self.out(x.detach() * 2)


class OwnTrain(Plain):
    """The usual way to freeze BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


class NumpyDraw(Plain):
    def forward(self, x):
        return self.head(self.body(x) * (np.random.uniform(0.5, 1.5) if self.training else 1.0))


class OwnNumpy(Plain):
    def __init__(self):
        super().__init__()
        self.drawing = np.random.default_rng(0)

    def forward(self, x):
        return self.head(self.body(x) * (self.drawing.uniform(0.5, 1.5) if self.training else 1.0))


class OwnGenerator(Plain):
    def __init__(self):
        super().__init__()
        self.drawing = torch.Generator().manual_seed(0)

    def forward(self, x):
        x = self.body(x)
        if self.training:
            x = x + torch.randn(x.shape, generator=self.drawing)
        return self.head(x)


class Dropped(Plain):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class LayerDrop(Plain):
    """Blocks that are left out at random, as in wav2vec2."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.body(x)
        for layer in self.layers:
            if not self.training or torch.rand(()).item() > 0.3:
                x = layer(x)
        return self.head(x)


class Routed(Plain):
    """Each sample goes to one of two experts: hard routing, as in a mixture of experts."""

    def forward(self, x):
        first = x.flatten(1)[:, :8].sum(1) > 4
        x = torch.tanh(self.a(x.flatten(1)))
        out = x
        for expert, rows in ((self.b, first.nonzero().flatten()), (self.c, (~first).nonzero().flatten())):
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return self.out(out)


class TwoWays(Plain):
    """A batch goes one way or the other: blocks of one size, in another order from rank to rank."""

    def forward(self, x):
        ways = (self.b, self.c) if x[0].sum() > x[-1].sum() else (self.c, self.b)
        x = torch.tanh(self.a(x.flatten(1)))
        for n, part in enumerate(ways):
            x = torch.tanh(part(x)) * (n + 1)
        return self.out(x)


class Counted(Plain):
    """Another model at each pass."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        return self.head(self.body(x)) / (max(0.5, 3 - 0.5 * self.passes) if self.training else 0.5)


class CountedBuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes.add_(1.0 * self.training)
        return self.head(self.body(x)) / (1 + self.passes)


class RunningCentre(Plain):
    """A running mean of a batch, which a pass reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.body(x)
        self.centre.lerp_(x.detach().mean(0), 0.3 * self.training)
        return self.head(x - self.centre)


class Teacher(Plain):
    """Weights that follow others, without a gradient."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(PIXELS, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        return self.head(self.body(x) + self.teacher(x.flatten(1)))


class Clamped(Plain):
    """A bound on the weights, held in each pass."""

    def forward(self, x):
        if self.training:
            self.b.weight.data.clamp_(-0.1, 0.1)
        return self.head(self.body(x))


class SinglePart(Plain):
    """A part that autocast is kept from, where half precision would lose everything."""

    def forward(self, x):
        x = self.body(x)
        with torch.autocast(x.device.type, enabled=False):
            x = self.c(x.float() / 1000 + 1) - self.c(torch.ones_like(x, dtype=torch.float32))
        return self.out(torch.tanh(x * 1000))


class RootHook(Plain):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, inputs, outputs: outputs * 0.3)


class RootBackwardHook(Plain):
    def __init__(self):
        super().__init__()
        self.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.3,))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x.flatten(1)))))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.c, self.out = Body(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(torch.tanh(self.c(self.body(x))))


class InnerHook(Nested):
    def __init__(self):
        super().__init__()
        self.body.register_forward_hook(lambda module, inputs, outputs: outputs * 3)


class Captured(Nested):
    """A hook keeps what a later part reads."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.body.a.register_forward_hook(lambda module, inputs, outputs: self.kept.append(outputs))

    def forward(self, x):
        self.kept.clear()
        x = self.body(x)
        return self.out(torch.tanh(self.c(x + self.kept.pop())))


class GradientHook(Plain):
    """A hook of a value."""

    def forward(self, x):
        x = self.body(x)
        if torch.is_grad_enabled():
            x.register_hook(lambda gradient: gradient * 0.1)
        return self.head(x)


class ParameterHooks(Plain):
    def __init__(self):
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient * 0.1)
        self.b.weight.register_hook(lambda gradient: gradient * 10)


class AccumulatedHook(Plain):
    def __init__(self):
        super().__init__()
        self.a.weight.register_post_accumulate_grad_hook(self.shrink)

    @staticmethod
    def shrink(parameter):
        parameter.grad.mul_(0.1)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Reversed(Plain):
    def forward(self, x):
        return self.head(Reversal.apply(self.body(x)))


class Toggled(Plain):
    """Which weights train is decided as it runs."""

    def forward(self, x):
        self.b.requires_grad_(False)
        out = self.head(self.body(x))
        self.b.requires_grad_(True)
        return out


class Checkpointed(Plain):
    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.training else self.body(x)
        return self.head(x)


class Spectral(Plain):
    def __init__(self):
        super().__init__()
        self.b = parametrizations.spectral_norm(self.b)


class WeightNormed(Plain):
    def __init__(self):
        super().__init__()
        self.b = parametrizations.weight_norm(self.b)


class Pruned(Plain):
    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.b, "weight", 0.5)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.c.weight = self.b.weight


class Twice(Plain):
    """One layer in two places."""

    def forward(self, x):
        return self.head(torch.tanh(self.b(self.body(x))))


class Unused(Plain):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class ScalarParameter(Plain):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.head(self.gain * self.body(x))


class ComplexParameter(Plain):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.view_as_complex(torch.randn(WIDTH, WIDTH, 2) / 4))

    def forward(self, x):
        return self.head((self.body(x).to(torch.complex64) @ self.turn).real)


class MixedPrecision(nn.Module):
    kind = torch.float64

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c, self.out = nn.Linear(WIDTH, WIDTH).to(self.kind), nn.Linear(WIDTH, CLASSES).to(self.kind)

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.a(x.flatten(1)))))
        return self.out(torch.tanh(self.c(x.to(self.kind))))


class MixedHalf(MixedPrecision):
    kind = torch.bfloat16


class ExtraState(Plain):
    """State that is no tensor, by torch's own interface for it."""

    def __init__(self):
        super().__init__()
        self.gain = 1.0

    def get_extra_state(self):
        return {"gain": self.gain}

    def set_extra_state(self, state):
        self.gain = state["gain"]

    def forward(self, x):
        if self.training:
            self.gain = min(3.0, self.gain + 0.5)
        return self.head(self.gain * self.body(x))


class Deciding(Plain):
    """Control flow that depends on values."""

    def forward(self, x):
        x = self.body(x)
        if x.detach().abs().mean() > 0:
            x = x * 2
        return self.head(x)


class InPlace(Plain):
    def forward(self, x):
        x = self.a(x.flatten(1))
        left = x[:, : WIDTH // 2]
        left *= 2
        x += 1
        return self.head(self.b(x).relu_())


class Tracking(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.a, self.out = nn.Linear(144, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(torch.tanh(self.a(self.norm(self.conv(x)).flatten(1))))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.LazyLinear(CLASSES)

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


DRAWS = {NumpyDraw, OwnNumpy, OwnGenerator, Dropped, LayerDrop}
WHOLE_BATCH = {TwoWays, Normed, RunningCentre, Tracking}  # another result for a part of a batch, by their nature
HALF = {SinglePart, MixedHalf}  # of few digits
KINDS = [
    *(Plain, NoGrad, Detached, Branches, OwnTrain, Normed, Routed, TwoWays, Counted, CountedBuffer, RunningCentre),
    *(Teacher, Clamped, SinglePart, RootHook, RootBackwardHook, InnerHook, Captured, GradientHook, ParameterHooks),
    *(AccumulatedHook, Reversed, Toggled, Checkpointed, Spectral, WeightNormed, Pruned, Tied, Twice, Unused),
    *(ScalarParameter, ComplexParameter, MixedPrecision, MixedHalf, ExtraState, Deciding, InPlace, Tracking, Lazy),
    *(Frozen, NumpyDraw, OwnNumpy, OwnGenerator, Dropped, LayerDrop),
]
ODD = {kind.__name__: kind for kind in KINDS}
for _name, _kind in ODD.items():
    register_model(_name)(lambda num_classes, channels, image_size, kind=_kind: kind())
