"""Checks of the cards before a run is built."""

from types import SimpleNamespace

import pytest
import torch

from trainer import train
from trainer.devices.precision import AUTOCAST
from trainer.distributed.world import World
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.training import reporting, setup

NAMES = {0: "NVIDIA A100-SXM4-80GB", 1: "Tesla T4", 2: "NVIDIA A100-SXM4-80GB"}


@pytest.fixture
def mixed(monkeypatch):
    """A world that drives cards of a machine with an A100, a T4 and an A100."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAMES[device.index])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device: (7, 5) if device.index == 1 else (8, 0),
    )

    def make(*indices):
        drives = tuple(torch.device("cuda", index) for index in indices)
        return World(
            Place(),
            drives[0],
            1,
            tuple(map(str, drives)),
            drives,
        )

    return make


def test_the_peak_is_that_of_every_card_together(mixed):
    model = torch.nn.Linear(4, 2)
    data = SimpleNamespace(example=lambda rows: SimpleNamespace(shape=(rows, 4)))

    def peak(precision, *indices):
        return setup.compute_utilisation_base(
            model,
            data,
            setup.describe_devices(mixed(*indices), precision),
        )[0]

    assert peak("fp16", 0, 1) == pytest.approx((312 + 65) * 1e12)
    assert peak("fp16", 1) == pytest.approx(65e12)
    assert peak("fp16", 0, 2) == pytest.approx(624e12)
    assert peak("bf16", 0, 1) is None
    facts = SimpleNamespace(peak_flops=peak("fp16", 0, 1), training_flops=3 * 10**9)
    assert reporting._compute_mfu(facts, 1000.0) == pytest.approx(3e12 / 377e12)
    base = setup.compute_utilisation_base(model, data, setup.describe_devices(mixed(0), "fp16"))
    # Forward and the weight's gradient are left, of inputs that need none.
    model.bias.requires_grad_(False)
    frozen = setup.compute_utilisation_base(model, data, setup.describe_devices(mixed(0), "fp16"))
    assert (base[1], frozen[1]) == (3 * 2 * 4 * 2, 2 * 2 * 4 * 2)
    cpu = World(Place(), torch.device("cpu"), 1, ("cpu:0",))
    assert setup.compute_utilisation_base(model, data, setup.describe_devices(cpu, "bf16")) == (
        None,
        0,
    )


@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])
def test_a_cpu_without_instructions_for_a_precision_is_named(
    capability, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    words = ["data.samples=32", "data.val_samples=16", "data.image_size=8", "model.name=mlp"]
    words += ["batch_size=16", "epochs=1", "data.name=synthetic", "mode=single", "seed=0"]
    for precision in ("fp32", "bf16", "fp16"):
        train(load(None, *words, f"precision={precision}", f"output={tmp_path / precision}"))
        lines = capsys.readouterr().out
        is_slow = capability == "AVX2" and precision in AUTOCAST
        assert ("emulated" in lines and "use precision=fp32" in lines) == is_slow


def test_whether_a_card_emulates_bf16_is_known(mixed):
    assert not any(emulates for _, emulates in setup.describe_devices(mixed(0, 1), "fp16").values())
    assert [emulates for _, emulates in setup.describe_devices(mixed(0, 1), "bf16").values()] == [
        False,
        True,
    ]
