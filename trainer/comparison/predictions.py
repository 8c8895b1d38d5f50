"""What `plan` expects of each entry, from the speed of `single`: a prediction to hold against the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.comparison.entries import Entry
from trainer.errors import TrainerError
from trainer.planning import plan


def predictions(
    entries: Sequence[Entry], folders: Sequence[Path | None], words: Sequence[str] = ()
) -> dict[str, float]:
    """Images/s by entry, without those that nothing can be said of.

    Args:
        folders: a finished run of each entry, None where there is none.
    """
    source = next(
        (folder for entry, folder in zip(entries, folders, strict=True) if entry.mode == "single" and folder), None
    )
    found: dict[str, float] = {}
    for entry in entries:
        overlaps = entry.mode == "pipeline" and entry.ranks == 1  # on CPU stand-ins, stages work in turn
        if source is None or entry.mode == "single" or entry.problem or (overlaps and "cpu" in entry.recipe.devices):
            continue
        try:
            speed = plan(entry.recipe, entry.ranks if entry.ranks > 1 else None, measured=str(source))
        except TrainerError:  # another model or precision than the one that was measured
            continue
        if speed["predicted_samples_per_sec"] is not None:
            found[entry.name] = speed["predicted_samples_per_sec"]
    return found
