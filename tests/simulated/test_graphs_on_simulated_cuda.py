"""Captured steps on simulated cards, of pipelines too: no race, no wait in a step, the result of
launched steps.
"""

import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.simulated.simcuda import graphs, runs, simulated
from tests.training import graphed_runs  # noqa: F401  registers models
from trainer import versions
from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import NotCapturable, StepRecorder
from trainer.models.balance import BlockCost
from trainer.modes.pipeline.stages import Staged
from trainer.training import step_graphs, step_tuning
from trainer.training.step_graphs import GraphSteps

ONE = "devices=[cuda:0,cuda:0]"
TWO = "devices=[cuda:0,cuda:1]"
THREE = "devices=[cuda:0,cuda:1,cuda:2]"
PIPE = "mode=pipeline pipeline.microbatches=4 graphs=true"
RUNS = [
    "model.name=mlp precision=fp16 clip_grad_norm=1 ema=0.9 graphs=true",
    f"mode=pipeline pipeline.microbatches=2 graphs=true model.name=cnn model.freeze=1 {TWO}",
]
MORE = [
    "model.name=cnn clip_grad_norm=1 ema=0.9 accumulate=2 graphs=true",
    "model.name=cnn recompute=true graphs=true",
    "model.name=cnn recompute=true accumulate=2 graphs=true",
    f"{PIPE} model.name=cnn model.freeze=1 {TWO}",
    "model.name=mlp optimizer.name=adamw augment.mixup=0.2 augment.crop=pad graphs=true",
    "model.name=noisy precision=bf16 epochs=5 graphs=auto",
    f"{PIPE} model.name=cnn accumulate=2 clip_grad_norm=1 {ONE}",
    f"mode=split graphs=true model.name=mlp precision=fp16 {THREE}",
]
VARIANTS = [
    f"{PIPE} model.name=mlp precision=fp16 clip_grad_norm=1 {TWO}",
    "model.name=noisy optimizer.name=muon optimizer.weight_decay=0.1 graphs=true",
    f"{PIPE} model.name=cnn clip_grad_norm=1 ema=0.9 {TWO}",
    f"{PIPE} model.name=cnn optimizer.name=adamw {THREE}",
    f"{PIPE} model.name=noisy precision=bf16 {ONE}",
    f"{PIPE} model.name=noisy accumulate=2 {TWO}",
    f"mode=pipeline pipeline.split_size=3 graphs=true model.name=noisy {THREE}",
    f"mode=split graphs=true model.name=noisy {ONE}",
    f"mode=split graphs=true model.name=noisy optimizer.name=adamw accumulate=2 {TWO}",
]
SLOW = [pytest.param(words, marks=pytest.mark.slow) for words in MORE]
FULL = [
    pytest.param(words, marks=pytest.mark.full("variants of the other runs")) for words in VARIANTS
]


def probe(self, rows):
    """Cuts that are the same in every run."""
    return [BlockCost(1.0, 2.0, 8)] * (len(self.traced.cuts) + 1)


FEWER = [
    (step_graphs, "WARMUP_STEPS", 3),
    (step_tuning, "TIMED_STEPS", 4),
    (Staged, "probe", probe),
]
NOT_EVERY_STEP = (
    *runs.NOT_EVERY_STEP,
    "devices.cuda_graphs.StepRecorder.record",
    "devices.cuda_graphs.seconds_between",
)


