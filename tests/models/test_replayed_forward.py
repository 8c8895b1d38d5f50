"""A replayed forward pass equals the eager one to the bit, and a model that cannot be replayed runs
eagerly.
"""

import random

import pytest
import torch
from torch import nn

from tests.simulated.tape import CpuRecorder, graphs_on_the_cpu
from tests.training.graphed_runs import Counting, Dropping, FromTheHost, Waiting
from trainer.devices.cuda_graphs import NotCapturable
from trainer.models.replayed_forward import MIN_PASSES, ReplayedForward
from trainer.models.replayed_forward import WARMUP_PASSES as WARM

CPU = torch.device("cpu")


class Draws(Dropping):
    def forward(self, x):
        return super().forward(x) * random.random()


class Replaces(Dropping):
    def __init__(self, *given):
        super().__init__(*given)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        out = super().forward(x) + self.last
        self.last = out.mean()
        return out


class Writes(Dropping):
    """Changes a weight."""

    def forward(self, x):
        self.head.bias.data.add_(1.0)
        self.head.bias.add_(1.0)
        return super().forward(x)


class Two(Dropping):
    def forward(self, x):
        return super().forward(x), x


class Sums(Dropping):
    """A running sum on the device, which a replay keeps too."""

    def __init__(self, *given):
        super().__init__(*given)
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x):
        self.sum += x.mean()
        return super().forward(x) + self.sum


