"""Words -> entries: what is compared with what, each with the command line that runs it here, or why it cannot run."""

from __future__ import annotations

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
from trainer.recipe.image_sizes import typed_size
from trainer.recipe.known_names import DATASETS, check_names
from trainer.recipe.loading import Source

OWN_WORDS = ("recipe", "modes", "repeats", "nproc", "plugin", "output", "resume", "steps")


@dataclass(eq=False)
class Entry:
    """One row of the comparison, and what its runs left."""

    name: str  # how the table calls it: the mode and its words
    words: tuple[str, ...]  # the recipe's words and nproc=, complete but for what differs from run to run
    recipe: Recipe  # what they resolve to
    ranks: int = 1  # processes
    threads: int = 1  # in each
    # why it cannot run here, or of the run that failed, after which the entry was left alone
    problem: TrainerError | None = None
    # result.json of each finished repeat; repeat 0 is the check of the losses, which is not timed
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)  # images/s of each timed repeat
    losses: list[float] = field(default_factory=list)  # of the check, one a step
    # as losses, of the same mathematics with its sums in another order; empty where that was not run
    rounded: list[float] = field(default_factory=list)

    @property
    def slug(self) -> str:
        """The name as a folder's."""
        return re.sub(r"[^A-Za-z0-9_.=-]+", "-", self.name).strip("-")

    @cached_property
    def parts(self) -> list[str]:
        """What in its model depends on how a batch is divided."""
        return batch_dependent(self.recipe)


def entries(
    source: Source,
    words: Sequence[str] = (),
    modes: Sequence[str] | None = None,
    nproc: str | None = None,
    plugin: str | None = None,
) -> list[Entry]:
    """What is to be compared, by the arguments of `compare`, in the order in which it is to run. Raises RecipeError."""
    base = recipe.load(source, *words)
    if plugin is None:
        check_names(base)
    shared = {word.partition("=")[0]: word for word in words}
    given = shared.pop("mode", None)
    if given and modes is not None:
        raise RecipeError(f"{given} and modes=[...] set the same thing: keep modes=")
    if modes is None:
        modes = [base.mode] if given else list(MODES)
    if not modes:
        raise RecipeError("modes=[] compares nothing: write modes=[single,ddp], or leave it out for all modes")
    rows, seen = list[Entry](), Counter[str]()
    for text in modes:
        mode, mode_words = _mode_and_words(text)
        if nproc and TRAITS[mode].processes != "one":
            mode_words.setdefault("nproc", f"nproc={nproc}")
        if base.shares is not None and "shares" in TRAITS[mode].refuses:  # as the reference of modes that have them
            mode_words.setdefault("shares", "shares=null")
        entry = _entry(source, text, mode, {**shared, **mode_words})
        # Identical entries, which show the noise, get a number; so do entries whose folders would have one name.
        seen[entry.slug] += 1
        rows.append(replace(entry, name=f"{text} ({seen[entry.slug]})") if seen[entry.slug] > 1 else entry)
    return rows


def parse_modes(text: str) -> list[str]:
    """The value of `modes=`. Raises RecipeError."""
    try:
        modes = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        modes = None
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not all(isinstance(mode, str) for mode in modes):
        raise RecipeError(f'modes={text[:80]} must be a list, as in modes=[single,ddp,"pipeline nproc=2"]')
    return [" ".join(mode.split()) for mode in modes]


def _mode_and_words(text: str) -> tuple[str, dict[str, str]]:
    try:
        mode, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise RecipeError(f"modes: '{text[:80]}': {str(error).lower()}") from None
    recipe.load({"mode": mode})  # which tells what is no mode
    odd = next((word for word in words if word.partition("=")[0] in {*OWN_WORDS, "mode"} - {"nproc"}), None)
    if odd:
        raise RecipeError(f"modes: '{text[:80]}': {odd} cannot be set for one entry, only for the whole comparison")
    return mode, {word.partition("=")[0]: word for word in words}


def _entry(source: Source, name: str, mode: str, words: dict[str, str]) -> Entry:
    """An entry held against this machine. Every entry gets the same cores, unless the user says otherwise."""
    nproc = words.pop("nproc", "").partition("=")[2] or None
    chosen = recipe.load(source, *words.values(), f"mode={mode}")
    if chosen.traits.single_device and isinstance(chosen.devices, list) and len(chosen.devices) > 1:
        words["devices"] = f"devices=[{chosen.devices[0]}]"
        chosen = chosen.replace(devices=chosen.devices[:1])
    ranks, launch, problem = 1, None, None
    try:
        launch = launching.launch_to_start(chosen, nproc)
    except RecipeError as error:
        problem = error
    if launch is not None:
        if launch.nnodes > 1:
            raise RecipeError(f"compare runs on one node, but NNODES or SLURM say {launch.nnodes}: unset them")
        ranks, nproc = launch.nproc, str(launch.nproc)
    # In one process nproc= stays too, or the run would start as many as the machine suggests.
    listed = [*words.values(), f"mode={mode}", *([f"nproc={nproc}"] if nproc else [])]
    threads = chosen.threads or max(1, resources.cores() // ranks)
    listed += [f"threads={threads}"] * (not chosen.threads)
    return Entry(name, tuple(listed), chosen, ranks, threads, problem)


def batch_dependent(recipe: Recipe) -> list[str]:
    """What in the model depends on how a batch is divided: "batch norm", "dropout". Builds it on shapes alone."""
    import torch
    from torch import nn
    from torchvision.ops import StochasticDepth

    from trainer.commands.plan.dataset_facts import DatasetFacts, dataset_facts

    layers: set[str] = set()
    with suppress(TrainerError, RuntimeError, NotImplementedError):
        if recipe.data.name in DATASETS:  # which need not be here, or counted, for this
            shape = recipe.data.channels or 3, typed_size(recipe.data.image_size) or 224
            facts = DatasetFacts(None, None, recipe.model.num_classes or 10, *shape, "")
        else:
            facts = dataset_facts(recipe)
        with torch.device("meta"):
            model = facts.model(recipe, starting=False)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                layers.add("batch norm")
            dropped = isinstance(module, nn.modules.dropout._DropoutNd | StochasticDepth) and module.p > 0
            if dropped or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0):
                layers.add("dropout")
    return sorted(layers)
