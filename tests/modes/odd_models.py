"""Models that are more than their operations: hooks, random numbers, state that a pass changes, and
so on.

`ODD` has each by its name. All take images of 8 x 8 with one channel; each is small, and none has
dropout or the like unless it is about that. What draws is in `DRAWS`: only its spread can be
compared, unless one process computes the whole batch.
"""

from __future__ import annotations

import itertools
import random
import types
from collections import Counter

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from trainer import register_model

PIXELS = 64
WIDTH = 16
CLASSES = 10
PASSES = {"total": 0}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(PIXELS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.out = nn.Linear(WIDTH, CLASSES)

    def body(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x.flatten(1)))))

    def between(self, x):
        return x

    def head(self, x):
        return self.out(torch.tanh(self.c(x)))

    def forward(self, x):
        return self.head(self.between(self.body(x)))


class NoGrad(Plain):
    """A linear probe."""

    def body(self, x):
        with torch.no_grad():
            return super().body(x)


class Detached(Plain):
    def between(self, x):
        return x.detach()


class Branches(Plain):
    """A branch that gets no gradient, and one that gets one."""

    def forward(self, x):
        x = self.body(x)
        return self.head(x) + self.out(x.detach() * 2)


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x):
        return self.norm(x)


class OwnTrain(Normed):
    """The usual way to freeze BatchNorm."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class Squashed(nn.BatchNorm2d):
    def forward(self, inputs):
        return super().forward(inputs).sigmoid()


class NumpyDraw(Plain):
    def between(self, x):
        return x * np.random.uniform(0.5, 1.5) if self.training else x


class OwnNumpy(Plain):
    def __init__(self):
        super().__init__()
        self.drawing = np.random.default_rng(0)

    def between(self, x):
        return x * self.drawing.uniform(0.5, 1.5) if self.training else x


class OwnGenerator(Plain):
    def __init__(self):
        super().__init__()
        self.drawing = torch.Generator().manual_seed(0)

    def between(self, x):
        return x + torch.randn(x.shape, generator=self.drawing) if self.training else x


class Dropped(Plain):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x):
        return self.drop(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class LayerDrop(Plain):
    """Blocks that are skipped at random, like those of wav2vec2."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def between(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()).item() > 0.3:
                x = layer(x)
        return x


class DrawingBlock(Block):
    """A block that uses a generator of the host, which torch's checkpoint does not restore."""

    def forward(self, x):
        return super().forward(x * self.draw()) if self.training else super().forward(x)

    def draw(self):
        return random.uniform(0.5, 1.5)


class NumpyDrawingBlock(DrawingBlock):
    def draw(self):
        return np.random.uniform(0.5, 1.5)


