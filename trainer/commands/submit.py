"""`python -m trainer submit slurm`: print a complete batch script for sbatch.

One task on each node starts the ranks of that node, and a stopped run is resumed in its folder. The
arguments are checked as in training, for the requested nodes instead of this machine, so this
command needs neither a GPU nor torch.
"""

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainer import recipe as recipes
from trainer.devices.assignment import assign_devices, count_named_cards
from trainer.errors import PeerError, Preempted, RecipeError, SetupError
from trainer.processes.interrupts import SAVE_SECONDS
from trainer.processes.rank import read_place
from trainer.recipe import Recipe, format_value, parse_positive_integer, split_arguments
from trainer.recipe.checks import check_names, check_processes

# Options of training, besides nproc, that are not keys of a recipe.
LAUNCH = ("recipe", "plugin", "max_restarts", "check")
OWN = ("nodes", "cpus", "memory", "requeues", "time", "partition", "account")
EXAMPLES = {
    "recipe": "recipe=digits, a shipped recipe or your file",
    "nproc": "nproc=8, the processes on each node, one per GPU",
    "time": "time=24:00:00, after which SLURM ends the job, which then continues",
    "cpus": "cpus=32, the CPU cores of each node: the cluster would give one or none",
}
NAME = (r"[\w.,:/@-]*", "a name of letters, digits, dots and dashes")
# Pattern of the allowed values of each key, and their description for error messages. The script
# passes these values to SLURM, for memory= without "iB".
RULES = {
    "memory": (r"(\d+(MiB|GiB|TiB))?", "a whole number of MiB, GiB or TiB, as in memory=64GiB"),
    "partition": NAME,
    "account": NAME,
}
# Default for requeues=, the maximum number of times that the job is queued again: a run that fails
# every time must not requeue its job forever.
REQUEUES = 20
# Exit codes after which the job is queued again.
LOST = PeerError.code
STOPPED = Preempted.code


def command(words: Sequence[str]) -> str:
    """Parse the arguments of `submit slurm` and return the script.

    Raises:
        RecipeError: An argument is wrong or missing.
    """
    if read_place().launched:
        raise RecipeError(
            "submit starts no ranks: type python -m trainer submit ... without torchrun"
        )
    if words[0] != "slurm":
        raise RecipeError(
            f"submit needs slurm first, not '{words[0][:80]}': as in submit slurm recipe=digits "
            "nproc=2 time=01:00:00 cpus=8; for Kubernetes, see python -m trainer guide nodes"
        )
    return build_script(words[1:], os.environ.get("TRAINER_COMMAND") or "python -m trainer")


