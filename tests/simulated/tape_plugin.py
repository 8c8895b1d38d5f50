"""A whole command on a CPU with graphs: `plugin=tests.simulated.tape_plugin`.

TRAINER_TEST_WARM=2 says how many steps are launched before one is recorded. With
TRAINER_TEST_REPLAYS=folder each rank leaves there a file of its number, with a byte for each
replay.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.simulated.tape import CpuRecorder, Recording, graphs_on_the_cpu, without_modes
from tests.training import graphed_runs  # The import registers models.
from trainer.modes import gradient_buckets
from trainer.modes.fsdp_units import Order
from trainer.training import step_graphs


class Counted(CpuRecorder):
    def _replay(self, recording: Recording) -> None:
        super()._replay(recording)
        if folder := os.environ.get("TRAINER_TEST_REPLAYS"):
            with (Path(folder) / os.environ.get("RANK", "0")).open("ab") as file:
                file.write(b".")


compare_order = Order.compare


def compare_on_the_host(order: Order, *given: Any) -> None:
    """Compare tensors of the host, which are no device's where the CPU is a device, either."""
    with without_modes():
        compare_order(order, *given)


Order.compare = compare_on_the_host  # type: ignore[assignment, method-assign]
# The models are small, and have about a dozen buckets of these sizes.
gradient_buckets.FIRST_BUCKET = 64
gradient_buckets.BUCKET = 1024
step_graphs.WARMUP_STEPS = int(os.environ.get("TRAINER_TEST_WARM", graphed_runs.WARM))
on_the_cpu = graphs_on_the_cpu(Counted)
on_the_cpu.__enter__()
