"""A simulated host and device, whose clocks advance only as a test tells them to."""

import torch

from trainer.telemetry import clocks


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.now)


class Device:
    """A stream that works in order: an event on it is reached when all work before it is done."""

    def __init__(self, clock, monkeypatch):
        self.clock = clock
        self.free = clock.now
        self.starved = 0.0  # seconds in which it had nothing to do
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = max(device.clock.now, device.free)

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(clocks, "synchronise", lambda devices: self.synchronise())

    def work(self, seconds):
        self.starved += max(0.0, self.clock.now - self.free)
        self.free = max(self.clock.now, self.free) + seconds

    def synchronise(self):
        self.clock.now = max(self.clock.now, self.free)


def play(timer, clock, device, steps, window, pieces=1):
    """Run steps of ten kernels, each with seconds of the host to issue one, of the device for one,
    and of reading.

    Return the seconds in which the device waited for anything except data.
    """
    for number, (issue, work, reading) in enumerate(steps, 1):
        waited = 0.0
        for _ in range(pieces):
            timer.ask()
            idle = max(device.free, clock.now)
            clock.now += reading / pieces
            waited += timer.arrive()
            device.starved -= max(0.0, clock.now - idle)
            for _ in range(8 // pieces):
                clock.now += issue
                device.work(work)
        timer.update()
        for _ in range(2):
            clock.now += issue
            device.work(work)
        timer.step(waited)
        if number % window == 0:
            timer.stop()
    return device.starved


HOST = (0.003, 0.001, 0.0)


BOTH = (0.0009, 0.001, 0.0)


DEVICE = (0.0002, 0.001, 0.0)


LATE = (0.003, 0.001, 0.05)
