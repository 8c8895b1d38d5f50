"""Inject faults into a run, for tests.

`TRAINER_FAULT` is `kind@rank:step` or `kind@save:point`, or several of these separated by commas.

Kinds are `kill` (SIGKILL), `hang` (sleep for days), `nan` (the inputs of a step become NaN), `oom`
(raise a MemoryError) and `full` (raise the OSError of a full disk). Points of the checkpoint writer
are `tmp`, `write`, `fsync`, `rename` and `prune`; `save#1` instead of `save` selects rank 1.
Instead of a step, `trial-4` selects the measurement of a pipeline with 4 micro-batches. A job that
torchrun has restarted has no faults, so that a test can observe its recovery. If the variable is
not set, `is_active` is False, and call sites test this flag only.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

is_active = (
    bool(os.environ.get("TRAINER_FAULT"))
    and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
)


def is_at_step() -> bool:
    """Return whether the first requested fault is at a training step or trial, not at a save."""
    return is_active and not os.environ["TRAINER_FAULT"].partition("@")[2].startswith("save")


def inject(inputs: Tensor, step: int) -> None:
    """Trigger the fault before training step `step` of this rank, if one is requested.

    Args:
        inputs: inputs of the step, which the fault `nan` overwrites.
        step: number of the step that follows.
    """
    if trigger(os.environ.get("RANK", "0"), step):
        inputs.fill_(math.nan)


def trigger(place: object, moment: object) -> bool:
    """Trigger the fault that is requested for a place and a moment, if any.

    Args:
        place: rank, or "save".
        moment: training step, "trial-" with a number of micro-batches, or point of the checkpoint
            writer.

    Returns:
        Whether the caller must trigger the fault itself, because its kind is `nan`.
    """
    here = (f"{place}:{moment}", f"{place}#{os.environ.get('RANK', '0')}:{moment}")
    kind = None
    for request in os.environ.get("TRAINER_FAULT", "").split(","):
        requested_kind, _, where = request.partition("@")
        if where in here:
            kind = requested_kind
            break
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1e6)
    if kind == "oom":
        raise MemoryError("out of memory (TRAINER_FAULT)")
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device (TRAINER_FAULT)")
    return kind == "nan"
