"""The simulated devices themselves: what is wrong on a GPU is found, and what is right is not
called wrong.
"""

import threading
import time

import pytest
import torch
from torch import nn

from tests.simulated.simcuda import simulated


@pytest.fixture
def machine():
    with simulated(2) as machine:
        yield machine


def one_wrong(machine, kind):
    assert len(machine.errors) == 1 and machine.errors[0].startswith(kind), machine.errors


# Order.


def test_a_stream_that_reads_what_another_writes_without_waiting(machine):
    x = torch.ones(4, device="cuda:0")
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        x + 1
    one_wrong(machine, "RACE: aten.add.Tensor")


def test_a_write_after_another_streams_read(machine):
    x = torch.ones(4, device="cuda:0")
    side = torch.cuda.Stream("cuda:0")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x.add_(1)
    one_wrong(machine, "RACE: aten.add_.Tensor")


@pytest.mark.parametrize("way", ["stream", "event", "host", "host event", "host item"])
def test_whoever_waits_may_read(machine, way):
    x = torch.ones(4, device="cuda:0")
    side = torch.cuda.Stream("cuda:0")
    if way == "stream":
        side.wait_stream(torch.cuda.current_stream())
    elif way == "event":
        side.wait_event(torch.cuda.current_stream().record_event())
    elif way == "host":
        torch.cuda.synchronize()
    elif way == "host event":
        torch.cuda.current_stream().record_event().synchronize()
    else:
        x.sum().item()
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    assert y.tolist() == [2.0] * 4 and machine.errors == []


def test_a_wait_for_an_event_that_is_recorded_too_early_is_none(machine):
    x = torch.ones(4, device="cuda:0")
    side = torch.cuda.Stream("cuda:0")
    early = torch.cuda.current_stream().record_event()
    x.mul_(2)
    side.wait_event(early)
    with torch.cuda.stream(side):
        x + 1
    one_wrong(machine, "RACE")


def test_the_backward_pass_is_seen(machine):
    weight = torch.ones(4, device="cuda:0", requires_grad=True)
    loss = (weight * weight).sum()
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        loss.backward()
    assert any("RACE" in error for error in machine.errors)


# The allocator.


def reused(record):
    with simulated(1) as machine:
        x = torch.ones(4, device="cuda:0")
        side = torch.cuda.Stream("cuda:0")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        if record:
            x.record_stream(side)
        del x
        torch.zeros(4, device="cuda:0")
        return machine.errors


def test_memory_that_another_stream_may_still_use_is_not_reused():
    (error,) = reused(record=False)
    assert error.startswith("REUSE: ") and "no record_stream" in error
    assert reused(record=True) == []


def test_memory_is_counted_a_device(machine):
    x = torch.zeros(1024, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == 0 and torch.cuda.memory_allocated(1) == 4096
    del x
    assert torch.cuda.memory_allocated(1) == 0 and torch.cuda.max_memory_allocated("cuda:1") == 4096
    assert torch.cuda.memory_reserved(1) == 4096
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.memory_reserved(1) == torch.cuda.max_memory_allocated(1) == 0


# Devices.


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: x + torch.ones(4, device="cuda:1"),
        lambda x: torch.stack([x, torch.ones(4)]),
        lambda x: x.sum() + torch.ones((), device="cuda:1"),
        lambda x: torch._foreach_add([x, x], [x, torch.ones(4)]),
    ],
)
def test_tensors_of_two_devices_do_not_mix(machine, mix):
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(4, device="cuda:0"))


def test_numbers_of_the_host_may_go_along(machine):
    x = torch.ones(4, device="cuda:0")
    assert (x * torch.tensor(2.0) + 1).is_cuda
    assert x[torch.tensor([0, 1])].is_cuda
    torch._foreach_add_([x, torch.ones(4, device="cuda:1")], 1.0)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.ones(1, device="cuda:2")


def test_a_generator_a_device(machine):
    torch.manual_seed(3)
    one, two = (torch.randn(4, device=f"cuda:{k}").cpu() for k in (0, 1))
    assert torch.equal(one, two)
    state = torch.cuda.get_rng_state("cuda:1")
    host = torch.get_rng_state()
    drawn = nn.functional.dropout(torch.ones(99, device="cuda:1")).cpu()
    assert torch.equal(host, torch.get_rng_state())
    assert not torch.equal(state, torch.cuda.get_rng_state("cuda:1"))
    torch.cuda.set_rng_state(state, "cuda:1")
    assert torch.equal(drawn, nn.functional.dropout(torch.ones(99, device="cuda:1")).cpu())
    assert torch.equal(torch.cuda.get_rng_state(0), state)  # both have drawn four numbers by then


def test_autocast_is_a_threads_own_and_begins_with_fp16(machine):
    weight = torch.ones(2, 2, device="cuda:0")
    collected = {}

    def work(name):
        with torch.autocast("cuda"):
            collected[name] = (weight @ weight).dtype

    with torch.autocast("cuda", torch.bfloat16):
        collected["here"] = (weight @ weight).dtype
        thread = threading.Thread(target=work, args=["thread"])
        thread.start()
        thread.join()
    assert collected == {"here": torch.bfloat16, "thread": torch.float16}
    assert (weight @ weight).dtype is torch.float32 and not torch.is_autocast_enabled("cpu")


# The host.


def test_copies_to_pinned_memory_arrive_when_the_host_waits(machine):
    x = torch.ones(4, device="cuda:0")
    pinned = torch.empty(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.is_pinned() and pinned.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == [1.0] * 4


def test_pinned_memory_is_not_written_while_it_is_copied(machine):
    pinned = torch.ones(4).pin_memory()
    pinned.to("cuda:0", non_blocking=True)
    pinned.add_(1)
    one_wrong(machine, "HOST")
    torch.cuda.synchronize()
    pinned.add_(1)
    assert len(machine.errors) == 1


def test_an_event_is_timed_once_it_is_complete(machine):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(4, device="cuda:0")
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="not complete"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="never recorded"):
        begin.elapsed_time(torch.cuda.Event(enable_timing=True))


def test_a_simulation_leaves_nothing_behind():
    def state():
        return (
            torch.cuda.device_count,
            time.perf_counter,
            threading.Thread.run,
            torch.set_autocast_enabled,
        )

    before = state()
    with simulated(3):
        assert torch.cuda.device_count() == 3 and not set(before) & set(state())
    assert before == state()
