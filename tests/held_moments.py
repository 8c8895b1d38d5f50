"""A plugin for runs that get signals: it holds them at the moment that a test asks for, until the
test has sent the signal.

`HELD_MOMENT` names the moment and `HELD_FILES` begins the names of files: each rank that is held
makes `...-RANK`, and goes on once `...-struck` exists.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP = 3  # Training step after which a run is held.
# Moments, each with a module and the name of the function there that is about to be called.
MOMENTS = {
    "training": ("trainer.training.rank_sync", "RankSync.after_step"),
    "evaluation": ("trainer.training.loop", "evaluate"),
    "saving": ("trainer.saving.saver", "write_files"),
    "start-up": ("trainer.training.loop", "prepare"),
    "predicting": ("trainer.commands.predict.predict_command", "Rows.write"),
}


def hold() -> None:
    """Wait until the test has sent its signal, at the first call in this process."""
    files = os.environ["HELD_FILES"]
    mark = Path(f"{files}-{os.environ.get('RANK', '0')}")
    if mark.exists():
        return
    mark.touch()
    while not Path(f"{files}-struck").exists():
        time.sleep(0.01)


def held(function: Callable[..., Any], moment: str) -> Callable[..., Any]:
    def hold_and_call(*given: Any, **named: Any) -> Any:
        is_early = moment == "training" and given[0].state.position.step < STEP
        if not is_early:
            hold()
        return function(*given, **named)

    return hold_and_call


if moment := os.environ.get("HELD_MOMENT"):
    module, path = MOMENTS[moment]
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, held(getattr(owner, name), moment))
