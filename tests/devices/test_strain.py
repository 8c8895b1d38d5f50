"""Conclusions from the kernel's counters, on a machine that is made of files."""

from __future__ import annotations

import os

import pytest

from trainer.devices import host
from trainer.devices.host import StrainMeter

SECOND = round(1 / host.TICK)


class Machine:
    """Two cores; this process; a neighbour. Counters by seconds."""

    def __init__(self, path, monkeypatch):
        self.proc = path / "proc"
        self.now = 0.0
        for module, name, value in (
            (host, "PROC", self.proc),
            (host.time, "perf_counter", lambda: self.now),
            (host.time, "process_time", lambda: 0.0),
            (host.os, "sched_getaffinity", lambda _: {0, 1}),
        ):
            monkeypatch.setattr(module, name, value, raising=False)
        self.after()

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def after(
        self,
        seconds=0.0,
        busy=0.0,
        own=0.0,
        peer=0.0,
        waited=0.0,
        stolen=0.0,
    ):
        """Advance the clock: the seconds that both cores were busy, that this process ran, and that
        it waited.
        """
        self.now += seconds
        core = f"{int(busy / 2 * SECOND)} 0 0 0 0 0 0 {int(stolen / 2 * SECOND)} 0 0"
        self.write(
            self.proc / "stat",
            f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {core}\ncpu1 {core}\ncpu7 {'9' * 9} {core}\n",
        )
        self.write(self.proc / "self/task/7/schedstat", f"0 {int(waited * 1e9)} 1\n")
        pid = os.getpid()
        parent = os.getppid()
        for number, above, spent in (
            (pid, parent, own / 2),
            (99999998, pid, own / 2),
            (99999997, parent, peer),
        ):
            # Times of the process, of the kernel for it, and of its ended children.
            quarters = " ".join([str(int(spent / 4 * SECOND))] * 4)
            fields = f"S {above} 0 0 0 0 0 0 0 0 99999 {quarters} 99999"
            self.write(self.proc / str(number) / "stat", f"{number} (a (b) c) {fields}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


# The process has started more threads than cores, on purpose or not.
@pytest.mark.parametrize(
    ("counters", "others"),
    [
        ({"busy": 20, "own": 8, "waited": 5}, 0.6),  # two others want both cores
        (
            {"busy": 12, "own": 10, "waited": 0},
            0.0,
        ),  # threads=1, and another program on the core that is left
        (
            {"busy": 20, "own": 20, "waited": 9},
            0.0,
        ),
        ({"busy": 20, "own": 19, "waited": 1}, 0.0),
        # Other virtual machines of the same host took the time.
        ({"busy": 10, "own": 10, "stolen": 8}, 0.4),
    ],
)
def test_cores_that_others_had(machine, counters, others):
    meter = StrainMeter(1)
    machine.after(10, **counters)
    assert meter.read().others == pytest.approx(others, abs=0.01)


@pytest.mark.parametrize(("processes", "others"), [(1, 0.6), (2, 0.2)])
def test_ranks_of_one_run_are_no_others(processes, others, machine):
    meter = StrainMeter(processes=processes)
    machine.after(10, busy=20, own=8, peer=8, waited=5)
    assert meter.read().others == pytest.approx(others, abs=0.01)


def test_a_machine_without_counters_has_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "PROC", tmp_path)
    assert StrainMeter(1).read().others == 0.0


def test_a_tick_of_another_program_is_no_load_in_a_short_time(machine):
    meter = StrainMeter(1)
    machine.after(0.05, busy=0.1, own=0, waited=0.05)
    assert meter.read().others == 0.0
