"""`python -m trainer submit slurm`: a complete batch script, for a file or for sbatch.

The words are checked as training checks them, for the nodes that are asked for instead of this machine: no GPU and no
torch is needed here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.commands.submit.slurm import script
from trainer.errors import RecipeError
from trainer.processes.rank import place


def command(words: Sequence[str]) -> str:
    """The script that the words ask for. Raises RecipeError."""
    if place().launched:
        raise RecipeError("submit starts no ranks: type python -m trainer submit ... without torchrun")
    if not words or words[0] != "slurm":
        example = "as in submit slurm recipe=digits nproc=2 time=01:00:00 cpus=8"
        other = "; for Kubernetes, see python -m trainer guide nodes"
        raise RecipeError(f"submit needs slurm first, not '{words[0][:80] if words else ''}': {example}{other}")
    return script(words[1:], os.environ.get("TRAINER_COMMAND") or "python -m trainer")
