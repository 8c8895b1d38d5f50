"""The entries of a comparison: what is compared, and the command line that runs each entry.

An entry that cannot run on this machine stores the reason.
"""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import yaml

from trainer import recipe
from trainer.errors import RecipeError, TrainerError
from trainer.launch import launching
from trainer.processes import resources
from trainer.recipe import MODES, TRAITS, Recipe
from trainer.recipe.checks import check_names
from trainer.recipe.image_sizes import typed_size
from trainer.recipe.known_names import DATASETS
from trainer.recipe.loading import Source

OWN_ARGUMENTS = ("recipe", "modes", "repeats", "nproc", "plugin", "output", "resume", "steps")
# Numbers of the repeats that are not timed: the check of the losses, and the same check with
# smaller micro-batches, which only changes the order of the sums. Timed repeats start at 1.
CHECK = 0
ROUNDED = -1


@dataclass(eq=False)
class Entry:
    """Entry of the comparison, with the results of its runs.

    Attributes:
        name: the mode and the entry's own arguments, as the table shows them.
        words: arguments of the command line that all runs of the entry share.
        recipe: the recipe that the arguments resolve to.
        ranks: number of processes.
        threads: threads of each process.
        problem: why the entry cannot run here, or the error of the run that failed. An entry with
            a problem is not run again.
        results: content of result.json of each finished repeat, by its number.
        speeds: images/s of each timed repeat, by its number.
        disturbed: numbers of the repeats during which other processes used the machine.
        losses: the loss of each step of the check.
        rounded: the loss of each step of the check `ROUNDED`; empty if this check was not run.
    """

    name: str
    words: tuple[str, ...]
    recipe: Recipe
    ranks: int
    threads: int
    problem: TrainerError | None
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    disturbed: set[int] = field(default_factory=set)
    losses: list[float] = field(default_factory=list)
    rounded: list[float] = field(default_factory=list)

    @property
    def fair_speeds(self) -> dict[int, float]:
        """Images/s of each undisturbed repeat by its number; only these may be compared."""
        return {
            repeat: speed for repeat, speed in self.speeds.items() if repeat not in self.disturbed
        }

    @property
    def slug(self) -> str:
        """Name of the entry in characters that are safe in the name of a folder."""
        return re.sub(r"[^A-Za-z0-9_.=-]+", "-", self.name).strip("-")

    @cached_property
    def parts(self) -> list[str]:
        """Kinds of layers in the model whose output depends on how a batch is divided.

        See `find_batch_dependent`.
        """
        return find_batch_dependent(self.recipe)


def build_entries(
    source: Source,
    words: Sequence[str] = (),
    modes: Sequence[str] | None = None,
    nproc: int | str | None = None,
    plugin: str | None = None,
) -> list[Entry]:
    """Build the entries from the arguments of `compare`, in the order in which they run.

    Raises:
        RecipeError: an argument is not allowed, or the modes are not a list of known modes.
    """
    base = recipe.load(source, *words)
    if plugin is None:
        check_names(base)
    shared_arguments = {word.partition("=")[0]: word for word in words}
    mode_argument = shared_arguments.pop("mode", None)
    if mode_argument and modes is not None:
        raise RecipeError(f"{mode_argument} and modes=[...] set the same thing: keep modes=")
    if modes is None:
        modes = [base.mode] if mode_argument else list(MODES)
    if not modes:
        raise RecipeError(
            "modes=[] compares nothing: write modes=[single,ddp], or leave it out for all modes"
        )
    rows = []
    slug_counts = Counter[str]()
    for text in modes:
        mode, mode_arguments = _parse_mode(text)
        if nproc and TRAITS[mode].processes != "one":
            mode_arguments.setdefault("nproc", f"nproc={nproc}")
        # A mode that refuses shares= runs without it. So `single`, which refuses it, can be the
        # reference for modes that accept it.
        if base.shares is not None and "shares" in TRAITS[mode].refuses:
            mode_arguments.setdefault("shares", "shares=null")
        entry = _build_entry(source, text, mode, {**shared_arguments, **mode_arguments})
        # Two entries must not share a folder, so a number is appended to a slug that is used
        # already. Identical entries are allowed, because they show the noise, and different names
        # can have the same slug.
        slug_counts[entry.slug] += 1
        number = slug_counts[entry.slug]
        if number > 1:
            entry = replace(entry, name=f"{text} ({number})")
        rows.append(entry)
    return rows