def build_script(words: Sequence[str], program: str) -> str:
    """Return the batch script.

    Args:
        words: Arguments of training and of the job.
        program: Command that starts the trainer in the shell of the job.

    Raises:
        RecipeError: An argument is wrong or missing.
    """
    options, overrides = split_arguments(words, (*OWN, *LAUNCH, "nproc", "output", "resume"))
    missing = [key for key in EXAMPLES if key not in options]
    base = Recipe()
    if "recipe" in options:
        base = recipes.load(options["recipe"], *overrides)
    if base.processes == "one" and "nproc" in missing:
        missing.remove("nproc")
    if missing:
        needed = "; ".join(EXAMPLES[key] for key in missing)
        raise RecipeError(f"submit slurm also needs {needed}")
    if options.get("resume", "auto") != "auto":
        raise RecipeError(
            f"resume={format_value(options['resume'])} must be auto, and may be left out"
        )
    if options.get("output", "").startswith("~"):
        raise RecipeError(
            f"output={format_value(options['output'])}: write the folder's path on the cluster, "
            "without ~"
        )
    for key, (pattern, rule) in RULES.items():
        if not re.fullmatch(pattern, options.get(key, "")):
            raise RecipeError(f"{key}={format_value(options[key])} must be {rule}")
    nodes = parse_positive_integer("nodes", options.get("nodes")) or 1
    nproc = parse_positive_integer("nproc", options.get("nproc")) or 1
    if "plugin" not in options:
        check_names(base)
    check_processes(base, nodes * nproc, nodes)
    # Seconds that a run may need between the signal and its exit.
    saving = math.ceil(base.grace + SAVE_SECONDS)
    if parse_time(options["time"]) <= saving + 60:
        raise RecipeError(
            f"time={options['time']} leaves no time to train: a run gets a signal {saving} s "
            "before the end, and SLURM may do so a minute earlier; write more, or a shorter grace= "
            "if steps are short, as in grace=10"
        )
    cpus = parse_positive_integer("cpus", options["cpus"])
    output = options.get("output") or f"runs/{base.name}"
    requeues = parse_positive_integer("requeues", options.get("requeues")) or REQUEUES
    # All clusters accept lowercase letters, digits and dashes in the name of a job. All other
    # characters become dashes.
    name = re.sub(r"[^a-z0-9]+", "-", Path(output).name.lower())
    name = name.strip("-")[:40].strip("-")
    directives = {
        "job-name": name or "run",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": _count_gpus(base, nproc, nodes),
        "cpus-per-task": cpus,
        "mem": options.get("memory", "").removesuffix("iB"),
        "time": options["time"],
        "partition": options.get("partition"),
        "account": options.get("account"),
        "signal": f"USR1@{saving}",
        "open-mode": "append",
    }
    # A line break in an argument must not end the comment.
    comment = " ".join(f"python -m trainer submit slurm {shlex.join(words)}".splitlines())
    head = ["#!/bin/bash", f"# {comment}", "#SBATCH --requeue"]
    head += [f"#SBATCH --{key}={value}" for key, value in directives.items() if value]
    launch = [f"{key}={options[key]}" for key in LAUNCH if key in options]
    lines = "\n".join(head)
    arguments = [*launch, *overrides, f"nproc={nproc}"]
    return f"""\
{lines}
folder={shlex.quote(output)}

# The job runs in the folder and the environment in which sbatch was typed.
mkdir -p "$folder" && exec >>"$folder/slurm-$SLURM_JOB_ID.log" 2>&1 || exit 3
# {saving} s before the time limit the ranks get USR1, save and exit {STOPPED}. The first task
# to end does not have the others killed while they save; they notice a lost node by themselves.
srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=0 \\
    {program} {shlex.join(arguments)} "output=$folder" resume=auto
code=$?

# {STOPPED}: stopped by a signal, and saved. {LOST}: a rank or a node was lost. Any other exit code
# would only recur.
if [ $code = {STOPPED} ] || [ $code = {LOST} ]; then
    if [ ${{SLURM_RESTART_COUNT:-0}} -lt {requeues} ]; then
        scontrol requeue "$SLURM_JOB_ID" && exit
    fi
    echo "not queued again (at most {requeues} times); the same command continues it"
fi
exit $code
"""


def parse_time(time: str) -> int:
    """Return the seconds of a SLURM time limit, [D-]H:MM:SS.

    Raises:
        RecipeError: The time has another format, such as 90, which SLURM reads as minutes.
    """
    match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", time)
    if match is None:
        raise RecipeError(
            f"time={format_value(time)} must be hours, minutes and seconds, as in time=24:00:00, "
            "or 2-12:00:00"
        )
    days, hours, minutes, rest = (int(number or 0) for number in match.groups())
    return 86_400 * days + 3600 * hours + 60 * minutes + rest


def _count_gpus(recipe: Recipe, nproc: int, nodes: int) -> int:
    """Return the number of GPUs that each node needs.

    Raises:
        RecipeError: The recipe's devices do not fit `nproc` and `nodes`, or the number of GPUs is
            unknown.
    """
    if recipe.traits.shared_memory:
        count = 0
    elif recipe.devices != "auto":
        count = count_named_cards(recipe.devices)
    elif recipe.traits.many_devices and nproc == nodes == 1:
        count = recipe.pipeline.stages or 0
        if not count:
            raise RecipeError(
                f"mode={recipe.mode} drives several GPUs: write which, as in "
                "devices=[cuda:0,cuda:1]"
            )
    else:
        count = nproc
    try:
        assign_devices(recipe, nproc, count, nodes)
    except SetupError as error:
        raise RecipeError(str(error)) from None
    return count