def trained(words, patches=()):
    """A run, how often it replayed, and why it gave that up."""
    replays = []
    messages = []
    replay = graphs.Graph.replay
    give_up = GraphSteps._give_up

    def counted(graph):
        replays.append(graph)
        replay(graph)

    def told(steps, reason):
        messages.append(reason)
        give_up(steps, reason)

    arguments = {word.partition("=")[0] for word in words.split()}
    base = [
        "mode=single",
        "data.samples=64",
        "epochs=2",
        "save.every_steps=4",
        "logging.every_steps=3",
    ]
    words = " ".join(
        [*words.split(), *(word for word in base if word.partition("=")[0] not in arguments)]
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for owner, name, value in [
            (graphs.Graph, "replay", counted),
            (GraphSteps, "_give_up", told),
            *FEWER,
            *patches,
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        run_result = runs.train_on_cuda(words, Path(folder) / "run")
    return run_result, len(replays), messages


def both(words, patches=()):
    launched = trained(
        words.replace("graphs=true", "graphs=false").replace("graphs=auto", "graphs=false")
    )[0]
    return launched, *trained(words, patches)


def alike(one, two):
    same = one.weights.keys() == two.weights.keys() and one.losses == two.losses
    return same and all(
        torch.equal(weight, two.weights[name]) for name, weight in one.weights.items()
    )


@pytest.mark.full(
    but=[
        "model.name=mlp optimizer.name=adamw augment.mixup=0.2 augment.crop=pad graphs=true",
        "model.name=mlp precision=fp16 clip_grad_norm=1 ema=0.9 graphs=true",
    ]
)
@pytest.mark.slow(cases=["words1"])
@pytest.mark.parametrize("words", [*RUNS, *SLOW, *FULL])
def test_a_run_with_replays_is_the_run_without(words):
    launched, replayed, count, message = both(words)
    assert alike(launched, replayed) and count > 8
    assert replayed.errors == [] and (message == [] or "auto" in words)
    assert replayed.waits.inside(runs.IN_A_STEP, *NOT_EVERY_STEP) == {}


@pytest.mark.slow
def test_a_model_that_waits_is_launched():
    launched, replayed, _, message = both("model.name=waits accumulate=2 graphs=true")
    assert alike(launched, replayed) and replayed.errors == []
    assert len(message) == 1 and "graphed_runs.py" in message[0]


@pytest.mark.full("as without a card, in test_step_graphs.py")
def test_blocks_with_random_numbers_are_recomputed_eagerly():
    kept = trained("model.name=noisy graphs=false")[0]
    launched, replayed, count, message = both("model.name=noisy recompute=true graphs=auto")
    assert alike(kept, launched) and alike(launched, replayed) and replayed.errors == []
    assert count == 0 and len(message) == 1 and "random states" in message[0]


# Mutants.


@contextmanager
def waits_for_nothing_before(self):
    current = torch.cuda.current_stream(self.device)
    with torch.cuda.stream(self.stream):
        yield
    current.wait_stream(self.stream)


@contextmanager
def nobody_waits_for_it(self):
    self.stream.wait_stream(torch.cuda.current_stream(self.device))
    with torch.cuda.stream(self.stream):
        yield


def on_the_current_stream(self, work, plain=StepRecorder.record):
    self.stream = torch.cuda.current_stream(self.device)
    return plain(self, work)


def without_a_copy(self, batch, weight, sync, plain=GraphSteps.forward_backward):
    """Return the loss that a replay overwrites."""
    with mock.patch.object(torch.Tensor, "clone", lambda tensor: tensor):
        return plain(self, batch, weight, sync)


MUTANTS = {
    "side stream waits for nothing": (StepRecorder, "use_side_stream", waits_for_nothing_before),
    "nobody waits for side stream": (StepRecorder, "use_side_stream", nobody_waits_for_it),
    "the current stream is recorded": (StepRecorder, "record", on_the_current_stream),
    "a loss is not cloned": (GraphSteps, "forward_backward", without_a_copy),
}


@pytest.mark.full(cases=["side stream waits for nothing", "nobody waits for side stream"])
@pytest.mark.slow(
    cases=[
        "the current stream is recorded",
        "a loss is not cloned",
        "side stream waits for nothing",
    ]
)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant(name):
    launched, replayed, _, message = both("model.name=mlp graphs=true", [MUTANTS[name]])
    assert replayed.errors or message or not alike(launched, replayed)


# The simulation of captures.


@pytest.fixture
def machine():
    with simulated(1) as machine:
        yield machine


@contextmanager
def capturing(stream, graph):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def captured(work):
    """Return a graph of `work`, and the result of its capture."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with capturing(stream, graph):
        work_result = work()
    return graph, work_result


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x + torch.tensor([1.0] * 4, device="cuda:0"),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
        lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()),
        lambda x: torch.cuda.empty_cache(),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_operations_that_wait_are_refused_and_the_recorder_recovers(
    machine, wait, old, monkeypatch
):
    if old:
        of_an_old_torch(monkeypatch)
    recoveries = cuda_graphs.recoveries
    x = torch.ones(4, device="cuda:0")
    recorder = StepRecorder(torch.device("cuda", 0))
    with pytest.raises(NotCapturable, match="capturing"):
        recorder.record(lambda: (x.add_(1), wait(x)))
    torch.randn(2, device="cuda:0")
    replay, out = recorder.record(lambda: x + 1)
    replay()
    assert out.tolist() == [2.0] * 4
    assert machine.graphs.allocating == {}
    assert machine.errors == []
    assert cuda_graphs.recoveries == recoveries + old


def of_an_old_torch(monkeypatch):
    for what in ("random states of each capture", "an end of captures that fail"):
        monkeypatch.setitem(versions.SINCE, what, (99, 0))


def test_after_a_capture_that_failed_an_old_torch_believes_in_it(machine, monkeypatch):
    of_an_old_torch(monkeypatch)
    x = torch.ones(4, device="cuda:0")

    def hidden():
        with suppress(RuntimeError):
            x.add_(1).sum().item()

    with pytest.raises(RuntimeError, match="previous error"):
        captured(hidden)
    assert machine.graphs.allocating and x.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="Offset increment"):
        torch.randn(2, device="cuda:0")


def test_streams_fork_and_join_in_a_capture(machine):
    x = torch.ones(4, device="cuda:0")
    side = torch.cuda.Stream()

    def forked(waits, joins):
        def work():
            y = x * 2
            current = torch.cuda.current_stream()
            side.wait_event(current.record_event())
            with torch.cuda.stream(side):
                z = x + 1
            if not waits:
                y.add_(z)
            if joins:
                current.wait_stream(side)
            return y + z if waits else y

        return work

    graph, out = captured(forked(waits=True, joins=True))
    graph.replay()
    assert out.tolist() == [4.0] * 4 and machine.errors == []
    captured(forked(waits=False, joins=True))
    assert "RACE" in machine.errors[0]
    with pytest.raises(RuntimeError, match="unjoined"):
        captured(forked(waits=False, joins=False))


def test_work_outside_of_a_capture_is_detected(machine):
    x = torch.ones(4, device="cuda:0")

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            x.mul_(2)

    captured(work)
    assert any(error.startswith("CAPTURE") for error in machine.errors)


@pytest.mark.parametrize("waits", [True, False])
def test_a_replay_is_in_the_order_of_its_stream(machine, waits):
    x = torch.ones(4, device="cuda:0")
    side = torch.cuda.Stream()
    graph, out = captured(lambda: x * 2)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    x.add_(out)
    assert (machine.errors == []) is waits and all("RACE" in error for error in machine.errors)


def test_replaying_on_freed_memory_is_detected(machine):
    arguments = [torch.ones(4, device="cuda:0")]
    graph, _ = captured(lambda: arguments[0] * 2)
    arguments.clear()
    graph.replay()
    assert [error.partition(":")[0] for error in machine.errors] == ["REPLAY"]


def test_a_capture_needs_its_own_stream(machine):
    with pytest.raises(RuntimeError, match="non-default"):
        torch.cuda.CUDAGraph().capture_begin(capture_error_mode="thread_local")


def test_a_graph_is_not_reset_while_it_may_be_replayed(machine):
    x = torch.ones(4, device="cuda:0")
    graph, _ = captured(lambda: x * 2)
    graph.replay()
    graph.reset()
    assert [error.partition(":")[0] for error in machine.errors] == ["RESET"]
