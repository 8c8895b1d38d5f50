"""TF32, fp32 and 16 bits: what torch is told, what a CPU makes of it, and what is said of it."""

import pytest
import torch

from tests.commands import QUIET, losses, ok, result
from trainer.devices import precision as precisions
from trainer.devices.precision import computed_in, cpu_speed, set_precision, told
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
    assert computed_in("tf32", CPU) == "fp32" and "this device has no TF32" in told("tf32", CPU)
    assert told("fp32", CPU) == "fp32" and told("bf16", CPU) == computed_in("bf16", CPU) == "bf16"
    for capability, found in (((8, 0), "tf32"), ((7, 5), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert computed_in("tf32", AMPERE) == found
        assert ("precision=tf32" in told("fp32", AMPERE)) == (found == "tf32")


@pytest.mark.parametrize(("speed", "times"), [(1.6, None), (0.9, None), (0.65, "1.5 times"), (0.008, "125.0 times")])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_cpu_that_is_slower_in_16_bits_is_told(monkeypatch, precision, speed, times):
    monkeypatch.setattr(precisions, "cpu_speed", lambda asked: speed if asked == precision else None)
    said = f"{precision}: precision=fp32 is {times} as fast in convolutions on this processor"
    assert told(precision, CPU) == (said if times else precision)
    assert told(precision, AMPERE) == precision and told("fp32", CPU) == "fp32"


@pytest.fixture
def clock(monkeypatch):
    """A clock that only convolutions move, by so many seconds each; yields them and a list of what was computed."""
    now, took, computed = [0.0], {}, []

    def convolution(kind):
        def compute():
            computed.append(kind)
            now[0] += took[kind][computed.count(kind) - 1]

        return compute

    monkeypatch.setattr(precisions, "_convolution", convolution)
    monkeypatch.setattr(precisions.time, "perf_counter", lambda: now[0])
    cpu_speed.cache_clear()
    yield took, computed
    cpu_speed.cache_clear()


def test_a_cpus_speed_is_that_of_the_fastest_convolutions(clock):
    took, computed = clock
    took[torch.bfloat16] = [9, 0.006, 0.004, *[0.005] * 9]  # the first finds its kernels, others are disturbed
    took[torch.float32] = [7, 0.003, 0.002, *[0.003] * 9]
    assert cpu_speed("bf16") == cpu_speed("bf16") == pytest.approx(0.5)
    assert 6 <= len(computed) <= 12 and set(computed[::2]) == {torch.bfloat16}  # measured once, in turn


def test_a_very_slow_precision_is_tried_twice(clock):
    took, computed = clock
    took.update({torch.float16: [0.4, 0.3], torch.float32: [0.1, 0.003]})
    assert cpu_speed("fp16") == pytest.approx(0.01)
    assert computed == [torch.float16, torch.float32] * 2


def test_a_cpus_speed_is_measured_and_draws_no_random_number():
    cpu_speed.cache_clear()
    before = torch.get_rng_state()
    with torch.inference_mode():
        speeds = [cpu_speed(precision) for precision in ("bf16", "fp16")]
    assert all(1e-5 < speed < 100 for speed in speeds)
    assert torch.equal(before, torch.get_rng_state())


def test_on_a_cpu_tf32_is_fp32_and_the_run_says_so(tmp_path):
    words = ["recipe=digits", "mode=single", "max_steps=3", *QUIET]
    for precision in ("fp32", "tf32"):
        done = ok(*words, f"precision={precision}", f"output={tmp_path / precision}")
        assert ("computed as fp32: this device has no TF32" in done.stdout) == (precision == "tf32")
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
