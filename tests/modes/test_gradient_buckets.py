"""Sums of gradients during the backward pass: values, order of messages, streams, and captures."""

import gc
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.simulated.simcuda import simulated
from tests.strategies import create_strategy
from trainer.devices.cuda_graphs import NotCapturable, StepRecorder
from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.modes import Strategy, gradient_buckets
from trainer.modes.gradient_buckets import GradientBuckets, fill_buckets
from trainer.processes.rank import Place
from trainer.recipe import load

KIB = 1 << 10


class SlowPeer:
    """A world of two ranks with equal gradients, whose sums arrive when somebody waits for them."""

    def __init__(self):
        self.sizes = []

    def start_sum(self, values):
        self.sizes.append(values.nbytes)
        total = 2 * values
        values.fill_(torch.nan)
        return values, total

    def wait(self, work):
        values, total = work
        values.copy_(total)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "FIRST_BUCKET", 1 * KIB)
    monkeypatch.setattr(gradient_buckets, "BUCKET", 3 * KIB)


def build_model(dtype=torch.float32):
    """Return twelve layers, and a convolution whose gradient is channels_last."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(12)]
    conv = nn.Conv2d(4, 16, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Flatten(), *layers).to(dtype)


def backward_order(model):
    return [*model.parameters()][::-1]


def compute(model, inputs):
    model(inputs).square().sum().backward()


def sample(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, 2, 2, generator=generator).to(dtype)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def summed_matches(passes=2, compress=False, dtype=torch.float32):
    """Return whether sums over two equal ranks are twice the gradients of a plain pass."""
    model = build_model(dtype)
    for _ in range(passes):
        compute(model, sample(dtype))
    expected = [2 * (g.bfloat16().to(dtype) if compress else g) for g in gradients(model)]
    model.zero_grad()
    buckets = GradientBuckets(SlowPeer(), backward_order(model), compress)
    for _ in range(passes - 1):
        compute(model, sample(dtype))
    with buckets.sum_in_pass():
        compute(model, sample(dtype))
    pairs = zip(gradients(model), expected, strict=True)
    return buckets.is_complete and all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize(
    "options",
    [{"passes": 1}, {"passes": 3}, {"compress": True}, {"dtype": torch.float64}],
    ids=str,
)
def test_sums_are_those_of_all_ranks(options):
    assert summed_matches(**options)


def test_a_bucket_is_sent_while_the_pass_still_runs():
    model = build_model()
    world = SlowPeer()
    buckets = GradientBuckets(world, backward_order(model), False)
    sent = []
    model[2].weight.register_hook(lambda _: sent.append(len(world.sizes)))
    with buckets.sum_in_pass():
        compute(model, sample())
    assert sent[0] > 3
    # 17 * 64 bytes a layer: the last layer's weight does not fit next to its bias.
    assert world.sizes[0] == 16 * 4 and max(world.sizes) <= 3 * KIB


@pytest.mark.parametrize("order", ["forward", "shuffled"])
def test_ranks_send_in_one_order_whatever_theirs_is(order):
    """A rank whose pass computes gradients in another order waits with a message until its turn."""
    model = build_model()
    parameters = [*model.parameters()]
    if order == "shuffled":
        parameters = parameters[::2] + parameters[1::2]
    world = SlowPeer()
    buckets = GradientBuckets(world, parameters, False)
    with buckets.sum_in_pass():
        compute(model, sample())
    sizes = [sum(p.nbytes for p in bucket.parameters) for bucket in fill_buckets(parameters)]
    assert world.sizes == sizes
    assert buckets.is_complete


def test_buckets_hold_one_type_and_a_large_tensor_has_its_own():
    """Buckets are in the order in which their last gradients are computed."""
    types = [torch.float32, torch.float64, torch.float32, torch.float32]
    tensors = [torch.zeros(n, dtype=t) for n, t in zip((10, 30, 20, 5000), types, strict=True)]
    buckets = fill_buckets(tensors)
    sizes = [[parameter.numel() for parameter in bucket.parameters] for bucket in buckets]
    assert sizes == [[30], [10, 20], [5000]]


def test_no_gradient_is_copied_if_one_is_missing():
    model = build_model()
    compute(model, sample())
    expected = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    extra = nn.Parameter(torch.zeros(3))
    buckets = GradientBuckets(SlowPeer(), [*backward_order(model), extra], False)
    with buckets.sum_in_pass():
        compute(model, sample())
    assert not buckets.is_complete
    pairs = zip(gradients(model), expected, strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_gradient_in_two_parts_is_refused():
    layer = nn.Linear(16, 16)
    buckets = GradientBuckets(SlowPeer(), [layer.bias, layer.weight], False)
    x = torch.ones(2, 16, requires_grad=True)
    with pytest.raises(RecipeError), buckets.sum_in_pass():
        x = checkpoint(layer, x, use_reentrant=True)
        checkpoint(layer, x, use_reentrant=True).sum().backward()


def test_after_closing_nothing_is_sent():
    model = build_model()
    world = SlowPeer()
    buckets = GradientBuckets(world, backward_order(model), False)
    buckets.close()
    with buckets.sum_in_pass():
        compute(model, sample())
    assert world.sizes == []


def test_the_hooks_do_not_keep_a_model():
    model = build_model()
    buckets = GradientBuckets(SlowPeer(), backward_order(model), False)
    weight = weakref.ref(model[0].weight)
    del model, buckets
    gc.collect()
    assert weight() is None


class Unused(nn.Module):
    """A model whose parameter is unused in one pass."""

    def __init__(self, unused_in):
        super().__init__()
        self.layer, self.extra = nn.Linear(8, 10), nn.Linear(10, 10)
        self.passes, self.unused_in = 0, unused_in

    def forward(self, x):
        self.passes += 1
        x = self.layer(x.flatten(1))
        return x if self.passes == self.unused_in else self.extra(x)


@pytest.mark.parametrize("unused_in", [1, 2])
def test_a_parameter_that_a_pass_leaves_out_is_in_no_bucket_so_it_is_refused(unused_in):
    recipe = load(None, "mode=ddp")
    world = World(Place(0, 1, 0, 1), torch.device("cpu"), 1, ("cpu",))
    strategy = create_strategy(recipe, world, (4, 1, 2, 4))
    strategy.module = Unused(unused_in)
    Strategy.connect(strategy)
    inputs = torch.ones(4, 1, 2, 4)
    if unused_in == 1:
        with pytest.raises(RecipeError, match="graphs=false"):
            strategy._make_buckets(inputs)
    else:
        buckets = strategy._make_buckets(inputs).buckets
        assert sum(len(bucket.parameters) for bucket in buckets) == 4


# Streams.


@contextmanager
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(Place(0, 1, 0, 1), torch.device("cuda", 0), 1, ("cuda:0",))
    finally:
        dist.destroy_process_group()


def find_errors(steps=3, replays=True):
    """Return errors of passes on a simulated card, eager ones and replays of one."""
    with group_of_one() as world, simulated(1) as machine:
        model = build_model().to("cuda:0")
        inputs = sample().to("cuda:0")
        expected = []
        buckets = GradientBuckets(world, backward_order(model), False)
        recorder = StepRecorder(torch.device("cuda", 0))

        def run():
            with buckets.sum_in_pass():
                compute(model, inputs)

        for _ in range(steps):
            model.zero_grad()
            with recorder.use_side_stream():
                run()
            expected = [gradient.clone() for gradient in gradients(model)]
        if replays:
            model.zero_grad()
            replay, _ = recorder.record(run)
            for _ in range(steps):
                replay()
            pairs = zip(gradients(model), expected, strict=True)
            if not all(torch.equal(one, two) for one, two in pairs):
                return [*machine.errors, "VALUES"]
        return machine.errors


def test_streams_are_in_order_and_a_replay_sums_the_same():
    assert find_errors() == []


def wait_for_nothing(self, bucket, plain=GradientBuckets._finish):
    with mock.patch.object(type(self._world), "wait", lambda *_: None):
        plain(self, bucket)


def wait_for_the_last_only(self, bucket, plain=GradientBuckets._finish):
    if bucket is self.buckets[-1]:
        plain(self, bucket)
    else:
        wait_for_nothing(self, bucket)


def start_before_the_last_gradient(self, index, parameter):
    self.buckets[index].missing.discard(id(parameter))
    while self._started < len(self.buckets) and len(self.buckets[self._started].missing) < 2:
        self._start(self.buckets[self._started])
        self._started += 1


def send_from_one_buffer(self, bucket, plain=GradientBuckets._start):
    def empty(size, **options):
        if not hasattr(self, "row"):
            self.row = EMPTY(10 * KIB, **options)
        return self.row[:size]

    with mock.patch.object(torch, "empty", empty):
        plain(self, bucket)


def copy_back_too_early(self, bucket, plain=GradientBuckets._start):
    plain(self, bucket)
    views = gradient_buckets.view_with_strides(bucket.message, bucket.gradients)
    torch._foreach_copy_(bucket.gradients, views)


EMPTY = torch.empty
MUTANTS = {
    "a sum is not waited for": {"_finish": wait_for_nothing},
    "only the last sum is waited for": {"_finish": wait_for_the_last_only},
    "a bucket is sent without its last gradient": {"note_gradient": start_before_the_last_gradient},
    "a buffer is used again too early": {"_start": send_from_one_buffer},
    "a bucket is read before its sum": {"_start": copy_back_too_early},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant(name):
    """Values or streams show it."""
    with mock.patch.multiple(GradientBuckets, **MUTANTS[name]):
        try:
            assert not summed_matches() or find_errors(replays=False)
        except (AssertionError, IndexError):  # A gradient is missing.
            return


def test_a_capture_that_does_not_wait_for_its_sums_is_refused():
    with (
        mock.patch.object(GradientBuckets, "_finish", wait_for_nothing),
        pytest.raises(NotCapturable, match="unjoined"),
    ):
        find_errors()
