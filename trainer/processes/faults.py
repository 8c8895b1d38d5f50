"""Faults on purpose, for tests: `TRAINER_FAULT=kind@rank:step` or `kind@save:point`, or several with commas.

Kinds: `kill` (SIGKILL), `hang` (sleep for ever), `nan` (a step's inputs), `oom` and `full` (raise what
torch and the disk would). Points inside the checkpoint writer: `tmp`, `write`, `fsync`, `rename`, `prune`; `save#1` is
that of rank 1 alone. Beside steps there is `trial-4`, a pipeline's measurement of 4 micro-batches.
A job that torchrun has restarted is left alone, so that its recovery can be watched.
Unset, `active` is False and every call site is a single falsy test.
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

active = bool(os.environ.get("TRAINER_FAULT")) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def at_a_step() -> bool:
    """Whether it is a step at which something is to happen."""
    return active and not os.environ["TRAINER_FAULT"].partition("@")[2].startswith("save")


def inject(inputs: Tensor, step: int) -> None:
    """Before training step `step` of this rank: do what is asked for, to these inputs or to all."""
    if fault(os.environ.get("RANK", "0"), step):
        inputs.fill_(math.nan)


def fault(place: object, moment: object) -> bool:
    """Do what `TRAINER_FAULT` asks for, if this is the place (a rank, or "save") and the moment (a step, or a point).

    Returns True when the kind is one that the caller must act out itself (`nan`).
    """
    here = (f"{place}:{moment}", f"{place}#{os.environ.get('RANK', '0')}:{moment}")
    faults = dict(fault.partition("@")[::2][::-1] for fault in os.environ.get("TRAINER_FAULT", "").split(","))
    kind = next((kind for where, kind in faults.items() if where in here), None)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1e6)
    if kind == "oom":
        raise MemoryError("out of memory (TRAINER_FAULT)")
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device (TRAINER_FAULT)")
    return kind == "nan"
