"""Words -> what is tried: the keys that vary, what all trials share, and where on this machine each trial runs.

A key varies by a list of values, `optimizer.lr=[0.01,0.1]`, or by a range, `optimizer.lr=0.001..1`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import yaml

from trainer import recipe as recipes
from trainer.devices.assignment import present
from trainer.errors import RecipeError, SetupError
from trainer.launch import launching
from trainer.processes import resources
from trainer.recipe import Recipe
from trainer.recipe.known_names import OWN_PHOTOS, check_names
from trainer.recipe.recipe_files import word_value
from trainer.recipe.reflection import kinds
from trainer.recipe.text import shown

OWN_WORDS = ("recipe", "repeats", "trials", "nproc", "plugin", "output", "resume")
SAMPLED = 20  # trials, where a range is given and nothing is said of their number
MOST = 1000  # combinations
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
FACTOR = 10  # a range whose ends differ by so much is sampled on a logarithmic scale
WIDEST = 100  # characters of a trial's folder
FIXED = {  # keys that no sweep varies, and what to type instead
    "mode": "every mode trains the same model: compare 'modes=[...]' tells which is fastest",
    "devices": "they say where trials run, one trial each: write devices=[cuda:0,cuda:1]",
    "threads": "they change no result: write one number, or leave it out",
}


@dataclass(frozen=True)
class Choices:
    """Values of a key, as they are typed for one run."""

    key: str
    values: tuple[str, ...]

    def ends(self) -> tuple[str, ...]:
        return self.values

    def __str__(self) -> str:
        return f"{self.key}={' or '.join(self.values)}"


@dataclass(frozen=True)
class Range:
    """All numbers of a key from `low` to `high`, both included; whole ones where the key takes no others."""

    key: str
    low: float
    high: float
    whole: bool

    @property
    def log(self) -> bool:
        """Whether every factor counts alike, rather than every difference."""
        return self.low > 0 and self.high >= FACTOR * self.low

    def typed(self, value: float) -> str:
        """A number of the range as one types it, with four figures."""
        return str(round(value)) if self.whole else f"{min(max(float(f'{value:.4g}'), self.low), self.high):.12g}"

    def ends(self) -> tuple[str, ...]:
        return self.typed(self.low), self.typed(self.high)

    def __str__(self) -> str:
        return f"{self.key} from {self.typed(self.low)} to {self.typed(self.high)}" + " on a log scale" * self.log


Dimension = Choices | Range


def dimension(key: str, text: str) -> Dimension | None:
    """The values that `key=text` means; None where it is one value, or no key of a recipe.

    The schema tells a list of values from a list that is one value: `data.mean=[0.5]` is one, `data.mean=[[0.5],[0.4]]`
    are two.

    Raises:
        RecipeError: a list or a range that means nothing, with what to type.
    """
    taken = kinds().get(key, ())
    if text.startswith("["):
        return _choices(key, text, list in taken) if taken else None
    if not {int, float} & {*taken} or str in taken or ".." not in text:
        return None
    match, whole = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})", text.lower()), float not in taken
    low, high = (float(match[1]), float(match[2])) if match else (math.nan, math.nan)
    if not -math.inf < low < high < math.inf or (whole and not (low.is_integer() and high.is_integer())):
        numbers, example = ("whole numbers", "16..256") if whole else ("numbers", "0.001..0.1")
        line = f"{key}={shown(text)} is not a range: write two {numbers}, the smaller first, as in {key}={example}"
        raise RecipeError(line)
    return Range(key, low, high, whole)


def _choices(key: str, text: str, lists: bool) -> Choices | None:
    try:
        values = yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        values = None
    if not isinstance(values, list) or not values:
        raise RecipeError(f"{key}={shown(text)} lists no values: write {key}=[first,second], in quotes for the shell")
    if lists and not any(isinstance(value, list) for value in values):
        return None
    seen: dict[str, str] = {}
    for number, value in enumerate(values, 1):
        plain = isinstance(value, list) and not any(isinstance(inner, list | dict) for inner in value)
        word = f"[{','.join(map(str, value))}]" if plain else value
        if not isinstance(word, str) or not word:
            raise RecipeError(f"{key}: {shown(value) or 'an empty value'} in a list to try is not a value of this key")
        same = seen.setdefault(repr(word_value(key, word)), word)
        if len(seen) < number:
            raise RecipeError(f"{key} lists {same} and {word}, which are the same: keep one")
    return Choices(key, tuple(seen.values()))


@dataclass(frozen=True)
class SweepTrial:
    """One choice of values, in the order in which trials run."""

    number: int  # from 1 on
    values: Mapping[str, str]  # of the swept keys, as one types them

    @property
    def words(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def name(self) -> str:
        return " ".join(self.words)

    def folder(self, seed: int | None) -> str:
        """The name of its run with the recipe's own seed, or with another one."""
        text = "-".join([*self.words, *([f"seed={seed}"] if seed is not None else [])])
        return f"{self.number:03d}-" + re.sub(r"[^A-Za-z0-9_.=+]+", "-", text)[:WIDEST].strip("-")


