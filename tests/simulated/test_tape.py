"""The stand-in for CUDA graphs itself: what is wrong on a card is found, and what is right is not called wrong."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.simulated.tape import CpuRecorder, is_recording
from trainer.devices.cuda_graphs import NotRecorded

CPU = torch.device("cpu")


@pytest.fixture
def recorder():
    return CpuRecorder(CPU)


def test_a_replay_computes_on_the_same_memory_without_python(recorder):
    x, calls = torch.ones(3), []

    def work():
        calls.append(is_recording())
        return x.mul_(2).sum()

    replay, out = recorder.record(work)
    assert x.tolist() == [1.0] * 3 and out.isnan() and calls == [True] and not is_recording()
    replay()
    assert x.tolist() == [2.0] * 3 and out == 6
    x.fill_(5.0)
    replay()
    assert out == 30 and len(calls) == 1 and recorder.replays == 2


def test_what_the_host_makes_is_a_constant(recorder):
    x, number = torch.ones(()), [2.0]
    replay, out = recorder.record(lambda: x * number[0] + torch.tensor(number[0]))
    number[0] = 9.0
    replay()
    assert out == 4


def test_an_address_is_one_whatever_becomes_of_its_tensor(recorder):
    weight = nn.Parameter(torch.ones(2))
    replay, out = recorder.record(lambda: weight.detach() * 3)
    there, weight.data = weight.data, torch.full((2,), 7.0)
    there.fill_(2.0)
    replay()
    assert out.tolist() == [6.0, 6.0]


def test_memory_that_nobody_holds_is_rubbish_and_given_to_a_later_recording(recorder):
    x, kept = torch.ones(2), []

    def work():
        inner = x + 1
        kept.append(inner.detach())
        return inner * 2

    first, out = recorder.record(work)
    first()
    assert out.tolist() == [4.0, 4.0] and kept[0].tolist() == [2.0, 2.0]
    second, _ = recorder.record(lambda: x + 1)
    first()
    second()
    assert out.tolist() == [4.0, 4.0], "someone holds it"
    (pointer,) = (tensor for tensor in recorder.pool.made.values() if tensor.data_ptr() == kept[0].data_ptr())
    kept.clear()
    third, _ = recorder.record(lambda: x + 1)
    first()
    third()
    assert pointer.isnan().all(), "nobody held it when the third recording began"


def test_a_gradient_stays_where_it_is(recorder):
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2)
    replay, loss = recorder.record(
        lambda: (lambda loss: (loss.backward(), loss.detach())[1])((weight * x).pow(2).sum())
    )
    for value in (1.0, 3.0):
        x.fill_(value)
        replay()
        assert loss == 2 * value**2 and weight.grad.tolist() == [2 * value**2] * 2


def test_random_numbers_go_on(recorder):
    torch.manual_seed(3)
    wanted = [torch.randn(4) for _ in range(3)]
    torch.manual_seed(3)
    first = torch.randn(4)
    replay, out = recorder.record(lambda: torch.randn(4))
    found = [first]
    for _ in range(2):
        replay()
        found.append(out.clone())
    assert torch.equal(torch.stack(found), torch.stack(wanted))


@pytest.mark.parametrize(
    "wait",
    [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, bool, lambda x: torch.equal(x, x), torch.nonzero],
)
def test_a_wait_is_refused_and_rehearsed(wait, recorder):
    x = torch.ones(1)
    with recorder.rehearsal() as waits:
        x + 1
        wait(x)
    assert len(waits) >= 1 and __file__ in waits[0]
    with pytest.raises(NotRecorded, match="capturing"):
        recorder.record(lambda: (x.add_(1), wait(x)))
    assert x.tolist() == [1.0] and recorder.recordings == []


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_the_host_are_refused(draw, recorder):
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(NotRecorded, match="random"):
        recorder.record(draw)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_recording_puts_back_what_an_earlier_one_made(recorder):
    replay, out = recorder.record(lambda: torch.ones(2) * 2)
    replay()
    recorder.record(lambda: out.mul_(3))
    assert out.tolist() == [2.0, 2.0]


def test_nothing_is_replayed_once_it_is_closed(recorder):
    replay, _ = recorder.record(lambda: torch.ones(2))
    recorder.close()
    with pytest.raises(AssertionError):
        replay()
