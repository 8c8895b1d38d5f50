"""`python -m trainer submit slurm`: a complete batch script; with --go it is handed to sbatch.

The words are checked as training checks them, for the nodes that are asked for instead of this machine: no GPU and no
torch is needed here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from trainer.commands.submit.slurm import script
from trainer.commands.submit.submission import read_submission
from trainer.errors import RecipeError, SetupError
from trainer.processes.rank import place

GO = "--go"


def command(words: Sequence[str]) -> int:
    """Print the script that the words ask for, or submit it. Raises RecipeError, SetupError."""
    if place().launched:
        raise RecipeError("submit starts no ranks: type python -m trainer submit ... without torchrun")
    target, rest = (words[0], [word for word in words[1:] if word != GO]) if words else ("", [])
    if target != "slurm":
        example = "as in submit slurm recipe=digits nproc=2 time=01:00:00 cpus=8"
        other = "; for Kubernetes, see python -m trainer guide nodes"
        raise RecipeError(f"submit needs slurm first, not '{target[:80]}': {example}{other}")
    text = script(read_submission(rest, os.environ.get("TRAINER_COMMAND")))
    if GO not in words:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        again = shlex.join(["submit", target, *rest])
        raise SetupError(
            f"sbatch is not on this machine: type python -m trainer {again} > job.sbatch, "
            "and on a machine that has it: sbatch job.sbatch"
        )
    if subprocess.run(["sbatch"], input=text, text=True, check=False).returncode:
        raise SetupError(f"sbatch refused the script, as it says above; without {GO} it is printed")
    return 0
