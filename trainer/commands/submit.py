"""`python -m trainer submit slurm`: a complete batch script, for a file or for sbatch.

One task a node starts that node's ranks; what stops continues in its folder. The words are checked as training checks
them, for the nodes that are asked for instead of this machine: no GPU and no torch is needed here.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainer import recipe as recipes
from trainer.devices.assignment import assign_devices
from trainer.errors import PeerError, Preempted, RecipeError, SetupError
from trainer.processes.interrupts import SAVING
from trainer.processes.rank import place
from trainer.recipe import Recipe, shipped_recipes
from trainer.recipe.checks import check_processes
from trainer.recipe.known_names import check_names
from trainer.recipe.recipe_files import positive_integer, split_words
from trainer.recipe.text import shown

LAUNCH = ("recipe", "plugin", "max_restarts")  # words of training that no recipe holds, beside nproc
OWN = ("nodes", "cpus", "memory", "requeues", "time", "partition", "account", "array")
EXAMPLES = {
    "nproc": "nproc=8, the processes on each node, one per GPU",
    "time": "time=24:00:00, after which SLURM ends the job, which then continues",
    "cpus": "cpus=32, the CPU cores of each node: the cluster would give one or none",
}
NAME = (r"[\w.,:/@-]*", "a name of letters, digits, dots and dashes")
RULES = {  # of the cluster's own words
    "memory": (r"(\d+(MiB|GiB|TiB))?", "a whole number of MiB, GiB or TiB, as in memory=64GiB"),
    "partition": NAME,
    "account": NAME,
}
REQUEUES = 20
LOST, STOPPED = PeerError.code, Preempted.code  # exit codes after which another try continues


def command(words: Sequence[str]) -> str:
    """The script that the words ask for. Raises RecipeError."""
    if place().launched:
        raise RecipeError("submit starts no ranks: type python -m trainer submit ... without torchrun")
    if not words or words[0] != "slurm":
        example = "as in submit slurm recipe=digits nproc=2 time=01:00:00 cpus=8"
        other = "; for Kubernetes, see python -m trainer guide nodes"
        raise RecipeError(f"submit needs slurm first, not '{words[0][:80] if words else ''}': {example}{other}")
    return script(words[1:], os.environ.get("TRAINER_COMMAND") or "python -m trainer")


def script(words: Sequence[str], program: str) -> str:
    """The file that sbatch takes; `program` starts ours in the shell from which this was typed. Raises RecipeError."""
    given, rest = split_words(words, (*OWN, *LAUNCH, "nproc", "output", "resume"))
    if "recipe" not in given:
        raise RecipeError(f"submit needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}")
    if given.get("resume", "auto") != "auto":
        raise RecipeError(f"resume={shown(given['resume'])} must be auto, and may be left out")
    if given.get("output", "").startswith("~"):
        raise RecipeError(f"output={shown(given['output'])}: write the folder's path on the cluster, without ~")
    if "array" in given:
        raise RecipeError("array= is no more: submit each run by itself, as in seed=2 output=runs/seed-2")
    base = recipes.load(given["recipe"], *rest)
    for key, example in EXAMPLES.items():
        if key not in given and not (key == "nproc" and base.processes == "one"):
            raise RecipeError(f"submit slurm needs {key}=, as in {example}")
    for key, (pattern, rule) in RULES.items():
        if not re.fullmatch(pattern, given.get(key, "")):
            raise RecipeError(f"{key}={shown(given[key])} must be {rule}")
    nodes = positive_integer("nodes", given.get("nodes")) or 1
    nproc = positive_integer("nproc", given.get("nproc")) or 1
    if "plugin" not in given:
        check_names(base)
    check_processes(base, nodes * nproc, nodes)
    saving = math.ceil(base.grace + SAVING)  # seconds that a run may need between the signal to stop and its end
    if seconds(given["time"]) <= saving + 60:
        raise RecipeError(
            f"time={given['time']} leaves no time to train: a run gets a signal {saving} s before the end, "
            "and SLURM may do so a minute earlier; write more, or a shorter grace= if steps are short, as in grace=10"
        )
    cpus, output = positive_integer("cpus", given["cpus"]), given.get("output") or f"runs/{base.name}"
    requeues = positive_integer("requeues", given.get("requeues")) or REQUEUES
    # As clusters allow names: small letters, digits and dashes, a letter first.
    name = re.sub(r"[^a-z0-9]+", "-", Path(output).name.lower()).strip("-")[:40].strip("-")
    options = {
        "job-name": name if name[:1].isalpha() else f"run-{name}".strip("-"),
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": _gpus(base, nproc, nodes) or None,
        "cpus-per-task": cpus,
        "mem": given.get("memory", "").removesuffix("iB") or None,
        "time": given["time"],
        "partition": given.get("partition"),
        "account": given.get("account"),
        "signal": f"USR1@{saving}",
        "open-mode": "append",
    }
    comment = " ".join(f"python -m trainer {shlex.join(['submit', 'slurm', *words])}".splitlines())
    lines = ["#!/bin/bash", f"# {comment}", "#SBATCH --requeue"]
    lines += [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    typed = [*(f"{key}={given[key]}" for key in LAUNCH if key in given), *rest, f"nproc={nproc}"]
    lines += [
        f"folder={shlex.quote(output)}",
        "",
        "# The job runs in the folder and the environment in which sbatch was typed.",
        'mkdir -p "$folder" && exec >>"$folder/slurm-$SLURM_JOB_ID.log" 2>&1 || exit 3',
        f"# {saving} s before the time limit the ranks get USR1, save and exit {STOPPED}. The first task",
        "# to end does not have the others killed while they save; they notice a lost node by themselves.",
        f"srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=0 \\",
        f'    {program} {shlex.join(typed)} "output=$folder" resume=auto',
        "code=$?",
        "",
        f"# {STOPPED}: stopped by a signal, and saved. {LOST}: a rank or a node was lost. Others would only recur.",
        f"if [ $code = {STOPPED} ] || [ $code = {LOST} ]; then",
        f"    if [ ${{SLURM_RESTART_COUNT:-0}} -lt {requeues} ]; then",
        '        scontrol requeue "$SLURM_JOB_ID" && exit',
        "    fi",
        f'    echo "not queued again (at most {requeues} times); the same words continue it"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def seconds(time: str) -> int:
    """Of SLURM's time limit, [D-]H:MM:SS. Raises RecipeError for anything else, such as 90, which are minutes there."""
    parts = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", time)
    if parts is None:
        raise RecipeError(f"time={shown(time)} must be hours, minutes and seconds, as in time=24:00:00, or 2-12:00:00")
    return sum(int(part or 0) * unit for part, unit in zip(parts.groups(), (86_400, 3600, 60, 1), strict=True))


def _gpus(recipe: Recipe, nproc: int, nodes: int) -> int:
    """The GPUs that each node must have for the recipe; its devices are held against them."""
    if recipe.traits.shared_memory or set(recipe.devices) == {"cpu"}:
        count = 0
    elif recipe.devices != "auto":
        count = 1 + max(int(name.partition(":")[2] or 0) for name in recipe.devices if name != "cpu")
    elif recipe.traits.many_devices and nproc == nodes == 1:
        count = recipe.pipeline.stages or 0
        if not count:
            raise RecipeError(f"mode={recipe.mode} drives several GPUs: write which, as in devices=[cuda:0,cuda:1]")
    else:
        count = nproc
    try:
        assign_devices(recipe, nproc, count, nodes)
    except SetupError as error:
        raise RecipeError(str(error)) from None
    return count
