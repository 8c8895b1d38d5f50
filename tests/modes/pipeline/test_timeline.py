"""The recorder on the CPU's clock: what it keeps, and for how long."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trainer.modes.pipeline import timeline
from trainer.modes.pipeline.orders import Action, Span
from trainer.modes.pipeline.timeline import KEPT, Recorder

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    actual = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: actual.now))
    return actual


def work(recorder, clock, worker, action, seconds):
    with recorder.action(worker, action):
        clock.now += seconds


def test_the_spans_of_each_step(clock):
    recorder = Recorder((CPU, CPU))
    first = Action("F", 0, 0)
    second = Action("F", 1, 0)
    third = Action("B", 1, 0)
    for begun in (100.0, 200.0):
        clock.now = begun
        with recorder.step():
            work(recorder, clock, 0, first, 2)
            clock.now += 5
            work(recorder, clock, 1, second, 1)
        work(recorder, clock, 1, third, 3)  # a step's last piece of work
    assert recorder.steps() == [
        [
            Span(0, first, begun, begun + 2),
            Span(1, second, begun + 7, begun + 8),
            Span(1, third, begun + 8, begun + 11),
        ]
        for begun in (100.0, 200.0)
    ]
    assert recorder.steps() == []  # looked at once, forgotten


def test_the_last_few_steps_are_kept(clock):
    recorder = Recorder((CPU,))
    for number in range(KEPT + 3):
        clock.now = number
        with recorder.step():
            work(recorder, clock, 0, Action("F", 0, number), 0.5)
    actual = recorder.steps()
    assert [steps[0].action.microbatch for steps in actual] == list(range(3, KEPT + 3))
    assert [steps[0].begin for steps in actual] == list(range(3, KEPT + 3))


def test_a_task_that_fails_is_not_recorded(clock):
    recorder = Recorder((CPU,))
    with pytest.raises(ValueError), recorder.step():
        work(recorder, clock, 0, Action("F", 0, 0), 1)
        with recorder.action(0, Action("F", 0, 1)):
            raise ValueError
    assert [[span.action.microbatch for span in step] for step in recorder.steps()] == [[0]]


class Event:
    """An event of a GPU that works in order: the work before it is done at `clock.free`."""

    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = max(self.clock.now, self.clock.free)

    def synchronize(self):
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize(
    ("launch", "queued", "length", "launching"),
    [
        (0, 0, 3, 0),  # The host issues all three kernels at once.
        (1, 0, 4, 3),  # the GPU waits for the first
        (1, 9, 3, 0),  # The device is behind and never waits.
        (1, 1, 3, 2),  # The device is behind at first.
        (5, 0, 16, 15),  # The device waits for each kernel.
    ],
)
def test_idle_time_of_a_gpu_is_at_most_the_wait_for_launches(
    launch, queued, length, launching, clock, monkeypatch
):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(
        torch.cuda,
        "synchronize",
        lambda index: setattr(clock, "now", max(clock.now, clock.free)),
    )
    clock.now = 10.0
    clock.free = 10.0 + queued
    recorder = Recorder((card, card))
    with recorder.step(), recorder.action(0, Action("F", 0, 0)):
        for _ in range(3):
            clock.now += launch
            clock.free = max(clock.now, clock.free) + 1
    ((span,),) = recorder.steps()
    assert (span.begin, span.end - span.begin) == (10.0 + queued, length)
    assert span.launching == launching


@pytest.mark.gpu
def test_a_gpus_spans_are_its_work_on_the_cpus_clock():
    """Work is issued at once and done in sequence.

    A span is when the GPU worked, not when the work was issued.
    """
    import time

    card = torch.device("cuda:0")
    recorder = Recorder((card, card))
    matrix = torch.randn(2048, 2048, device=card)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    before = time.perf_counter()
    with recorder.step():
        for number in range(2):
            with recorder.action(number, Action("F", number, 0)):
                for _ in range(50):
                    matrix @ matrix
    ((first, second),) = recorder.steps()
    after = time.perf_counter()
    assert (first.worker, second.worker) == (0, 1)
    assert (
        before - 1e-3 < first.begin < first.end <= second.begin + 1e-4 < second.end < after + 1e-3
    )
    assert first.end - first.begin > 1e-4  # fifty products take longer than their launches
