"""Captures on the stand-ins, a tape and simulated cards: errors of a real card are detected, and
valid work is not.
"""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from tests.simulated.simcuda import simulated
from tests.simulated.tape import CpuRecorder, is_recording
from trainer.devices.cuda_graphs import NotCapturable, StepRecorder


@pytest.fixture(params=["tape", "cards"])
def recorder(request):
    if request.param == "tape":
        yield CpuRecorder(torch.device("cpu"))
    else:
        with simulated(1) as machine:
            recorder = StepRecorder(torch.device("cuda", 0))
            yield recorder
            assert {error.partition(":")[0] for error in machine.errors} == getattr(
                recorder, "expected", set()
            )


@pytest.fixture
def x(recorder):
    return torch.ones(2, device=recorder.device)


def test_a_replay_computes_on_the_same_memory_without_python(recorder, x):
    number = [2.0]
    calls = []

    def work():
        calls.append(is_recording())
        # Numbers of the host are constants.
        return x.mul_(number[0]).sum() + torch.tensor(number[0])

    replay, out = recorder.record(work)
    assert x.tolist() == [1.0] * 2
    assert out.isnan()
    assert calls == [True]
    assert not is_recording()
    number[0] = 9.0
    replay()
    assert x.tolist() == [2.0] * 2 and out == 6
    x.fill_(5.0)
    replay()
    assert out == 22 and len(calls) == 1


def test_an_address_is_one_whatever_becomes_of_its_tensor(recorder, x):
    weight = nn.Parameter(x)
    replay, out = recorder.record(lambda: weight.detach() * 3)
    there = weight.data
    weight.data = torch.full_like(x, 7.0)
    there.fill_(2.0)
    replay()
    assert out.tolist() == [6.0, 6.0]


def test_memory_that_nobody_holds_goes_to_a_later_recording(recorder, x):
    first, created = recorder.record(lambda: x * 2)
    kept = [created]
    second, out = recorder.record(lambda: kept[0] + 1)
    first()
    second()
    assert out.tolist() == [3.0, 3.0]
    del created
    kept.clear()
    third, _ = recorder.record(lambda: x * 5)
    for replay in (first, third, second):
        replay()
    recorder.expected = {"POOL"}
    assert out.isnan().all(), "nobody held what the first one made when the third one was recorded"


def test_gradients_stay_where_they_are(recorder, x):
    weight = nn.Parameter(torch.ones_like(x))

    def passes():
        loss = (weight * x).pow(2).sum()
        loss.backward()
        return loss.detach()

    replay, loss = recorder.record(passes)
    for value in (1.0, 3.0):
        x.fill_(value)
        replay()
        assert loss == 2 * value**2
        assert weight.grad.tolist() == [2 * value**2] * 2


def test_random_numbers_go_on(recorder, x):
    def drawn():
        torch.manual_seed(3)
        torch.cuda.manual_seed_all(3)
        return torch.rand_like(x).tolist()

    expected = [drawn(), *(torch.rand_like(x).tolist() for _ in range(2))]
    actual = [drawn()]
    replay, out = recorder.record(lambda: torch.rand_like(x))
    for _ in range(2):
        replay()
        actual.append(out.tolist())
    assert actual == expected


WAITS = [
    torch.Tensor.item,
    torch.Tensor.tolist,
    bool,
    lambda one: torch.equal(one, one),
    torch.nonzero,
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_refused_and_rehearsed(wait, recorder):
    one = torch.ones(1, device=recorder.device)
    with recorder.collect_waits() as waits:
        one + 1
    assert waits == []
    with recorder.collect_waits() as waits:
        wait(one)
    assert len(waits) >= 1 and __file__ in waits[0]
    with pytest.raises(NotCapturable, match="capturing"):
        recorder.record(lambda: (one.add_(1), wait(one)))
    assert one.tolist() == [1.0]
    replay, out = recorder.record(lambda: one + torch.ones_like(one))
    replay()
    assert out.tolist() == [2.0]


def test_an_error_of_another_kind_leaves_nothing_behind_either(recorder, x):
    def work():
        with suppress(RuntimeError):
            x.add_(1).sum().item()
        raise ValueError

    with pytest.raises(NotCapturable, match="ValueError"):
        recorder.record(work)
    assert x.tolist() == [1.0, 1.0]
    assert torch.rand_like(x).mean() > 0


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_the_host_are_refused(draw, recorder):
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(NotCapturable, match="random"):
        recorder.record(draw)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_recording_puts_back_what_an_earlier_one_made(recorder, x):
    replay, out = recorder.record(lambda: x * 2)
    replay()
    recorder.record(lambda: out.mul_(3))
    assert out.tolist() == [2.0, 2.0]


def test_a_closed_recorder_replays_nothing(recorder, x):
    replay, _ = recorder.record(lambda: x + 1)
    recorder.close()
    with pytest.raises(AssertionError):
        replay()
