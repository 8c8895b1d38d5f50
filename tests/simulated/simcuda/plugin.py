"""A whole command on simulated cards: `plugin=tests.simulated.simcuda.plugin`.

TRAINER_TEST_CARDS=2 says how many there are, and TRAINER_TEST_MEMORY of how many bytes. With
TRAINER_TEST_HUNG=1:3 what rank 1's card is given after step 3 never ends, as under a driver that
has lost it.
"""

from __future__ import annotations

import os

from tests.simulated.simcuda.machine import Card
from tests.simulated.simcuda.stubs import simulated
from trainer.telemetry.clocks import StepTimer

card = Card(size=int(os.environ.get("TRAINER_TEST_MEMORY", 80 << 30)))
cards = simulated([card] * int(os.environ.get("TRAINER_TEST_CARDS", "2")))
machine = cards.__enter__()

rank, _, after = os.environ.get("TRAINER_TEST_HUNG", "").partition(":")
if rank == os.environ.get("RANK", "0"):
    plain = StepTimer.step

    def step(timer: StepTimer, waited: float) -> None:
        plain(timer, waited)
        if timer.seen + len(timer._pending) == int(after):
            machine.order.hung.add(machine.here.device)

    StepTimer.step = step  # type: ignore[method-assign]
