"""The mode dp: the samples of each device, and the message if it passes through."""

import re

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.simulated.simcuda import simulated
from tests.strategies import CPU, staged
from trainer.data import Batch
from trainer.recipe.shares import split_rows


def parallel(
    drives,
    rows=10,
    model=None,
    words="channels_last=false",
    shape=(1, 2, 2),
):
    """Return the mode on some devices; its model accepts (N, 1, 2, 2) and has 3 classes."""
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    return staged(model, drives, f"mode=dp {words}", (rows, *shape), classes=3)


@pytest.mark.parametrize(
    ("rows", "devices", "expected"),
    [
        (30, 2, [15, 15]),
        (10, 2, [5, 5]),
        (30, 3, [10, 10, 10]),
        (2, 3, [1, 1]),  # A device stays idle.
    ],
)
def test_rows_of_devices(rows, devices, expected):
    assert split_rows(rows, devices) == expected


@pytest.mark.parametrize(
    ("drives", "rows", "says"),
    [
        (1, 10, r"\b2 GPUs .*\b5\+5\b"),
        (2, 30, r"\b2 GPUs .*\b15\+15\b"),
        (3, 2, r"\b3 GPUs .*\b1\+1\b"),
    ],
)
def test_dp_without_cuda_reports_pass_through(drives, rows, says):
    strategy = parallel((CPU,) * drives, rows)
    note = strategy.notes()["note"]
    assert re.search(says, note) and "mode=ddp" in note
    assert strategy.result_fields() == {"data_parallel": {"devices": 1, "pass_through": True}}
    assert strategy.notes()["shapes"] == (
        f"in ({rows}, 1, 2, 2) outside, ({rows}, 1, 2, 2) inside; out ({rows}, 3) inside, ({rows}, "
        "3) outside"
    )


def test_the_look_at_the_shapes_leaves_no_trace():
    model = nn.Sequential(
        nn.BatchNorm2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = parallel((CPU, CPU), 10, model).module
    assert model[0].num_batches_tracked == 0 and not model._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("cards", [1, 2])
def test_weights_that_each_pass_reorders_are_reported(cards, channels_last):
    """The weights are those of copies: `nn.DataParallel` copies them as one flat tensor."""
    orders = []

    def look(module, inputs, output):
        if isinstance(module, nn.Conv2d):
            orders.append(module.weight.is_contiguous(memory_format=torch.channels_last))

    with simulated(cards) as machine:
        drives = tuple(torch.device("cuda", index) for index in range(cards))
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Flatten(),
            nn.Linear(4, 3),
        )
        # A counter in a hook of the model would be restored.
        hook = register_module_forward_hook(look)
        strategy = parallel(drives, 4, model, f"channels_last={channels_last}", shape=(3, 3, 3))
        hook.remove()
        assert len(orders) == cards and machine.errors == []
    assert ("reorders" in strategy.notes()["note"]) == (channels_last and not all(orders))
    assert not channels_last or orders.count(True) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("cards", [1, 2, 3])
def test_rows_reach_the_gpus(cards):
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} CUDA devices")
    drives = tuple(torch.device("cuda", index) for index in range(cards))
    strategy = parallel(drives, 30)
    assert strategy.result_fields() == {"data_parallel": {"devices": cards, "pass_through": False}}
    assert "for comparison" in strategy.notes()["note"]
    inside = re.search(r"outside, (.*) inside; out", strategy.notes()["shapes"])[1]
    assert inside == ", ".join([f"({30 // cards}, 1, 2, 2)"] * cards)
    inputs = torch.randn(2, 1, 2, 2, device=drives[0])
    targets = torch.tensor([0, 1], device=drives[0])
    # Fewer rows than three devices.
    loss = strategy.forward_backward(Batch(inputs, targets, 2), 1 / 2)
    whole = nn.functional.cross_entropy(strategy.module(inputs), targets)
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-4, atol=1e-4)
