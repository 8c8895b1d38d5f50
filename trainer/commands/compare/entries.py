"""Words -> entries: what is compared with what, each with the command line that runs it here, or why it cannot run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from trainer import recipe
from trainer.errors import RecipeError
from trainer.launch import launching
from trainer.processes import resources
from trainer.recipe import MODES, TRAITS, Recipe, Traits
from trainer.recipe.known_names import check_names
from trainer.recipe.reflection import defaults, is_text

OWN_WORDS = ("recipe", "modes", "repeats", "sweep", "nproc", "plugin", "output", "resume", "steps")


@dataclass(frozen=True)
class Entry:
    """One row of the comparison."""

    name: str  # how the table calls it: the mode, its words, the sweep's value
    words: tuple[str, ...]  # the recipe's words and nproc=, complete but for what differs from run to run
    recipe: Recipe  # what they resolve to
    value: Any = None  # of the swept key; null where there is no sweep, or this mode does not look at the key
    series: str = ""  # the name without the value: the points of one curve share it
    ranks: int = 1  # processes
    threads: int = 1  # in each
    problem: tuple[str, int] | None = None  # why it cannot run here, as (line, exit code)

    @property
    def mode(self) -> str:
        return self.recipe.mode

    @property
    def traits(self) -> Traits:
        return self.recipe.traits

    @property
    def slug(self) -> str:
        """The name as a folder's."""
        return re.sub(r"[^A-Za-z0-9_.=-]+", "-", self.name).strip("-")


@dataclass(frozen=True)
class Sweep:
    """One key and the values it takes."""

    key: str
    values: list[Any]

    def word(self, value: Any) -> str:
        return f"{self.key}={value if isinstance(value, str) else json.dumps(value)}"


def entries(
    source: str | Mapping[str, Any],
    words: Sequence[str] = (),
    modes: Sequence[str] | None = None,
    sweep: Sweep | None = None,
    nproc: str | None = None,
    plugin: str | None = None,
) -> list[Entry]:
    """What is to be compared, by the arguments of `compare`, in the order in which it is to run. Raises RecipeError."""
    base = recipe.load(source, *words)
    if plugin is None:
        check_names(base)
    shared = _by_key(words)
    given = shared.pop("mode", None)
    if given and modes is not None:
        raise RecipeError(f"{given} and modes=[...] set the same thing: keep modes=")
    if modes is None:
        modes = [base.mode] if given or sweep else list(MODES)
    if not modes:
        raise RecipeError(
            f"modes=[] compares nothing: write modes=[single,ddp], or leave it out for all: {', '.join(MODES)}"
        )
    if sweep and sweep.key in shared:
        raise RecipeError(f"{shared[sweep.key]} and sweep={sweep.key}:[...] set the same key: keep the sweep")
    rows: list[Entry] = []
    for text in modes:
        mode, mode_words = _mode_and_words(text)
        if "nproc" not in mode_words and nproc and _looks_at(TRAITS[mode], "nproc"):
            mode_words["nproc"] = f"nproc={nproc}"
        if sweep and sweep.key in mode_words:
            raise RecipeError(f"'{text}' and sweep={sweep.key}:[...] set the same key: keep the sweep")
        used = sweep is not None and _looks_at(TRAITS[mode], sweep.key)
        for value in sweep.values if sweep and used else (None,):
            point = {sweep.key: sweep.word(value)} if sweep and used else {}
            name = " ".join([text, *point.values()])
            rows.append(_entry(source, name, mode, {**shared, **mode_words, **point}, value, text))
    return _with_threads(_with_distinct_names(rows), sweep)


def parse_modes(text: str) -> list[str]:
    """The value of `modes=`. Raises RecipeError."""
    modes = _yaml(text)
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not all(isinstance(mode, str) for mode in modes):
        raise RecipeError(f'modes={text[:80]} must be a list, as in modes=[single,ddp,"pipeline nproc=2"]')
    return [" ".join(mode.split()) for mode in modes]