class DrawsInBlock(Plain):
    kind = DrawingBlock

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(3))

    def between(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class NumpyDrawsInBlock(DrawsInBlock):
    kind = NumpyDrawingBlock


class Routed(Plain):
    """Hard routing, like a mixture of experts: each sample goes to one of two experts, and none to
    a third.
    """

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        first = x.flatten(1)[:, 20] > 0
        x = torch.tanh(self.a(x.flatten(1)))
        out = x
        for expert, rows in (
            (self.b, first.nonzero().flatten()),
            (self.c, (~first).nonzero().flatten()),
        ):
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

    def between(self, x):
        self.centre.lerp_(x.detach().mean(0), 0.3 * self.training)
        return x - self.centre


class Teacher(Plain):
    """Weights that follow others, without a gradient."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(PIXELS, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for own, reference in zip(
                    self.teacher.parameters(), self.a.parameters(), strict=True
                ):
                    own.lerp_(reference, 0.1)
        return self.head(self.body(x) + self.teacher(x.flatten(1)))


class Clamped(Plain):
    """A bound on the weights, held in each pass."""

    def body(self, x):
        if self.training:
            self.b.weight.data.clamp_(-0.1, 0.1)
        return super().body(x)


class SinglePart(Plain):
    """A part that runs without autocast, because half precision would lose all digits."""

    def head(self, x):
        with torch.autocast(x.device.type, enabled=False):
            x = self.c(x.float() / 1000 + 1) - self.c(torch.ones_like(x, dtype=torch.float32))
        return self.out(torch.tanh(x * 1000))


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

    def between(self, x):
        if torch.is_grad_enabled():
            x.register_hook(lambda gradient: gradient * 0.1)
        return x


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Reversed(Plain):
    def between(self, x):
        return Reversal.apply(x)


class Toggled(Plain):
    """A model that chooses the trained weights while it runs."""

    def forward(self, x):
        self.b.requires_grad_(False)
        out = self.head(self.body(x))
        self.b.requires_grad_(True)
        return out


class Checkpointed(Plain):
    def body(self, x):
        return (
            checkpoint(
                super().body,
                x,
                use_reentrant=False,
            )
            if self.training
            else super().body(x)
        )


class Twice(Plain):
    """The same layer at two positions."""

    def between(self, x):
        return torch.tanh(self.b(x))


class ScalarParameter(Plain):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def between(self, x):
        return self.gain * x


class ComplexParameter(Plain):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.view_as_complex(torch.randn(WIDTH, WIDTH, 2) / 4))

    def between(self, x):
        return (x.to(torch.complex64) @ self.turn).real


class MixedPrecision(nn.Module):
    kind = torch.float64

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c, self.out = (
            nn.Linear(WIDTH, WIDTH).to(self.kind),
            nn.Linear(WIDTH, CLASSES).to(self.kind),
        )

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

    def between(self, x):
        if self.training:
            self.gain = min(3.0, self.gain + 0.5)
        return self.gain * x


class Deciding(Plain):
    """Control flow that depends on values."""

    def between(self, x):
        return x * 2 if x.detach().abs().mean() > 0 else x


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
        self.conv, self.norm = (
            nn.Conv2d(1, 4, 3),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        )
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


class Warming(Plain):
    """A block that joins after four passes, counted in something that is no attribute of
    a module.
    """

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.begin_counting()

    def between(self, x):
        if self.training and self.count_pass() > 4:
            return self.block(x) * 2
        return x + 0 * self.block(x)


class Pace:
    total = 0

    def __init__(self):
        self.passes = 0


class CountedInObject(Warming):
    def begin_counting(self):
        self.pace = Pace()

    def count_pass(self):
        self.pace.passes += 1
        return self.pace.passes


class CountedInNamespace(Warming):
    def begin_counting(self):
        self.pace = types.SimpleNamespace(inner=[types.SimpleNamespace(passes=0)])

    def count_pass(self):
        self.pace.inner[0].passes += 1
        return self.pace.inner[0].passes


class CountedInCounter(Warming):
    def begin_counting(self):
        self.pace = Counter()

    def count_pass(self):
        self.pace["passes"] += 1
        return self.pace["passes"]


class CountedInNumPy(Warming):
    def begin_counting(self):
        self.passes = np.int64(0)

    def count_pass(self):
        self.passes = self.passes + 1
        return self.passes


class CountedByIterator(Warming):
    def begin_counting(self):
        self.passes = itertools.count(1)

    def count_pass(self):
        return next(self.passes)


class CountedByGenerator(Warming):
    def begin_counting(self):
        self.passes = (number for number in range(1, 1000))

    def count_pass(self):
        return next(self.passes)


class CountedInClosure(Warming):
    def begin_counting(self):
        passes = 0

        def count():
            nonlocal passes
            passes += 1
            return passes

        self.count_pass = count


class CountedInClass(Warming):
    def begin_counting(self):
        Pace.total = 0

    def count_pass(self):
        Pace.total += 1
        return Pace.total


class CountedInGlobal(Warming):
    def begin_counting(self):
        PASSES["total"] = 0

    def count_pass(self):
        PASSES["total"] += 1
        return PASSES["total"]


class CountedInTensor(Warming):
    """A counter in a tensor that each pass replaces."""

    def begin_counting(self):
        self.passes = torch.zeros(())

    def count_pass(self):
        self.passes = self.passes + 1
        return self.passes


class CountedInEvaluation(Plain):
    """A buffer that an evaluation changes too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def between(self, x):
        self.passes.add_(1)
        return x / (1 + self.passes / 20)


class ByEpoch(Normed):
    """An own `train()` that counts epochs."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def train(self, mode=True):
        if mode and not self.training:
            self.epochs += 1
            self.begin_epoch()
        return super().train(mode)


class AnnealedGain(ByEpoch):
    gain = 4.0

    def begin_epoch(self):
        self.gain /= 2

    def between(self, x):
        return x * self.gain


class AnnealedMomentum(ByEpoch):
    def begin_epoch(self):
        self.norm.momentum /= 4


class FrozenStatistics(ByEpoch):
    def train(self, mode=True):
        super().train(mode)
        self.norm.train(mode and self.epochs < 2)
        return self

    def begin_epoch(self):
        pass


class Gained(Plain):
    """A hook of a layer that uses a parameter of the model around it."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.b.register_forward_hook(self.scale)

    def scale(self, module, inputs, outputs):
        return outputs * self.gain


class GainedTwice(Gained):
    """The same parameter before and behind a cut."""

    def __init__(self):
        super().__init__()
        self.out.register_forward_pre_hook(lambda module, inputs: (inputs[0] * self.gain,))


class Quantised(Plain):
    """A codebook that each pass replaces, as in a VQ-VAE."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "book",
            torch.randn(
                8,
                WIDTH,
                generator=torch.Generator().manual_seed(1),
            )
            / 4,
        )

    def between(self, x):
        with torch.no_grad():
            nearest = torch.cdist(x, self.book).argmin(1)
            if self.training:
                self.book = self.book.index_add(0, nearest, x, alpha=0.01)
        return x + (self.book[nearest] - x).detach()


class ScriptedCount(nn.Module):
    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.passes


class CountedInScript(Warming):
    def begin_counting(self):
        self.pace = torch.jit.script(ScriptedCount())

    def count_pass(self):
        return self.pace(torch.zeros(()))


class Scripted(Plain):
    def __init__(self):
        super().__init__()
        self.block = torch.jit.script(Block())

    def between(self, x):
        return self.block(x)


class Measured(Plain):
    """Reads the number of its inputs by Python's `len`."""

    def between(self, x):
        return x * (len(x) / len(x))


class OwnCall(Plain):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 0.3


def changed(change, kind=Plain):
    """Makes models that are changed after they are made."""

    def make():
        model = kind()
        change(model)
        return model

    return make


def hook_parameters(model):
    model.a.weight.register_hook(lambda gradient: gradient * 0.1)
    model.b.weight.register_hook(lambda gradient: gradient * 10)


def shrink(parameter):
    parameter.grad.mul_(0.1)


def shrink_input(module, inputs):
    return (inputs[0] * 0.3,)


def shrink_output(module, inputs, outputs):
    return outputs * 0.3


def shrink_gradient(module, gradients):
    return (gradients[0] * 0.3,)


CHANGED = {
    "RootHook": changed(lambda model: model.register_forward_hook(shrink_output)),
    "RootHookBefore": changed(lambda model: model.register_forward_pre_hook(shrink_input)),
    "RootBackwardHook": changed(
        lambda model: model.register_full_backward_pre_hook(shrink_gradient)
    ),
    "InnerHook": changed(lambda model: model.body.register_forward_hook(shrink_output), Nested),
    "InnerBackwardHook": changed(
        lambda model: model.body.register_full_backward_pre_hook(shrink_gradient), Nested
    ),
    "ParameterHooks": changed(hook_parameters),
    "AccumulatedHook": changed(
        lambda model: model.a.weight.register_post_accumulate_grad_hook(shrink)
    ),
    "Spectral": changed(lambda model: parametrizations.spectral_norm(model.b)),
    "WeightNormed": changed(lambda model: parametrizations.weight_norm(model.b)),
    "Pruned": changed(lambda model: prune.l1_unstructured(model.b, "weight", 0.5)),
    "Tied": changed(lambda model: model.c.register_parameter("weight", model.b.weight)),
    "Unused": changed(lambda model: model.add_module("spare", nn.Linear(WIDTH, WIDTH))),
    "Frozen": changed(lambda model: model.a.requires_grad_(False)),
}
DRAWS = {NumpyDraw, OwnNumpy, OwnGenerator, Dropped, LayerDrop, DrawsInBlock, NumpyDrawsInBlock}
BY_EPOCH = {AnnealedGain, AnnealedMomentum, FrozenStatistics}
# Another result for a part of a batch, by their nature.
WHOLE_BATCH = {
    TwoWays,
    Normed,
    RunningCentre,
    Tracking,
    AnnealedMomentum,
    FrozenStatistics,
    Quantised,
}
HALF = {SinglePart, MixedHalf}  # Models that compute with few digits.
KINDS = [
    *(
        Plain,
        NoGrad,
        Detached,
        Branches,
        OwnTrain,
        Normed,
        Routed,
        TwoWays,
        Counted,
        CountedBuffer,
        RunningCentre,
    ),
    *(
        Teacher,
        Clamped,
        SinglePart,
        Captured,
        GradientHook,
        Reversed,
        Toggled,
        Checkpointed,
        Twice,
        ScalarParameter,
    ),
    *(
        ComplexParameter,
        MixedPrecision,
        MixedHalf,
        ExtraState,
        Deciding,
        InPlace,
        Tracking,
        Lazy,
        NumpyDraw,
        OwnNumpy,
    ),
    *(
        OwnGenerator,
        Dropped,
        LayerDrop,
        CountedInObject,
        CountedInNamespace,
        CountedInCounter,
        CountedInNumPy,
    ),
    *(
        CountedByIterator,
        CountedByGenerator,
        CountedInClosure,
        CountedInClass,
        CountedInGlobal,
        CountedInTensor,
    ),
    *(
        CountedInEvaluation,
        AnnealedGain,
        AnnealedMomentum,
        FrozenStatistics,
        Gained,
        GainedTwice,
        Quantised,
        Scripted,
    ),
    CountedInScript,
    *(Measured, OwnCall, DrawsInBlock, NumpyDrawsInBlock),
]
# State that no attribute of a module shows, and that is restored after a probe.
HIDDEN_STATE = [
    kind.__name__
    for kind in KINDS
    if issubclass(kind, Warming) and kind not in (CountedByGenerator, CountedInScript)
]
ODD = {**{kind.__name__: kind for kind in KINDS}, **CHANGED}
for _name, _kind in ODD.items():
    register_model(_name)(lambda num_classes, channels, image_size, kind=_kind: kind())