def find_unused(source: Source, rows: Sequence[Entry]) -> list[str]:
    """Return a sentence for each key of the whole comparison that no entry reads."""
    notes = []
    for row in rows:
        words = [word for word in row.words if not word.startswith("nproc=")]
        notes.append(
            {note.partition("=")[0]: note for note in recipe.notes_on_idle(source, *words)}
        )
    unused = [note for key, note in notes[0].items() if all(key in others for others in notes)]
    # Advice to type another mode= would not work beside modes=.
    return [note.partition(", or type mode=")[0] for note in unused]


def parse_modes(text: str) -> list[str]:
    """Parse the value of `modes=` into one string per entry.

    Raises:
        RecipeError: the value is neither a string nor a list of strings.
    """
    try:
        modes = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        modes = None
    if isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or not all(isinstance(mode, str) for mode in modes):
        raise RecipeError(
            f'modes={text[:80]} must be a list, as in modes=[single,ddp,"pipeline nproc=2"]'
        )
    return [" ".join(mode.split()) for mode in modes]


def _parse_mode(text: str) -> tuple[str, dict[str, str]]:
    """Split an entry of `modes` into the mode and its arguments by key."""
    try:
        mode, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise RecipeError(f"modes: '{text[:80]}': {str(error).lower()}") from None
    # Load the mode by itself, only for the error that suggests the nearest name of an unknown mode.
    recipe.load({"mode": mode})
    refused_keys = {*OWN_ARGUMENTS, "mode"} - {"nproc"}
    arguments = {}
    for word in words:
        key = word.partition("=")[0]
        if key in refused_keys:
            raise RecipeError(
                f"modes: '{text[:80]}': {word} cannot be set for one entry, only for the whole "
                "comparison"
            )
        arguments[key] = word
    return mode, arguments


def _build_entry(source: Source, name: str, mode: str, arguments: dict[str, str]) -> Entry:
    """Build one entry, and check that this machine can run it.

    Every entry gets the same number of cores, unless the user sets `threads`.
    """
    nproc = arguments.pop("nproc", "").partition("=")[2] or None
    resolved = recipe.load(source, *arguments.values(), f"mode={mode}")
    devices = resolved.devices
    if resolved.traits.single_device and isinstance(devices, list) and len(devices) > 1:
        arguments["devices"] = f"devices=[{devices[0]}]"
        resolved = resolved.replace(devices=devices[:1])
    ranks = 1
    launch = None
    problem = None
    try:
        launch = launching.launch_to_start(resolved, nproc)
    except RecipeError as error:
        problem = error
    if launch:
        if launch.nnodes > 1:
            raise RecipeError(
                f"compare runs on one node, but NNODES or SLURM say {launch.nnodes}: unset them"
            )
        ranks = launch.nproc
        nproc = str(launch.nproc)
    words = [*arguments.values(), f"mode={mode}"]
    # nproc=1 is passed as well, although no ranks are launched for it: without nproc=, the run
    # would choose the number of processes by the devices of this machine.
    if nproc:
        words.append(f"nproc={nproc}")
    threads = resolved.threads or max(1, resources.count_cores() // ranks)
    if not resolved.threads:
        words.append(f"threads={threads}")
    return Entry(name, tuple(words), resolved, ranks, threads, problem)


def find_batch_dependent(recipe: Recipe) -> list[str]:
    """Return the kinds of layers whose output depends on how a batch is divided.

    The kinds are "batch norm" and "dropout". The model is built on the meta device, which needs no
    memory. If it cannot be built there, the list is empty.
    """
    import torch
    from torch import nn
    from torchvision.ops import StochasticDepth

    from trainer.commands.plan.dataset_facts import DatasetFacts, read_dataset_facts

    kinds = set()
    with suppress(TrainerError, RuntimeError):
        # The files of a known data set may be missing on this machine, and the number of images
        # does not matter here. So these data sets are not opened.
        if recipe.data.name in DATASETS:
            classes = recipe.model.num_classes or 10
            channels = recipe.data.channels or 3
            image_size = typed_size(recipe.data.image_size) or 224
            facts = DatasetFacts(None, None, classes, channels, image_size, "")
        else:
            facts = read_dataset_facts(recipe)
        with torch.device("meta"):
            model = facts.model(recipe, starting=False)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                kinds.add("batch norm")
            drop_rate = 0.0
            if isinstance(module, nn.modules.dropout._DropoutNd | StochasticDepth):
                drop_rate = module.p
            elif isinstance(module, nn.MultiheadAttention):
                drop_rate = module.dropout
            if drop_rate > 0:
                kinds.add("dropout")
    return sorted(kinds)
