"""A whole command on simulated cards with a separate communicator:
`plugin=tests.simulated.two_communicators`.

Tensors of cards and barriers go through the card's group, which does as NCCL does: the host does
not wait for it, it hears nothing of a peer that died, and a watchdog aborts the process once a call
has waited for longer than its timeout. All else goes through the host's group. Both are gloo's.

TRAINER_TEST_LEAVES="card stop" has rank 1 leave after step 3, at its next call to the card's group
(or the host's): it is stopped or killed there, or its card hangs. From then on a call to the card's
group is never done.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from tests.simulated.simcuda.plugin import machine
from trainer.telemetry.clocks import StepTimer

STEP = 3
where, how = os.environ.get("TRAINER_TEST_LEAVES", "nowhere ").split(" ")
leaves = os.environ.get("RANK") == "1"


class Card:
    """The card's communicator. `begun`: when the call that it waits in began."""

    lost = False
    begun = None
    timeout = float("inf")

    def join(self, *arguments, **options):
        init(*arguments, **options)
        self.group = new_group(backend="gloo")
        threading.Thread(target=self.watch, daemon=True).start()

    def set_timeout(self, timeout):
        self.timeout = timeout.total_seconds()

    def watch(self):
        while self.begun is None or time.monotonic() - self.begun < self.timeout:
            time.sleep(0.05)
        os.abort()

    def call(self, function, *arguments, **options):
        self.begun = time.monotonic()
        if self.lost:
            machine.order.hung.add(machine.here.device)
        if not (self.lost and leaves):
            work = function(*arguments, **{**options, "group": self.group, "async_op": True})
        if not self.lost:
            work.wait()
            self.begun = None


card = Card()
init = dist.init_process_group
new_group = dist.new_group


def leave(place):
    if card.lost and leaves and place == where and how != "hang":
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[how])


def routed(function):
    def called(*arguments, **options):
        on_card = not arguments or machine.memory.device(arguments[0]) is not None
        leave("card" if on_card else "host")
        return (
            card.call(function, *arguments, **options)
            if on_card
            else function(*arguments, **options)
        )

    return called


def gradients(_, bucket):
    """Reduce the gradients that DDP's reducer, which is not Python, would pass to NCCL."""
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    finished = torch.futures.Future()
    finished.set_result(bucket.buffer())
    return finished


class Replica(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.register_comm_hook(None, gradients)


step = StepTimer.step


def stepped(timer, waited):
    step(timer, waited)
    card.lost = where != "nowhere" and timer.seen + len(timer._pending) >= STEP


StepTimer.step = stepped
torch.nn.parallel.DistributedDataParallel = Replica
dist.ProcessGroup._get_backend = lambda group, device: card
dist.init_process_group = card.join
for name in ("all_reduce", "broadcast", "barrier"):
    setattr(dist, name, routed(getattr(dist, name)))
