"""TF32, fp32 and 16 bits: what torch is told, what a CPU makes of it, and what is said of it."""

import itertools
import math

import pytest
import torch

from tests.command_line import QUIET, losses, ok, result
from trainer.commands.doctor import software
from trainer.commands.doctor.findings import Findings
from trainer.devices import precision as precisions
from trainer.devices.precision import computed_in, cpu_speed, note, set_precision
from trainer.telemetry.verdict import _bf16_is_faster
from trainer.training.randomness import seed_everything

AMPERE, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def switches():
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True  # torch's own
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "tf32"])
def test_matrix_products_and_convolutions_have_the_precision_asked_for(switches, precision):
    set_precision(precision)
    on = precision == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is on
    # Compiled code reads the switches by all of their names, and a mixture of them raises.
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is on
    assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is on
    assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=on):
        assert torch.backends.cudnn.allow_tf32 is on


def test_what_a_device_computes_in(monkeypatch):
    monkeypatch.setattr(precisions, "cpu_speed", lambda precision: 1.0)
    assert computed_in("tf32", CPU) == "fp32" and "no TF32" in note("tf32", CPU)
    assert note("fp32", CPU) is note("bf16", CPU) is None and computed_in("bf16", CPU) == "bf16"
    for capability, found in (((8, 0), "tf32"), ((7, 5), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert computed_in("tf32", AMPERE) == found
        assert ("precision=tf32" in (note("fp32", AMPERE) or "")) == (found == "tf32")


@pytest.mark.parametrize(("speed", "times"), [(1.6, None), (0.9, None), (0.65, "1.5 times"), (0.008, "125.0 times")])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_cpu_that_is_slower_in_16_bits_is_told(monkeypatch, precision, speed, times):
    monkeypatch.setattr(precisions, "cpu_speed", lambda asked: speed if asked == precision else None)
    said = f"precision=fp32 is {times} as fast as {precision} in convolutions on this processor"
    assert note(precision, CPU) == (said if times else None)
    assert note(precision, AMPERE) is note("fp32", CPU) is None


@pytest.fixture
def clock(monkeypatch):
    """Clocks that only convolutions move: by so many seconds each, and a wall's by `others` more, in which other
    programs have the core. Yields the seconds, a list of what was computed, and the `others`."""
    now, wall, took, computed, around = [0.0], [0.0], {}, [], {"others": itertools.repeat(0.0)}
    threads = torch.get_num_threads()

    def convolution(kind):
        def compute():
            assert torch.get_num_threads() == 1
            computed.append(kind)
            seconds = took[kind][computed.count(kind) - 1]
            now[0] += seconds
            wall[0] += seconds + next(around["others"])

        return compute

    monkeypatch.setattr(precisions, "_convolution", convolution)
    monkeypatch.setattr(precisions.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(precisions.time, "perf_counter", lambda: wall[0])
    cpu_speed.cache_clear()
    yield took, computed, around
    cpu_speed.cache_clear()
    assert torch.get_num_threads() == threads


def test_a_cpus_speed_is_that_of_the_fastest_convolutions(clock):
    took, computed, _ = clock
    took[torch.bfloat16] = [9, 0.006, 0.004, *[0.005] * 20]  # the first finds its kernels, others are disturbed
    took[torch.float32] = [7, 0.003, 0.002, *[0.003] * 20]
    assert cpu_speed("bf16") == cpu_speed("bf16") == pytest.approx(0.5)
    assert 16 <= len(computed) <= 24 and set(computed[::2]) == {torch.bfloat16}  # measured once, in turn


def test_what_a_cpu_computes_for_others_does_not_count(clock):
    """Which of the two has to wait for them is chance."""
    took, computed, around = clock
    took.update({torch.bfloat16: [0.001] * 30, torch.float32: [0.002] * 30})
    around["others"] = itertools.cycle([0.015, 0.0, 0.011, 0.0])  # bf16 always waits
    assert cpu_speed("bf16") == pytest.approx(2)
    assert len(computed) >= 8


@pytest.mark.parametrize(
    ("bf16", "fp32", "speed"),
    [
        ([0.0001, 0.0002, 0.0003, 0.0004] * 8, [0.00018, 0.0003, 0.0005, 0.0005] * 8, 1.8),  # often enough the same
        ([0.001, *[0.003] * 30], [0.002] * 31, None),  # once twice as fast, else slower
        ([0.001, 0.0011] * 16, [0.00118, 0.00125] * 16, 1.18),  # as good as alike, which is no scatter
        ([0.001, *[0.004] * 30], [0.010, *[0.016] * 30], 10),  # uneven, and faster whatever is taken
    ],
)
def test_times_that_scatter_too_much_are_no_advice(clock, monkeypatch, bf16, fp32, speed):
    took, _, _ = clock
    took.update({torch.bfloat16: [0.0, *bf16], torch.float32: [0.0, *fp32]})
    found = cpu_speed("bf16")
    assert math.isnan(found) if speed is None else found == pytest.approx(speed)
    if speed is None:
        assert note("bf16", CPU) is None and not _bf16_is_faster()
        page = Findings()
        monkeypatch.setattr(precisions, "AUTOCAST", {"bf16": torch.bfloat16})
        software.precisions(page)
        assert "not known" in str(page.sections)


def test_a_very_slow_precision_is_tried_twice(clock):
    took, computed, _ = clock
    took.update({torch.float16: [0.4, 0.3, 0.31], torch.float32: [0.1, 0.003, 0.003]})
    assert cpu_speed("fp16") == pytest.approx(0.01)
    assert computed == [torch.float16, torch.float32] * 3


def test_a_cpus_speed_is_measured_and_draws_no_random_number():
    cpu_speed.cache_clear()
    before = torch.get_rng_state()
    with torch.inference_mode():
        speeds = [cpu_speed(precision) for precision in ("bf16", "fp16")]
    assert all(math.isnan(speed) or 1e-5 < speed < 100 for speed in speeds)  # nan on a busy machine
    assert torch.equal(before, torch.get_rng_state())


def test_on_a_cpu_tf32_is_fp32_and_the_run_says_so(tmp_path):
    words = ["recipe=digits", "mode=single", "max_steps=3", *QUIET]
    for precision in ("fp32", "tf32"):
        done = ok(*words, f"precision={precision}", f"output={tmp_path / precision}")
        assert ("computed as fp32" in done.stdout) == (precision == "tf32")
        assert result(tmp_path / precision)["precision"] == "fp32"
    assert losses(tmp_path / "fp32") == losses(tmp_path / "tf32")


@pytest.mark.parametrize(
    ("deterministic", "exact", "races"), [(False, None, True), (True, None, False), (False, "1", False)]
)
def test_cudnns_kernels_race_unless_losses_are_compared(switches, monkeypatch, deterministic, exact, races):
    monkeypatch.delenv("TRAINER_EXACT", raising=False)
    if exact:
        monkeypatch.setenv("TRAINER_EXACT", exact)
    try:
        seed_everything(0, deterministic)
        assert torch.backends.cudnn.benchmark is races
    finally:
        torch.use_deterministic_algorithms(False)
