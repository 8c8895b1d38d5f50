"""`python -m trainer submit`: a complete file for SLURM, Kubernetes or Docker; with --go it is handed to them.

The words are checked as training checks them, for the nodes that are asked for instead of this machine: no GPU and no
torch is needed here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence

from trainer.commands.submit import kubernetes, slurm
from trainer.commands.submit.submission import Submission, read_submission
from trainer.errors import RecipeError, SetupError
from trainer.processes.rank import place
from trainer.recipe.text import nearest

GO = "--go"
WRITERS: dict[str, Callable[[Submission], str]] = {"slurm": slurm.script, "kubernetes": kubernetes.manifest}
TAKERS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f", "-")}  # they read the file from a pipe

DOCKERFILE = """\
# An image with this program, built in its folder:
#   python -m trainer submit dockerfile > Dockerfile
#   docker build -t REGISTRY/trainer:1 . && docker push REGISTRY/trainer:1
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /trainer/
COPY recipes /trainer/recipes
COPY trainer /trainer/trainer
# torch from the package index brings CUDA; the host needs only the driver of its GPUs.
RUN pip install --no-cache-dir '/trainer[timm]' && rm -r /trainer
ENV PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["python", "-m", "trainer"]
"""


def command(words: Sequence[str]) -> int:
    """Print the file that the words ask for, or submit it. Raises RecipeError, SetupError."""
    if place().launched:
        raise RecipeError("submit starts no ranks: type python -m trainer submit ... without torchrun")
    target, rest = (words[0], words[1:]) if words else ("", [])
    if target == "dockerfile":
        if rest:
            raise RecipeError(f"submit dockerfile takes no other word: leave out '{rest[0][:80]}'")
        print(DOCKERFILE, end="")
        return 0
    if target not in WRITERS:
        known = (*WRITERS, "dockerfile")
        hint = f"did you mean submit {guess}? " if target and (guess := nearest(target.lower(), known)) else ""
        example = "as in submit slurm recipe=digits nproc=2 time=01:00:00 cpus=8"
        raise RecipeError(f"submit needs {', '.join(known)} first, not '{target[:80]}': {hint}{example}")
    submission = read_submission(target, [word for word in rest if word != GO], os.environ.get("TRAINER_COMMAND"))
    text = WRITERS[target](submission)
    if GO not in rest:
        print(text, end="")
        return 0
    return _hand_over(target, text, rest)


def _hand_over(target: str, text: str, rest: Sequence[str]) -> int:
    """Give the file to the cluster's own program, which prints what it did."""
    program = TAKERS[target]
    if shutil.which(program[0]) is None:
        name = "job.sbatch" if target == "slurm" else "job.yaml"
        again = shlex.join(["submit", target, *(word for word in rest if word != GO)])
        taken = f"{shlex.join(program).removesuffix(' -')} {name}"
        raise SetupError(
            f"{program[0]} is not on this machine: type python -m trainer {again} > {name}, "
            f"and on a machine that has it: {taken}"
        )
    done = subprocess.run(program, input=text, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{program[0]} refused the file, as it says above; without {GO} it is printed")
    return 0
