"""Windows and counts, held against hand-made figures."""

import pytest
import torch
import torchvision
from torch import nn

from trainer.telemetry import metrics
from trainer.telemetry.metrics import StepTimer


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now)


def drive(timer, clock, steps, per_window, seconds=0.5, waited=0.1):
    for number in range(1, steps + 1):
        clock.now += seconds
        timer.step(waited)
        if number % per_window == 0:
            timer.stop()
            clock.now += 50  # an evaluation, nobody's step
            timer.start()


def test_timer_leaves_out_warm_up_and_what_lies_between_windows(monkeypatch):
    clock = Clock(monkeypatch)
    timer = StepTimer([torch.device("cpu")], warmup=4)
    drive(timer, clock, steps=12, per_window=4)
    found = timer.summary(batch_size=8)
    assert found["throughput"]["samples_per_sec"] == pytest.approx(16)
    assert found["step_time_s"]["mean"] == pytest.approx(0.5)
    assert found["data_wait_fraction"] == pytest.approx(0.2)
    assert len(timer.steps) == 8 and not found["short"]


def test_a_short_run_uses_its_steps_after_the_first(monkeypatch):
    clock = Clock(monkeypatch)
    timer = StepTimer([torch.device("cpu")], warmup=10)
    clock.now += 30  # a slow first step
    timer.step(0.0)
    drive(timer, clock, steps=3, per_window=3)
    found = timer.summary(batch_size=8)
    assert found["short"] and found["throughput"]["samples_per_sec"] == pytest.approx(16)


def test_one_step_measures_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    timer = StepTimer([torch.device("cpu")], warmup=10)
    drive(timer, clock, steps=1, per_window=1)
    assert timer.summary(8)["throughput"] is None


def test_flops_of_resnet50():
    # 4.09 billion multiply-adds (torchvision's table), two operations each.
    flops = metrics.forward_flops(torchvision.models.resnet50(), (1, 3, 224, 224))
    assert flops == pytest.approx(2 * 4.09e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "precision", "capability", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", (9, 0), 989),
        ("NVIDIA H100 80GB HBM3", "tf32", (9, 0), 495),
        ("NVIDIA A100-SXM4-80GB", "fp32", (8, 0), 19.5),
        ("NVIDIA L40", "bf16", (8, 9), 181),  # not L4's
        ("Tesla T4", "tf32", (7, 5), 8.1),  # it has none, and computes in fp32
        ("Tesla V100-SXM2-16GB", "bf16", (7, 0), None),
        ("NVIDIA T400", "fp16", (7, 5), None),
        ("NVIDIA RTX A1000", "fp16", (8, 6), None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", (8, 0), None),
    ],
)
def test_peaks_are_of_the_very_card_and_precision(monkeypatch, name, precision, capability, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    peak = metrics.peak_flops(torch.device("cuda", 0), precision)
    assert peak == (None if tflops is None else pytest.approx(1e12 * tflops))
    assert metrics.peak_flops(torch.device("cpu"), precision) is None


class Device:
    """A stream whose work ends when it ends: an event on it is reached when all work before it is done."""

    def __init__(self, clock, monkeypatch):
        self.clock, self.free = clock, clock.now
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = max(device.clock.now, device.free)

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(metrics, "synchronise", lambda devices: self.synchronise())

    def work(self, seconds):
        self.free = max(self.clock.now, self.free) + seconds

    def synchronise(self):
        self.clock.now = max(self.clock.now, self.free)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("reading", "computing", "waited"), [(0.3, 0.4, 0.0), (0.6, 0.4, 0.2), (0.5, 0.0, 0.5)])
def test_a_wait_that_the_device_computes_through_costs_nothing(monkeypatch, reading, computing, waited, pieces):
    clock = Clock(monkeypatch)
    device = Device(clock, monkeypatch)
    timer = StepTimer([torch.device("cuda", 0)], warmup=1)
    for _ in range(20):
        seconds = 0.0
        for _ in range(pieces):
            timer.ask()
            clock.now += reading / pieces  # the host stands in next(batches)
            seconds += timer.arrive()
            device.work(computing / pieces)
        timer.step(seconds)
    timer.stop()
    expected = waited / max(reading, computing)
    assert timer.summary(8)["data_wait_fraction"] == pytest.approx(expected, abs=0.02)


def test_utilisation():
    assert metrics.model_flops_utilisation(1000, 10**9, 30e12) == pytest.approx(0.1)


def test_activation_bytes_against_what_autograd_keeps():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(4, 3, 8, 8))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    real = sum(t.untyped_storage().nbytes() for ptr, t in kept.items() if ptr not in own)
    assert out.shape == (4, 10)
    assert metrics.activation_bytes(model, (4, 3, 8, 8)) == pytest.approx(real, rel=0.05)


def test_memory_figures_are_plausible():
    device = torch.device("cpu")
    assert 2**20 < metrics.peak_memory(device) < 2**40
    assert 2**20 < metrics.free_memory(device) < 2**50


def test_one_window_of_one_step_has_no_spread():
    timer = StepTimer([torch.device("cpu")], 1)
    for _ in range(2):
        timer.start()
        timer.step(0.0)
        timer.stop()
    found = timer.summary(8)
    assert found["throughput"]["samples_per_sec"] > 0
    assert found["throughput"]["std"] is None and found["step_time_s"]["std"] is None
    timer.start()
    timer.step(0.0)
    timer.stop()
    assert timer.summary(8)["throughput"]["std"] > 0 and timer.summary(8)["step_time_s"]["std"] > 0
