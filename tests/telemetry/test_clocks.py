"""Windows and waits, held against hand-made figures."""

import pytest
import torch

from tests.telemetry.simulated_host import BOTH, DEVICE, HOST, LATE, Clock, Device, play
from trainer.telemetry import clocks
from trainer.telemetry.clocks import Ledger, StepTimer


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def device(clock, monkeypatch):
    return Device(clock, monkeypatch)


def drive(timer, clock, steps, per_window, seconds=0.5, waited=0.1):
    for number in range(1, steps + 1):
        clock.now += seconds
        timer.step(waited)
        if number % per_window == 0:
            timer.stop()
            clock.now += 50  # an evaluation, nobody's step
            timer.start()


def test_timer_leaves_out_warm_up_and_what_lies_between_windows(clock):
    timer = StepTimer([torch.device("cpu")], warmup=4)
    drive(timer, clock, steps=12, per_window=4)
    summary_lines = timer.summary(batch_size=8)
    assert summary_lines.throughput.samples_per_sec == pytest.approx(16)
    assert summary_lines.step_time_s.mean == pytest.approx(0.5)
    assert summary_lines.data_wait_fraction == pytest.approx(0.2)
    assert len(timer.steps) == 8 and not summary_lines.short


def test_a_short_run_uses_its_steps_after_the_first(clock):
    timer = StepTimer([torch.device("cpu")], warmup=10)
    clock.now += 30  # a slow first step
    timer.step(0.0)
    drive(timer, clock, steps=3, per_window=3)
    summary_lines = timer.summary(batch_size=8)
    assert summary_lines.short and summary_lines.throughput.samples_per_sec == pytest.approx(16)


def test_one_step_measures_nothing(clock):
    timer = StepTimer([torch.device("cpu")], warmup=10)
    drive(timer, clock, steps=1, per_window=1)
    assert timer.summary(8).throughput is None


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    ("reading", "computing", "waited"), [(0.3, 0.4, 0.0), (0.6, 0.4, 0.2), (0.5, 0.0, 0.5)]
)
def test_a_wait_that_the_device_computes_through_costs_nothing(
    clock, device, reading, computing, waited, pieces
):
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
    assert timer.summary(8).data_wait_fraction == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_pause_counts_for_no_step(clock, device, kind):
    timer = StepTimer([torch.device(kind, 0)], warmup=1)
    for number in range(12):
        if number == 5:
            device.synchronise()
            with timer.pause():
                clock.now += 30
        timer.ask()
        clock.now += 0.3  # reading
        waited = timer.arrive()
        if kind == "cuda":
            device.work(0.2)
        else:
            clock.now += 0.2
        timer.step(waited)
    steps, seconds, _ = timer.stop()
    assert (steps, seconds) == (12, pytest.approx(12 * (0.3 if kind == "cuda" else 0.5), abs=0.41))
    assert max(timer.steps) < 0.71 and timer.summary(8).throughput.samples_per_sec > 8 / 0.71


# Windows of one step cannot show that the host is not the limit.
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("window", [1, 50])
@pytest.mark.parametrize(
    ("steps", "beyond"),
    [
        ([HOST] * 100, 0.34),  # the device works a third of the time, which no event tells apart
        (
            [DEVICE] * 100,
            0.2,
        ),
        ([BOTH] * 100, 0.9),
        ([(0.0002, 0.001, 0.05)] * 100, 0.04),  # images, and what is issued behind them
        ([LATE] * 100, 0.13),
        (([DEVICE] * 5 + [HOST] * 5) * 10, 0.5),
    ],
    ids=["host", "device", "both", "data", "data and host", "mixed"],
)
def test_a_device_that_waits_for_launches_is_seen(clock, device, steps, beyond, window, pieces):
    """The report is at most the true time, and exact if windows are long enough."""
    timer = StepTimer([torch.device("cuda", 0)], warmup=0)
    truth = play(timer, clock, device, steps, window, pieces) / sum(timer.steps)
    message = timer.summary(8).launch_bound_fraction
    assert truth - 1e-9 <= message <= truth + beyond, (truth, message)
    if window > 1 and steps[0] in (DEVICE, BOTH):
        assert message == pytest.approx(truth, abs=0.02)
    assert message + timer.summary(8).data_wait_fraction <= 1 + 1e-9
    assert (
        timer.latest_launches == pytest.approx(message, abs=0.02)
        or steps[0] != steps[-1]
        or window == 1
    )