@dataclass(frozen=True)
class SearchSpace:
    """What a sweep was asked for, checked."""

    source: str  # the recipe's name or file
    typed_words: tuple[str, ...]  # of the recipe, as they were typed
    words: tuple[str, ...]  # those for every trial; with `mode=single` where one device is enough for a trial
    dimensions: tuple[Dimension, ...]  # the keys that vary
    trials: int | None  # how many are sampled; None where lists are tried in every combination
    repeats: int  # runs of each trial, with a seed each
    nproc: str | None
    plugin: str | None
    base: Recipe  # the recipe of the words, without the keys that vary

    @classmethod
    def of(
        cls, source: str, words: Sequence[str], repeats: int, trials: int | None, nproc: str | None, plugin: str | None
    ) -> SearchSpace:
        """From the words that no command takes. Raises RecipeError, SetupError."""
        pairs = [word.partition("=") for word in words]
        meant = [dimension(key, text) for key, _, text in pairs]
        fixed = [word for word, part in zip(words, meant, strict=True) if part is None]
        dimensions = tuple(part for part in meant if part is not None)
        base = recipes.load(source, *fixed)
        _check(dimensions, [key for key, *_ in pairs], repeats, trials)
        if any(isinstance(part, Range) for part in dimensions):
            trials = trials or SAMPLED
        chosen = any(key == "mode" for key, _, _ in pairs)
        if base.traits.exchanges in ("gradients", "copies") and nproc is None and not chosen:
            fixed.append("mode=single")  # the same maths on one device
            base = recipes.load(source, *fixed)
        launching.load_plugin(plugin)
        space = cls(source, tuple(words), tuple(fixed), dimensions, trials, repeats, nproc, plugin, base)
        for values in space.probes():
            space.check(values)
        return space

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def keys(self) -> list[str]:
        return [part.key for part in self.dimensions]

    @property
    def seeds(self) -> list[int]:
        return [self.base.seed + repeat for repeat in range(self.repeats)]

    @property
    def launch_words(self) -> list[str]:
        """Those that are of no recipe."""
        return [f"{key}={value}" for key in ("plugin", "nproc") if (value := getattr(self, key)) is not None]

    def combinations(self) -> list[SweepTrial]:
        """Of lists alone: every one, the last key changing fastest."""
        lists = [[(part.key, value) for value in part.ends()] for part in self.dimensions]
        return [SweepTrial(number, dict(values)) for number, values in enumerate(itertools.product(*lists), 1)]

    def probes(self) -> Iterator[Mapping[str, str]]:
        """Values whose recipes are checked before anything starts: all combinations of lists; of ranges their ends."""
        if self.trials is None:
            yield from (trial.values for trial in self.combinations())
            return
        first = {part.key: part.ends()[0] for part in self.dimensions}
        yield from ({**first, part.key: value} for part in self.dimensions for value in part.ends())

    def typed(self, values: Mapping[str, str]) -> list[str]:
        """What one types to train with a trial's values, on whichever devices there are."""
        shared = [word for word in self.words if not word.startswith(("devices=", "threads="))]
        more = self.launch_words
        if self.base.devices != "auto" and self.base.traits.single_device:
            more.append(f"devices=[{self.base.devices[0]}]")
        return [f"recipe={self.source}", *more, *shared, *(f"{key}={value}" for key, value in values.items())]

    def check(self, values: Mapping[str, str]) -> None:
        """Raises RecipeError where a trial could not run with these values."""
        words = [f"{key}={value}" for key, value in values.items()]
        try:
            chosen = recipes.load(self.source, *self.words, *words)
            if self.plugin is None:
                check_names(chosen)
            launching.launch_to_start(_on_one_place(chosen, self.nproc), self.nproc)
        except RecipeError as error:
            raise RecipeError(f"a trial with {' '.join(words)} cannot run: {error}") from None

    def count(self) -> int:
        """Trials."""
        return self.trials or math.prod(len(part.ends()) for part in self.dimensions)

    def asked(self) -> dict[str, Any]:
        """What a folder is bound to: all but how many trials and repeats there are to be."""
        return {
            "swept": {part.key: str(part) for part in self.dimensions},
            "nproc": self.nproc,
            "plugin": self.plugin,
            "settings": self.base.replace(output=None, resume=None).model_dump(mode="json"),
        }


