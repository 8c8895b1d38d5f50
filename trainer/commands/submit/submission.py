"""The words of `submit`, checked: the run as training would start it on the nodes, and what the cluster is asked."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainer import recipe as recipes
from trainer.devices.assignment import assign_devices
from trainer.errors import RecipeError, SetupError
from trainer.processes.interrupts import SAVING
from trainer.recipe import Recipe, shipped_recipes
from trainer.recipe.checks import check_processes
from trainer.recipe.known_names import check_names
from trainer.recipe.recipe_files import positive_integer, split_words
from trainer.recipe.reflection import defaults, kinds
from trainer.recipe.text import shown

LAUNCH = ("recipe", "nproc", "plugin", "max_restarts")  # words of training that no recipe holds
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


@dataclass(frozen=True)
class Submission:
    """What is submitted."""

    recipe: Recipe  # of the first of all runs
    words: tuple[str, ...]  # of the recipe, without those that vary, and without `nproc=`, `output=` and `resume=`
    variants: tuple[str, ...]  # of a job array: the word of each run; a single empty one otherwise
    output: str  # the folder of the run, or of all of them
    nodes: int  # machines
    nproc: int  # processes of each
    gpus: int  # of each
    cpus: int  # cores of each
    requeues: int
    options: Mapping[str, str]  # the cluster's own words, as typed
    program: str  # what starts this program in the shell from which this was typed
    comment: str  # the command that made the file, on one line

    @property
    def name(self) -> str:
        """The run folder's, as clusters allow names: small letters, digits and dashes, a letter first."""
        name = re.sub(r"[^a-z0-9]+", "-", Path(self.output).name.lower()).strip("-")[:40].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".strip("-")

    @property
    def saving(self) -> int:
        """Seconds that a run may need between the signal to stop and its end."""
        return math.ceil(self.recipe.grace + SAVING)

    @property
    def folders(self) -> list[str]:
        """Of each run."""
        names = [re.sub(r"[^A-Za-z0-9_.=+]+", "-", variant).strip("-") for variant in self.variants]
        return [str(Path(self.output, name)) for name in names]


def read_submission(words: Sequence[str], program: str | None) -> Submission:
    """Read and check the words. Raises RecipeError."""
    given, rest = split_words(words, (*OWN, *LAUNCH, "output", "resume"))
    if "recipe" not in given:
        raise RecipeError(f"submit needs recipe=, as in recipe=digits; shipped: {', '.join(shipped_recipes())}")
    if given.get("resume", "auto") != "auto":
        raise RecipeError(f"resume={shown(given['resume'])} must be auto, and may be left out")
    if given.get("output", "").startswith("~"):
        raise RecipeError(f"output={shown(given['output'])}: write the folder's path on the cluster, without ~")
    varied = _varied(given.get("array"))
    if any(word.partition("=")[0] == varied[0].partition("=")[0] for word in rest if varied):
        raise RecipeError(f"{varied[0].partition('=')[0]} is given by array=, too: keep one")
    base = recipes.load(given["recipe"], *rest, *varied[:1])
    for key, example in EXAMPLES.items():
        if key not in given and not (key == "nproc" and base.processes == "one"):
            raise RecipeError(f"submit slurm needs {key}=, as in {example}")
    for key, (pattern, rule) in RULES.items():
        if not re.fullmatch(pattern, given.get(key, "")):
            raise RecipeError(f"{key}={shown(given[key])} must be {rule}")
    nodes = positive_integer("nodes", given.get("nodes")) or 1
    nproc = positive_integer("nproc", given.get("nproc")) or 1
    gpus = 0
    for word in varied or [""]:
        recipe = recipes.load(given["recipe"], *rest, *filter(None, [word]))
        if "plugin" not in given:
            check_names(recipe)
        check_processes(recipe, nodes * nproc, nodes)
        gpus = max(gpus, _gpus(recipe, nproc, nodes))
    submission = Submission(
        recipe=base,
        words=(*(f"{key}={given[key]}" for key in LAUNCH if key in given and key != "nproc"), *rest),
        variants=tuple(varied) or ("",),
        output=given.get("output") or f"runs/{base.name}",
        nodes=nodes,
        nproc=nproc,
        gpus=gpus,
        cpus=positive_integer("cpus", given["cpus"]) or 1,
        requeues=positive_integer("requeues", given.get("requeues")) or REQUEUES,
        options={key: given[key] for key in OWN if key in given},
        program=program or "python -m trainer",
        comment=" ".join(f"python -m trainer {shlex.join(['submit', 'slurm', *words])}".splitlines()),
    )
    if len({*submission.folders}) < len(submission.folders):
        raise RecipeError("array= has values whose folders would have the same name: write a separate file for each")
    if seconds(given["time"]) <= submission.saving + 60:
        raise RecipeError(
            f"time={given['time']} leaves no time to train: a run gets a signal {submission.saving} s before the end, "
            "and SLURM may do so a minute earlier; write more, or a shorter grace= if steps are short, as in grace=10"
        )
    return submission


def seconds(time: str) -> int:
    """Of SLURM's time limit, [D-]H:MM:SS. Raises RecipeError for anything else, such as 90, which are minutes there."""
    parts = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", time)
    if parts is None:
        raise RecipeError(f"time={shown(time)} must be hours, minutes and seconds, as in time=24:00:00, or 2-12:00:00")
    return sum(int(part or 0) * unit for part, unit in zip(parts.groups(), (86_400, 3600, 60, 1), strict=True))


def _varied(array: str | None) -> list[str]:
    """The word of each run of a job array."""
    if array is None:
        return []
    key, _, text = array.partition(":")
    try:
        values = yaml.load(text, yaml.BaseLoader if str in kinds().get(key, ()) else yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        values = None
    if not isinstance(values, list) or not values or any(values.count(value) > 1 for value in values):
        line = f"array={shown(array)} must be a key and a list of values, each once"
        raise RecipeError(f"{line}, as in array=batch_size:[32,64]")
    if key not in defaults() or key in ("mode", "output", "resume"):
        guess = recipes.nearest(key, defaults())
        hint = f"did you mean {guess}?" if guess else "write a file for each run"
        raise RecipeError(f"array={shown(key)} is no key in which the runs of an array differ; {hint}")
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for value in values]


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