def test_launch_times_of_a_window_are_its_own(clock, device):
    timer = StepTimer([torch.device("cuda", 0)], warmup=10)
    shares = []
    for kind in (HOST, DEVICE, HOST):
        play(timer, clock, device, [kind] * 50, 50)
        shares.append(timer.latest_launches)
    assert shares[0] == pytest.approx(1 - 0.001 / 0.03, abs=1e-3) and shares[1] < 0.02, shares
    assert shares[2] == pytest.approx(2 / 3, abs=0.01), (
        "steps that waited for none have told how long one is"
    )
    assert timer.launches[1] == pytest.approx(9 * 0.029), "warm-up, without the first step"
    cpu = StepTimer([torch.device("cpu")], warmup=0)
    drive(cpu, clock, steps=4, per_window=2)
    assert cpu.summary(8).launch_bound_fraction is None


def test_one_window_of_one_step_has_no_spread():
    timer = StepTimer([torch.device("cpu")], 1)
    for _ in range(2):
        timer.start()
        timer.step(0.0)
        timer.stop()
    summary_lines = timer.summary(8)
    assert summary_lines.throughput.samples_per_sec > 0
    assert summary_lines.throughput.std is None and summary_lines.step_time_s.std is None
    timer.start()
    timer.step(0.0)
    timer.stop()
    assert timer.summary(8).throughput.std > 0
    assert timer.summary(8).step_time_s.std > 0


def test_a_part_that_fails_waits_for_no_device(monkeypatch):
    """The device may have work that needs a peer which has exited."""
    waits = []
    monkeypatch.setattr(clocks, "synchronise", waits.append)
    ledger = Ledger("other")
    ledger.devices = [torch.device("cpu")]
    with pytest.raises(ZeroDivisionError), ledger.span("saving"):
        raise ZeroDivisionError
    assert len(waits) == 1 and ledger.start_part("end") == "other"
    with ledger.span("saving"):
        pass
    assert len(waits) == 3


def test_each_second_is_of_one_part(clock):
    ledger = Ledger("start-up: ranks")
    clock.now = 102
    with ledger.span("steps"):
        clock.now = 105
        with ledger.span("logging"):
            clock.now = 106
        clock.now = 110
    clock.now = 111
    assert ledger.read_seconds() == {"start-up: ranks": 3, "steps": 7, "logging": 1}


def test_waiting_a_slow_first_step_and_steps_that_did_not_end_are_no_steps(clock):
    ledger = Ledger("steps")
    clock.now = 110
    ledger.note_steps(0, 0.0, 0.0, 0.0)
    ledger.note_steps(1, 10, 1, 0)
    clock.now = 130
    ledger.note_steps(10, 20, 0, 0)  # 2 seconds each: the first took 9
    assert ledger.read_seconds() == {
        "steps": 22,
        "waiting for data": 0,
        "start-up: first batches": 1,
        "start-up: first step": 7,
    }
    clock.now = 190
    ledger.note_steps(5, 60, 0, 0)
    clock.now = 200
    for _ in range(2):
        ledger.note_failure()
    spent = {
        "steps": 82,
        "waiting for data": 0,
        "start-up: first batches": 1,
        "start-up: first step": 7,
        "unfinished steps": 10,
    }
    assert ledger.read_seconds() == spent and sum(spent.values()) == 100


def test_the_ledger_counts_the_waiting_that_the_verdict_counts(clock):
    ledger = Ledger("steps")
    clock.now = 200
    ledger.note_steps(1, 10, 6, 0)  # the first batch
    ledger.note_steps(5, 20, 5, 5)  # warm-up, which counts as long as there is nothing else
    assert ledger.read_seconds()["waiting for data"] == 5
    ledger.note_steps(10, 30, 3, 2)
    ledger.note_peers(4)  # which the timer counts from now on
    ledger.note_steps(10, 30, 1, 7)
    spent = ledger.read_seconds()
    assert (spent["waiting for data"], spent["start-up: first batches"]) == (7, 12)
    assert sum(spent.values()) == 100