def _check(dimensions: Sequence[Dimension], typed: Sequence[str], repeats: int, trials: int | None) -> None:
    """Raises RecipeError, SetupError."""
    for key in (part.key for part in dimensions):
        if key in FIXED:
            raise RecipeError(f"{key}= is not for a sweep: {FIXED[key]}")
        if typed.count(key) > 1:
            raise RecipeError(f"{key} is given twice: keep the list or the range")
        if key == "seed" and repeats > 1:
            raise RecipeError(f"seed=[...] and repeats={repeats} both give the seeds: keep repeats=")
    if sampled := [part for part in dimensions if isinstance(part, Range)]:
        if find_spec("optuna") is None:
            instead = f"{sampled[0].key}=[{','.join(sampled[0].ends())}]"
            line = f"{sampled[0]} is a range, which Optuna samples, and that is not installed"
            raise SetupError(f"{line}: pip install optuna, or type a list: {instead}")
        return
    count = math.prod(len(part.ends()) for part in dimensions)
    if count == 1:
        what = f"{dimensions[0]} is one trial" if dimensions else "every key has one value"
        raise RecipeError(
            f"{what}: type the values to try, as in optimizer.lr=[0.01,0.03,0.1], or a range, optimizer.lr=0.001..1 "
            "(of a key whose value is a list: data.mean=[[0.5],[0.4]])"
        )
    if trials:
        raise RecipeError(
            f"trials={trials} is for ranges, as in optimizer.lr=0.001..1; lists are tried in every combination, here "
            f"{count:,}: leave trials= out"
        )
    if count > MOST:
        line = f"{count:,} combinations are more than {MOST:,}"
        raise RecipeError(f"{line}: shorten the lists, or type ranges with trials=100")


def _on_one_place(recipe: Recipe, nproc: str | None) -> Recipe:
    """A trial's recipe as it runs: `devices` are those of the sweep, and a trial gets as many as it needs."""
    needs = 1 if recipe.traits.single_device else int(nproc) if nproc and nproc.isdigit() else None
    if needs and recipe.devices != "auto":
        return recipe.replace(devices=recipe.devices[:needs])
    return recipe


@dataclass(frozen=True)
class Places:
    """Where trials run at the same time."""

    devices: tuple[tuple[str, ...], ...]  # of each place, as recipes write them
    ranks: int  # processes of a trial
    threads: int  # in each
    several: bool  # whether the trials' mode can have several processes
    workers: int | None  # processes that read photos, a rank; None where the data is none of that

    @classmethod
    def of(cls, space: SearchSpace) -> Places:
        """As many as this machine has devices for, or cores; never more than runs. Raises RecipeError."""
        recipe, runs = space.base, space.count() * space.repeats
        launch = launching.launch_to_start(_on_one_place(recipe, space.nproc), space.nproc)
        if launch is not None and launch.nnodes > 1:
            raise RecipeError(f"sweep runs on one node, but NNODES or SLURM say {launch.nnodes}: unset them")
        ranks, cores = launch.nproc if launch else 1, resources.cores()
        cuda = resources.cuda_wanted(recipe)
        names = [f"cuda:{n}" for n in range(cuda)] if recipe.devices == "auto" else present(recipe.devices, cuda)
        listed = [name for name in names if name != "cpu"]
        if listed:
            width = 1 if recipe.traits.single_device else ranks if ranks > 1 else len(listed)
            groups = [tuple(listed[n : n + width]) for n in range(0, len(listed) - width + 1, width)][:runs]
        else:
            fit = len(names) if len(names) > 1 and recipe.traits.single_device else 0
            fit = fit or max(1, cores // (ranks * (recipe.threads or 1)))
            groups = [("cpu",)] * min(runs, fit)
        threads = recipe.threads or max(1, cores // (len(groups) * ranks))
        reads = recipe.data.name in OWN_PHOTOS and recipe.data.workers is None
        workers = max(1, cores // (len(groups) * ranks)) if reads else None
        return cls(tuple(groups), ranks, threads, recipe.traits.processes != "one", workers)

    def words(self, place: int) -> list[str]:
        """Of a run at a place."""
        devices = self.devices[place]
        words = [f"devices=[{','.join(devices)}]", f"threads={self.threads}"]
        words += [f"nproc={self.ranks}"] * self.several
        return words + [f"data.workers={self.workers}"] * (self.workers is not None)

    def __str__(self) -> str:
        count = len(self.devices)
        at_once = f"{count} at a time" if count > 1 else "one at a time"
        what = f"{self.threads} CPU thread{'s' * (self.threads > 1)} each"
        if self.devices[0] != ("cpu",):
            return f"{at_once}, on {' | '.join(','.join(names) for names in self.devices)}"
        return f"{at_once}, {f'{self.ranks} processes of ' * (self.ranks > 1)}{what}"
