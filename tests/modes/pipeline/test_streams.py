"""A model in stages, in one process: split and pipelined modes compute the same as the whole model.

On CPU stand-ins here; what overlaps, and who waits for a copy, needs a GPU.
"""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from tests.modes.odd_models import Squashed
from tests.strategies import CPU, ROWS, assert_equals_whole, digits, gradients, staged
from trainer.data import Batch
from trainer.models.zoo import build
from trainer.modes.pipeline import streams
from trainer.recipe import ModelRecipe


def made(name):
    torch.manual_seed(0)
    return build(ModelRecipe(name=name), 10, 1, 8)


@pytest.mark.full(
    cases=[
        "2-mode=split-vit_tiny",
        "3-mode=split-vit_tiny",
        "2-pipeline.microbatches=1-vit_tiny",
        "3-pipeline.microbatches=4-vit_tiny",
        "3-pipeline.split_size=4 recompute=true-vit_tiny",
        "2-pipeline.split_size=1-vit_tiny",
    ]
)
@pytest.mark.slow(
    cases=[
        "3-pipeline.split_size=4 recompute=true-vit_tiny",
        "3-mode=split-vit_tiny",
        "2-pipeline.split_size=1-vit_tiny",
        "3-pipeline.microbatches=4-vit_tiny",
    ]
)
@pytest.mark.parametrize("name", ["cnn_gn", "vit_tiny", "cnn"])
@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (2, "mode=split"),
        (3, "mode=split"),
        (2, "pipeline.microbatches=1"),
        (2, "pipeline.microbatches=5 channels_last=true"),
        (3, "pipeline.microbatches=4"),  # 3, 3, 2 and 2 images
        (3, "pipeline.split_size=4 recompute=true"),  # 4, 4 and 2
        (2, "pipeline.split_size=1"),
    ],
)
def test_a_pipeline_equals_the_whole_model(name, stages, words):
    model = made(name)
    if name == "cnn":  # BatchNorm would see micro-batches in training.
        model(digits(number=3).inputs)
        model.eval()
    assert_equals_whole(model, staged(model, (CPU,) * stages, words), digits())