class Noise(Dropping):
    """A layer that draws random numbers on the device."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


def made(kind=Dropping):
    torch.manual_seed(1)
    model = kind(3, 1, 6).eval()
    model.norm.running_mean.uniform_()
    return model


def forward_of(model):
    def forward(x):
        with torch.no_grad():
            return model(x)

    return forward


class Both:
    """A model and its twin, one replayed and one eager, and the messages."""

    def __init__(self, kind=Dropping, **options):
        self.model, self.twin, self.said = made(kind), made(kind), []
        self.replayed = ReplayedForward(
            forward_of(self.model),
            [self.model],
            CPU,
            True,
            self.said.append,
            **options,
        )
        self.replayed.begin(MIN_PASSES)

    def pass_(self, seed, rows=4):
        """Whether both gave the same."""
        x = torch.randn(
            rows,
            1,
            6,
            6,
            generator=torch.Generator().manual_seed(seed),
        )
        results = []
        for forward in (self.replayed, forward_of(self.twin)):
            random.seed(seed)
            torch.manual_seed(seed)
            out = forward(x)
            results.append(out if isinstance(out, tuple) else (out,))
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def passes(self, count=WARM + 4, rows=4):
        return all([self.pass_(seed, rows) for seed in range(count)])


@pytest.fixture(autouse=True)
def recorders():
    with graphs_on_the_cpu() as actual:
        yield actual


def test_replayed_passes_equal_eager_passes(recorders):
    both = Both()
    assert both.passes() and both.said == []
    (recorder,) = recorders
    replays = recorder.replays
    assert replays >= 4 and both.passes(1, rows=3) and both.passes(2), "another shape between"
    assert recorder.replays == replays + 2


@pytest.mark.parametrize("kind", [Sums, Noise])
def test_the_comparison_leaves_no_trace(kind, recorders):
    both = Both(kind)
    assert both.passes() and both.said == []
    assert all(
        torch.equal(a, b) for a, b in zip(both.model.buffers(), both.twin.buffers(), strict=True)
    )
    assert recorders[0].replays >= 4


@pytest.mark.parametrize("kind", [Waiting, Draws, Counting, Replaces, Writes, Two])
def test_a_model_that_does_more_than_its_kernels_is_launched(kind):
    both = Both(kind)
    assert both.passes(WARM + 8)
    assert len(both.said) == 1 and both.replayed._replay is None


def test_a_count_that_nobody_sees_shows_in_the_replay():
    model = made(FromTheHost)
    messages = []
    replayed = ReplayedForward(forward_of(model), [model], CPU, True, messages.append)
    before = [float(replayed(torch.ones(2, 1, 6, 6))[0, 0]) for _ in range(WARM + 4)]
    assert len({*before}) == len(before) and len(messages) == 1


def test_hooks_are_called():
    both = Both()
    calls = []
    both.model.head.register_forward_hook(lambda *_: calls.append(1))
    assert both.passes(WARM + 3)
    assert len(calls) == WARM + 3
    assert len(both.said) == 1


def test_outputs_are_the_callers_own():
    both = Both()
    kept = [both.replayed(torch.full((4, 1, 6, 6), float(n))) for n in range(WARM + 4)]
    expected = [forward_of(both.twin)(torch.full((4, 1, 6, 6), float(n))) for n in range(WARM + 4)]
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


def test_outputs_that_are_not_cloned_show(monkeypatch):
    def replayed(self, inputs):
        return self._replay(inputs)

    monkeypatch.setattr(ReplayedForward, "_run_replay", replayed)
    with pytest.raises(AssertionError):
        test_outputs_are_the_callers_own()


def moved(model):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data + 1 if tensor.is_floating_point() else tensor.data.clone()


@pytest.mark.parametrize(
    "change",
    [
        moved,
        lambda model: setattr(model, "head", nn.Linear(6, 3, bias=False).requires_grad_(False)),
        lambda model: model.register_buffer("unused", torch.zeros(2)),
        lambda model: setattr(model.drop, "p", 0.25),
    ],
)
def test_a_changed_model_is_captured_again(change, recorders):
    both = Both()
    assert both.passes()
    for model in (both.model, both.twin):
        torch.manual_seed(5)
        change(model)
    both.replayed.begin(MIN_PASSES)
    assert both.passes() and recorders[0].closed and len(recorders) == 2
    assert recorders[1].replays > 0 or len(both.said) == 1


def test_weights_that_change_in_place_need_no_new_capture(recorders):
    both = Both()
    assert both.passes()
    for model in (both.model, both.twin):
        with torch.no_grad():
            model.head.weight.add_(1.0)
    both.replayed.begin(MIN_PASSES)
    assert both.passes() and len(recorders) == 1


def test_few_passes_are_launched_and_so_are_those_of_no_graphs(recorders):
    both = Both()
    both.replayed.begin(MIN_PASSES - 1)
    assert both.passes(WARM + 4) and recorders == [] and both.said == []
    off = ReplayedForward(forward_of(both.model), [both.model], CPU, False, both.said.append)
    off.begin(MIN_PASSES)
    for _ in range(WARM + 4):
        off(torch.ones(4, 1, 6, 6))
    assert recorders == [] and both.said == []


@pytest.mark.parametrize(
    "error", [NotCapturable("memory exhausted"), torch.OutOfMemoryError("memory exhausted")]
)
def test_where_a_recording_has_no_memory_the_pass_is_launched(error, monkeypatch, recorders):
    def record(self, work):
        raise error

    monkeypatch.setattr(CpuRecorder, "record", record)
    both = Both()
    assert both.passes()
    assert "memory exhausted" in both.said[0]
    assert len(both.said) == 1
    assert recorders[0].closed


def test_a_launched_pass_takes_the_recordings_memory(recorders):
    both = Both()
    assert both.passes()
    plain = both.replayed._forward

    def forward(x):
        if not recorders[0].closed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(x)

    both.replayed._forward = forward
    assert both.passes(rows=5) and len(both.said) == 1 and both.passes()


def test_a_model_that_was_made_for_inference(recorders):
    with torch.inference_mode():
        model = made()
        messages = []
        replayed = ReplayedForward(model, [model], CPU, True, messages.append)
        for number in range(WARM + 3):
            x = torch.full((4, 1, 6, 6), float(number))
            assert torch.equal(replayed(x), model(x))
    assert messages == [] and recorders[0].replays >= 3
