"""What `plan` expects of each entry: a prediction to hold against the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.commands.compare.entries import Entry
from trainer.commands.plan import plan
from trainer.devices import cards
from trainer.errors import TrainerError
from trainer.processes import resources


def predictions(
    entries: Sequence[Entry], folders: Sequence[Path | None], plugin: str | None = None
) -> dict[str, float]:
    """Images/s by entry, without those that nothing can be said of.

    One process is predicted from the run of `single`; several from a measurement of their computing side by side and of
    their exchange, since one alone tells of neither.

    Args:
        folders: a finished run of each entry, None where there is none.
        plugin: the user's own module.
    """
    source = next(
        (folder for entry, folder in zip(entries, folders, strict=True) if entry.traits.reference and folder), None
    )
    speeds: dict[str, float] = {}
    for entry in entries:
        several = entry.ranks > 1
        if entry.traits.reference or entry.problem or _stands_in(entry) or not (several or source):
            continue
        measured = "here" if several else str(source)
        try:
            planned = plan(entry.recipe.replace(threads=entry.threads), entry.ranks, measured=measured, plugin=plugin)
        except (TrainerError, RuntimeError, ValueError):  # as of another model or precision than was measured
            continue
        if planned["predicted_samples_per_sec"] is not None:
            speeds[entry.name] = planned["predicted_samples_per_sec"]
    return speeds


def _stands_in(entry: Entry) -> bool:
    """Whether a CPU does in turn what devices would do at the same time, which a plan is about."""
    if "cpu" not in entry.recipe.devices and cards.detect().count:
        return False
    return (entry.traits.micro_batches and entry.ranks == 1) or entry.ranks * entry.threads > resources.cores()