def test_bf16_and_a_scaled_loss():
    model = made("cnn_gn")
    words = "precision=bf16 pipeline.microbatches=2"
    strategy = staged(model, (CPU, CPU), words, scale=lambda loss: loss * 8)
    loss = strategy.forward_backward(digits(), 1 / ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(digits().inputs)
    expected = cross_entropy(outputs.float(), digits().targets)
    torch.testing.assert_close(loss, expected.detach(), rtol=2e-2, atol=2e-2)
    (8 * expected).backward()
    actual_gradients = gradients(strategy.named_parameters().items())
    torch.testing.assert_close(
        actual_gradients,
        gradients(model.named_parameters()),
        rtol=0.2,
        atol=0.2,
    )


@pytest.mark.parametrize(
    ("words", "rows", "soft"),
    [
        ("mode=split", 1, False),
        ("pipeline.microbatches=1", 1, False),
        ("pipeline.microbatches=5", 3, False),  # whoever evaluates may bring smaller batches
        ("mode=split", ROWS, True),
        ("pipeline.split_size=3", ROWS, True),
    ],
)
def test_small_batches_and_soft_targets(words, rows, soft):
    model = made("cnn_gn")
    batch = digits(rows)
    if soft:
        batch = Batch(batch.inputs, torch.rand(rows, 10).softmax(1), rows)
    shape = (1 if rows == 1 else ROWS, 1, 8, 8)
    assert_equals_whole(model, staged(model, (CPU, CPU), words, shape=shape), batch)


# BatchNorm's running statistics.

NORMS = [
    "mode=split",
    "mode=split recompute=true",
    "mode=split recompute=true pipeline.deferred_batch_norm=false",
    "pipeline.microbatches=1 recompute=true pipeline.deferred_batch_norm=false",
    "pipeline.microbatches=1",
]


@pytest.mark.parametrize("words", NORMS)
def test_statistics_of_a_whole_batch(words):
    model = made("cnn")
    strategy = staged(model, (CPU, CPU), words)
    strategy.train()
    for number in range(2):
        strategy.forward_backward(digits(number=number), 1 / ROWS)
        model(digits(number=number).inputs)
    torch.testing.assert_close(
        strategy.named_buffers(), dict(model.named_buffers()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_statistics_of_micro_batches(recompute):
    """Deferred, the first layer's are the whole batch's; else each micro-batch counts as
    a batch.
    """
    model = made("cnn")
    batch = digits()
    batch.inputs.add_(torch.arange(ROWS).view(-1, 1, 1, 1))
    tracked = {}
    for deferred in ("true", "false"):
        words = f"pipeline.deferred_batch_norm={deferred} recompute={recompute}"
        strategy = staged(model, (CPU, CPU), f"pipeline.split_size=3 {words}")
        strategy.train()
        strategy.forward_backward(batch, 1 / ROWS)
        tracked[deferred] = {
            name: buffer.clone() for name, buffer in strategy.named_buffers().items()
        }
    model(batch.inputs)
    expected = dict(model.named_buffers())
    assert list(tracked["true"]) == list(expected)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(
            tracked["true"][name],
            expected[name],
            rtol=1e-5,
            atol=1e-6,
        )
    assert tracked["false"]["1.num_batches_tracked"] == 4
    assert not torch.allclose(
        tracked["false"]["1.running_var"], expected["1.running_var"], rtol=0.1
    )


# --- figures of a pipeline.


def test_names_are_the_models_and_nothing_of_it_is_lost():
    model = made("cnn")
    for words in ("mode=split", "pipeline.microbatches=2"):
        strategy = staged(model, (CPU,) * 3, words)
        assert list(strategy.named_parameters()) == [name for name, _ in model.named_parameters()]
        assert set(strategy.named_buffers()) == {name for name, _ in model.named_buffers()}
        assert not hasattr(strategy, "model")
        union = [name for stage in strategy.stages.values() for name in stage.state_dict()]
        assert sorted(union) == sorted(model.state_dict())


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("pipeline.microbatches=5", (5, 2)),
        ("pipeline.microbatches=4", (4, 3)),
        ("pipeline.split_size=4", (3, 4)),
        ("pipeline.split_size=7", (2, 7)),  # not 5 and 5
        ("pipeline.split_size=99", (1, 10)),
    ],
)
def test_messages_about_micro_batches(words, facts):
    strategy = staged(made("cnn_gn"), (CPU, CPU), f"pipeline.cuts=['7'] {words}")
    notes = strategy.notes()
    known_names = strategy.result_fields()["pipeline"]
    count, size = facts
    assert re.search(rf" {count} micro-batches .*\b{size},", notes["pipeline"])
    assert ("up to" in notes["pipeline"]) == (count * size > ROWS)
    assert "for correctness" in notes["note"]
    assert notes["cuts"] == "after 7"
    assert (known_names["microbatches"], known_names["split_size"]) == facts
    assert (
        known_names["stages"],
        known_names["cuts"],
        known_names["schedule"],
        known_names["bubble_measured"],
    ) == (
        2,
        ["7"],
        "streams",
        None,
    )
    assert known_names["bubble_ideal"] == pytest.approx(1 / (facts[0] + 1))
    strategy.forward_backward(digits(), 1 / ROWS)
    figures = strategy.figures()
    assert strategy.result_fields()["pipeline"]["bubble_measured"] == pytest.approx(
        figures["pipeline/bubble_pct"] / 100
    )
    # Stand-ins work one at a time: one waits while the other works.
    busy = figures["pipeline/stage0_busy_pct"] + figures["pipeline/stage1_busy_pct"]
    assert busy <= 100.001 and figures["pipeline/bubble_pct"] == pytest.approx(100 - busy / 2)
    assert strategy.figures() == {}


# --- on a GPU.

CARD = torch.device("cuda", 0)


@pytest.fixture
def slow_copies(monkeypatch):
    """Delay each copy between stages by about ten milliseconds."""
    monkeypatch.setattr(streams, "delay_cycles", 20_000_000)


@pytest.fixture
def exact(monkeypatch):
    """float32 without TF32, and kernels that add in one order."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("name", ["cnn_gn", "vit_tiny"])
@pytest.mark.parametrize(
    "words", ["mode=split", "pipeline.microbatches=5", "pipeline.split_size=4 recompute=true"]
)
def test_a_pipeline_equals_the_whole_model_on_gpus(name, words, cards, exact):
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} CUDA devices")
    drives = (CARD, torch.device("cuda", cards - 1))
    model = made(name)
    strategy = staged(model, drives, words)
    assert {p.device for p in strategy.named_parameters().values()} == {*drives}
    assert_equals_whole(model, strategy, digits(device=CARD), 1e-4)


@pytest.mark.gpu
def test_late_copies_change_nothing(exact, slow_copies):
    """A stage that did not wait for its copy would compute with what was in the memory before."""
    model = made("cnn_gn")
    strategy = staged(model, (CARD,) * 3, "pipeline.microbatches=5")
    assert_equals_whole(model, strategy, digits(device=CARD), 1e-4)
    for number in range(1, 4):  # memory is used again
        for parameter in strategy.named_parameters().values():
            parameter.grad = None
        assert_equals_whole(model, strategy, digits(device=CARD, number=number), 1e-4)


class Asleep(torch.autograd.Function):
    """A layer that keeps one thread of a GPU busy, forward and backward; many of them fit on the
    GPU together.
    """

    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms, far longer than all launches of an action
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(20_000_000)
        return gradient.clone()


@torch.fx.wrap
def asleep(x):
    return Asleep.apply(x)


class Sleeping(nn.Module):
    """Two halves of equal work."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return asleep(self.second(asleep(self.first(x.flatten(1)))))


@pytest.mark.gpu
def test_stages_overlap_on_a_gpu(tmp_path):
    """The profiler shows kernels of the second stage, on its own stream, while the first stage
    works.
    """
    rows = 64
    count = 8
    strategy = staged(
        Sleeping(), (CARD, CARD), f"pipeline.microbatches={count}", shape=(rows, 1, 8, 8)
    )
    batch = digits(rows, CARD)
    for _ in range(3):
        strategy.forward_backward(batch, 1 / rows)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as watched:
        for _ in range(3):
            strategy.forward_backward(batch, 1 / rows)
        torch.cuda.synchronize()
    lanes = kernels_by_stream(watched, tmp_path / "trace.json")
    busiest = sorted(lanes.values(), key=lambda spans: -sum(end - begin for begin, end in spans))[
        :2
    ]
    assert len(busiest) == 2, "all kernels ran on one stream"
    first, second = busiest
    together = sum(max(0, min(b, d) - max(a, c)) for a, b in first for c, d in second)
    shorter = min(sum(end - begin for begin, end in spans) for spans in busiest)
    assert together > 0.5 * shorter
    # The bubble would be 50 % if one stage worked at a time.
    assert strategy.figures()["pipeline/bubble_pct"] < 50


def kernels_by_stream(watched, path):
    """Begin and end of the CUDA kernels of a profile, in microseconds, by their stream."""
    watched.export_chrome_trace(str(path))
    lanes = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            lanes.setdefault(event["args"]["stream"], []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    return lanes


@pytest.mark.parametrize(
    "words", ["pipeline.microbatches=2", "pipeline.microbatches=2 recompute=true"]
)
def test_a_subclass_of_batch_norm_is_what_trains(words):
    """Two micro-batches equal two passes of the given model to the bit."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        Squashed(4),
        nn.Conv2d(4, 4, 3),
        Squashed(4),
        nn.Flatten(),
        nn.Linear(64, 10),
    ]
    model = nn.Sequential(*layers)
    batch = digits()
    strategy = staged(model, (CPU, CPU), words)
    strategy.train()
    actual = strategy.forward_backward(batch, 1 / ROWS)
    losses = []
    for part in (slice(0, 5), slice(5, ROWS)):
        loss = cross_entropy(model(batch.inputs[part]), batch.targets[part]) * (5 / ROWS)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(actual, sum(losses))
    ours = gradients(strategy.named_parameters().items())
    actual_gradients = gradients(model.named_parameters())
    assert all(torch.equal(ours[name], actual_gradients[name]) for name in actual_gradients)