def parse_sweep(text: str) -> Sweep:
    """The value of `sweep=`, key:[values]. Raises RecipeError."""
    key, _, rest = text.partition(":")
    values, known = _yaml(rest, yaml.BaseLoader if is_text(key) else yaml.SafeLoader), {**defaults(), "nproc": 1}
    if not isinstance(values, list) or not values:
        raise RecipeError(f"sweep={text[:80]} must be a key and a list of values, as in sweep=batch_size:[32,64]")
    if key not in known:
        guess = recipe.nearest(key, known)
        raise RecipeError(f"sweep={key}: the recipe has no such key" + (f"; did you mean {guess}?" if guess else ""))
    if key in ("mode", "output", "resume"):
        hint = "write modes=[...]" if key == "mode" else "every run has a folder of its own"
        raise RecipeError(f"sweep={key} is not for a sweep: {hint}")
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise RecipeError(f"sweep={key} lists {twice} twice: keep one")
    return Sweep(key, values)


def _yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError):
        return None


def _mode_and_words(text: str) -> tuple[str, dict[str, str]]:
    try:
        mode, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise RecipeError(f"modes: '{text[:80]}': {str(error).lower()}") from None
    if mode not in MODES:
        guess = recipe.nearest(mode, MODES)
        raise RecipeError(
            f"modes: '{mode[:80]}' is not a mode; "
            + (f"did you mean {guess}? " if guess else "")
            + f"there are: {', '.join(MODES)}"
        )
    odd = next((word for word in words if word.partition("=")[0] in {*OWN_WORDS, "mode"} - {"nproc"}), None)
    if odd:
        raise RecipeError(f"modes: '{text[:80]}': {odd} cannot be set for one entry, only for the whole comparison")
    return mode, _by_key(words)


def _by_key(words: Sequence[str]) -> dict[str, str]:
    return {word.partition("=")[0]: word for word in words}


def _looks_at(traits: Traits, key: str) -> bool:
    """Whether a key makes a difference in a mode: some are for pipelines or workers alone."""
    if key == "nproc":
        return traits.processes != "one"
    if key == "pipeline.stages":
        return traits.staged
    if key.startswith("pipeline."):
        return traits.micro_batches
    if key.startswith("fsdp."):
        return traits.exchanges == "shards"
    return traits.exchanges == "weights" or not key.startswith("local_sgd.")


def _entry(
    source: str | Mapping[str, Any], name: str, mode: str, words: dict[str, str], value: Any, series: str
) -> Entry:
    """An entry held against this machine."""
    nproc = words.pop("nproc", "").partition("=")[2] or None
    chosen = recipe.load(source, *words.values(), f"mode={mode}")
    if chosen.traits.single_device and isinstance(chosen.devices, list) and len(chosen.devices) > 1:
        words["devices"] = f"devices=[{chosen.devices[0]}]"
        chosen = chosen.replace(devices=chosen.devices[:1])
    listed = (*words.values(), f"mode={mode}")
    try:
        launch = launching.launch_to_start(chosen, nproc)
    except RecipeError as error:
        return Entry(name, listed, chosen, value, series, problem=(str(error), error.code))
    if launch is None:  # one process; nproc= stays, or the run would start as many as the machine suggests
        return Entry(name, (*listed, f"nproc={nproc}") if nproc else listed, chosen, value, series)
    if launch.nnodes > 1:
        raise RecipeError(f"compare runs on one node, but NNODES or SLURM say {launch.nnodes}: unset them")
    return Entry(name, (*listed, f"nproc={launch.nproc}"), chosen, value, series, launch.nproc)


def _with_distinct_names(entries: list[Entry]) -> list[Entry]:
    """Identical entries, which show the noise, get a number; so do entries whose folders would have one name."""
    seen: dict[str, int] = {}
    apart: list[Entry] = []
    for entry in entries:
        count = seen[entry.slug] = seen.get(entry.slug, 0) + 1
        number = f" ({count})" if count > 1 else ""
        apart.append(replace(entry, name=entry.name + number, series=entry.series + number))
    return apart


def _with_threads(entries: list[Entry], sweep: Sweep | None) -> list[Entry]:
    """Every entry gets the same cores, unless the user says otherwise; in a sweep over nproc every rank does."""
    cores, most = resources.cores(), max(entry.ranks for entry in entries)
    shared: list[Entry] = []
    for entry in entries:
        ranks = most if sweep and sweep.key == "nproc" else entry.ranks
        threads = entry.recipe.threads or max(1, cores // ranks)
        words = entry.words if entry.recipe.threads else (*entry.words, f"threads={threads}")
        shared.append(replace(entry, threads=threads, words=words))
    return shared
