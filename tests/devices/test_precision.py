"""TF32, fp32 and 16 bits: the settings of torch, their effect on a CPU, and the messages."""

import pytest
import torch

from tests.command_line import QUIET, losses, ok, result
from trainer.devices.precision import describe_precision, resolve_precision, set_precision
from trainer.training.randomness import seed_everything

AMPERE = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def switches():
    yield
    # torch's own.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = (
        False,
        True,
    )
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


def test_the_precision_of_a_device_is_reported(monkeypatch):
    assert resolve_precision("tf32", CPU) == "fp32"
    assert describe_precision("fp32", CPU) is describe_precision("bf16", CPU) is None
    assert resolve_precision("bf16", CPU) == "bf16"
    for capability, candidate in (((8, 0), "tf32"), ((7, 5), "fp32")):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _, capability=capability: capability
        )
        assert resolve_precision("tf32", AMPERE) == candidate
        assert ("precision=tf32" in (describe_precision("fp32", AMPERE) or "")) == (
            candidate == "tf32"
        )


@pytest.mark.slow
def test_on_a_cpu_tf32_is_fp32_and_the_run_says_so(tmp_path):
    words = ["recipe=digits", "mode=single", "max_steps=3", *QUIET]
    for precision in ("fp32", "tf32"):
        completed = ok(*words, f"precision={precision}", f"output={tmp_path / precision}")
        assert ("precision=tf32 does nothing" in completed.stdout) == (precision == "tf32")
        assert result(tmp_path / precision)["precision"] == "fp32"
    assert losses(tmp_path / "fp32") == losses(tmp_path / "tf32")


@pytest.mark.parametrize(
    ("deterministic", "exact", "races"),
    [(False, None, True), (True, None, False), (False, "1", False)],
)
def test_cudnns_kernels_race_unless_losses_are_compared(
    switches, monkeypatch, deterministic, exact, races
):
    monkeypatch.delenv("TRAINER_EXACT", raising=False)
    if exact:
        monkeypatch.setenv("TRAINER_EXACT", exact)
    try:
        seed_everything(0, deterministic)
        assert torch.backends.cudnn.benchmark is races
    finally:
        torch.use_deterministic_algorithms(False)
