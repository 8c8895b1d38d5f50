"""Words -> what is tried: the keys that vary, what all trials share, and where on this machine each trial runs.

A key varies by a list of values, `optimizer.lr=[0.01,0.1]`, or by a range, `optimizer.lr=0.001..1`, of which Optuna's
TPE sampler draws values.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import yaml

from trainer import recipe as recipes
from trainer.devices.assignment import named_devices
from trainer.errors import RecipeError, SetupError
from trainer.launch import launching
from trainer.launch.topology import Launch
from trainer.processes import resources
from trainer.recipe import Recipe
from trainer.recipe.known_names import OWN_PHOTOS, check_names
from trainer.recipe.recipe_files import word_value
from trainer.recipe.reflection import kinds
from trainer.recipe.text import shown

OWN_WORDS = ("recipe", "repeats", "trials", "metric", "nproc", "plugin", "output", "resume")
SAMPLED = 20  # trials, where a range is given and nothing is said of their number
RANDOM = 10  # of them are drawn at random before the sampler looks at what was good
MOST = 1000  # combinations
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
FACTOR = 10  # a range whose ends differ by so much is sampled on a logarithmic scale
FIXED = {  # keys that no sweep varies, and what to type instead
    "mode": "every mode trains the same model: compare 'modes=[...]' tells which is fastest",
    "devices": "they say where trials run, one trial each: write devices=[cuda:0,cuda:1]",
    "threads": "they change no result: write one number, or leave it out",
}


@dataclass(frozen=True)
class Dimension:
    """A key that varies: over a list, or over all numbers of a range, both ends included."""

    key: str
    values: tuple[str, ...]  # as they are typed for one run; of a range its ends
    ends: tuple[float, float] | None = None  # None: it is a list
    whole: bool = False  # a range of whole numbers, for the key takes no others

    @property
    def log(self) -> bool:
        """Of a range: whether every factor counts alike, rather than every difference."""
        return self.ends is not None and self.ends[0] > 0 and self.ends[1] >= FACTOR * self.ends[0]

    def typed(self, value: Any) -> str:
        """A value as one types it; a number of a range with four figures."""
        if self.ends is None or self.whole:
            return str(value)
        return f"{min(max(float(f'{value:.4g}'), self.ends[0]), self.ends[1]):.12g}"

    def distribution(self) -> Any:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.ends is None:
            return CategoricalDistribution(self.values)
        return (IntDistribution if self.whole else FloatDistribution)(*self.ends, self.log)

    def __str__(self) -> str:
        if self.ends is None:
            return f"{self.key}={' or '.join(self.values)}"
        return f"{self.key} from {' to '.join(self.values)}" + " on a log scale" * self.log


def dimension(key: str, text: str) -> Dimension | None:
    """The values that `key=text` means; None where it is one value, or no key of a recipe.

    The schema tells a list of values from a list that is one value: `data.mean=[0.5]` is one, `data.mean=[[0.5],[0.4]]`
    are two. Of a size, `data.image_size=[96,128]` are two squares, `data.image_size=[[96,128]]` is one.

    Raises:
        RecipeError: a list or a range that means nothing, with what to type.
    """
    taken = kinds().get(key, ())
    if text.startswith("["):
        alone = list in taken and (int not in taken or str in taken)  # of a size a list is several
        return _listed(key, text, alone) if taken else None
    if not {int, float} & {*taken} or str in taken or ".." not in text:
        return None
    match, whole = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})", text.lower()), float not in taken
    low, high = (float(match[1]), float(match[2])) if match else (math.nan, math.nan)
    if not -math.inf < low < high < math.inf or (whole and not (low.is_integer() and high.is_integer())):
        numbers, example = ("whole numbers", "16..256") if whole else ("numbers", "0.001..0.1")
        line = f"{key}={shown(text)} is not a range: write two {numbers}, the smaller first, as in {key}={example}"
        raise RecipeError(line)
    part = Dimension(key, (), (low, high), whole)
    return Dimension(key, tuple(part.typed(int(end) if whole else end) for end in (low, high)), (low, high), whole)


def _listed(key: str, text: str, alone: bool) -> Dimension | None:
    try:
        values = yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        values = None
    if not isinstance(values, list) or not values:
        raise RecipeError(f"{key}={shown(text)} lists no values: write {key}=[first,second], in quotes for the shell")
    if alone and not any(isinstance(value, list) or value in ("auto", "null") for value in values):
        return None

    def word(value: Any) -> str:
        return f"[{','.join(map(word, value))}]" if isinstance(value, list) else str(value)

    words = tuple(map(word, values))
    if len({repr(word_value(key, text)) for text in words}) < len(words):
        raise RecipeError(f"{key}={shown(text)} has values that are the same: keep one of them")
    return Dimension(key, words)


class SearchSpace:
    """What a sweep was asked for, checked: from the words that no command takes.

    Args:
        source: the recipe's name or file.
        repeats: runs of each trial, with a seed each.
        trials: how many are sampled; None: the default, or, of lists alone, every combination.
        speed: images/s are looked for, rather than the task's metric.

    Raises:
        RecipeError: no trial, or one of them, could run. SetupError: Optuna is not installed.
    """

    def __init__(
        self, source: str, words: Sequence[str], repeats: int = 1, trials: int | None = None, nproc: str | None = None,
        plugin: str | None = None, speed: bool = False,
    ) -> None:  # fmt: skip
        self.source, self.repeats, self.nproc, self.plugin, self.speed = source, repeats, nproc, plugin, speed
        pairs = [word.partition("=") for word in words]
        meant = [dimension(key, text) for key, _, text in pairs]
        self.words = [word for word, part in zip(words, meant, strict=True) if part is None]  # those for every trial
        self.dimensions = [part for part in meant if part is not None]  # the keys that vary
        self.base = recipes.load(source, *self.words)
        _check(self.dimensions, [key for key, *_ in pairs], repeats, trials)
        is_sampled = any(part.ends for part in self.dimensions)
        self.trials = (trials or SAMPLED) if is_sampled else None
        is_chosen = nproc is not None or any(word.startswith("mode=") for word in words)
        if self.base.traits.exchanges in ("gradients", "copies") and not is_chosen:
            self.words.append("mode=single")  # the same maths on one device
            self.base = recipes.load(source, *self.words)
        launching.load_plugin(plugin)
        first = {part.key: part.values[0] for part in self.dimensions}
        ends = [{**first, part.key: value} for part in self.dimensions for value in part.values]
        for values in ends if is_sampled else self.combinations():
            self._check(values)

    def combinations(self) -> list[dict[str, str]]:
        """Of lists alone: the values of every one, the last key changing fastest."""
        keys = [part.key for part in self.dimensions]
        lists = itertools.product(*(part.values for part in self.dimensions))
        return [dict(zip(keys, values, strict=True)) for values in lists]

    def sampled(self, ended: Sequence[tuple[Mapping[str, str], float | None]], larger: bool) -> dict[str, str]:
        """Values of the next trial, drawn from those so far; None: it failed, or has not ended. `larger` is better."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=(self.base.seed + len(ended)) % 2**32)
        study = optuna.create_study(sampler=sampler, direction="maximize" if larger else "minimize")
        over = {part.key: part.distribution() for part in self.dimensions}
        for values, value in ended:
            drawn = {part.key: float(values[part.key]) if part.ends else values[part.key] for part in self.dimensions}
            state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
            study.add_trial(optuna.trial.create_trial(state=state, value=value, params=drawn, distributions=over))
        params = study.ask(over).params
        return {part.key: part.typed(params[part.key]) for part in self.dimensions}

    def typed(self, values: Mapping[str, str]) -> list[str]:
        """What one types to train with a trial's values, on whichever devices there are."""
        own = [f"{key}={value}" for key, value in (("plugin", self.plugin), ("nproc", self.nproc)) if value is not None]
        if self.base.devices != "auto" and self.base.traits.single_device:
            own.append(f"devices=[{self.base.devices[0]}]")
        own += [word for word in self.words if not word.startswith(("devices=", "threads="))]
        return [f"recipe={self.source}", *own, *(f"{key}={value}" for key, value in values.items())]

    def _check(self, values: Mapping[str, str]) -> None:
        """Raises RecipeError where a trial could not run with these values."""
        words = [f"{key}={value}" for key, value in values.items()]
        try:
            chosen = recipes.load(self.source, *self.words, *words)
            if self.plugin is None:
                check_names(chosen)
            self._launch(chosen)
        except RecipeError as error:
            raise RecipeError(f"a trial with {' '.join(words)} cannot run: {error}") from None

    def _launch(self, recipe: Recipe) -> Launch | None:
        """How a trial starts: `devices` are those of the sweep, and a trial gets as many as it needs."""
        several = int(self.nproc) if self.nproc and self.nproc.isdigit() else None
        needs = 1 if recipe.traits.single_device else several
        if needs and recipe.devices != "auto":
            recipe = recipe.replace(devices=recipe.devices[:needs])
        return launching.launch_to_start(recipe, self.nproc)

    def count(self) -> int:
        """Trials."""
        return self.trials or math.prod(len(part.values) for part in self.dimensions)

    def asked(self) -> dict[str, Any]:
        """What a folder is bound to: all but how many trials and repeats there are to be."""
        return {
            "swept": {part.key: str(part) for part in self.dimensions},
            "nproc": self.nproc,
            "plugin": self.plugin,
            "settings": self.base.replace(output=None, resume=None).model_dump(mode="json"),
            **({"metric": "speed"} if self.speed else {}),
        }

    def places(self) -> list[list[str]]:
        """Words of where trials run at the same time: a device each, or cores. Raises RecipeError.

        Never more than there are runs. Speeds are measured one at a time.
        """
        recipe, runs = self.base, 1 if self.speed else self.count() * self.repeats
        launch = self._launch(recipe)
        if launch is not None and launch.nnodes > 1:
            raise RecipeError(f"sweep runs on one node, but NNODES or SLURM say {launch.nnodes}: unset them")
        ranks, cores = launch.nproc if launch else 1, resources.cores()
        names = named_devices(recipe, resources.cuda_wanted(recipe))
        cards = [name for name in names if name != "cpu"]
        if recipe.traits.many_devices and ranks == 1:
            groups = [names]
        elif cards:
            groups = [cards[n : n + ranks] for n in range(0, len(cards) - ranks + 1, ranks)][:runs]
        else:
            fit = len(names) if len(names) > 1 and recipe.traits.single_device else 0
            groups = [["cpu"]] * min(runs, fit or max(1, cores // (ranks * (recipe.threads or 1))))
        share = max(1, cores // (len(groups) * ranks))
        words = [f"threads={recipe.threads or share}"]
        words += [f"nproc={ranks}"] * (recipe.traits.processes != "one")
        if recipe.data.name in OWN_PHOTOS and recipe.data.workers is None:
            words.append(f"data.workers={share}")
        return [[f"devices=[{','.join(group)}]", *words] for group in groups]


def _check(dimensions: Sequence[Dimension], typed: Sequence[str], repeats: int, trials: int | None) -> None:
    """Raises RecipeError, SetupError."""
    for key in (part.key for part in dimensions):
        if key in FIXED:
            raise RecipeError(f"{key}= is not for a sweep: {FIXED[key]}")
        if typed.count(key) > 1:
            raise RecipeError(f"{key} is given twice: keep the list or the range")
        if key == "seed" and repeats > 1:
            raise RecipeError(f"seed=[...] and repeats={repeats} both give the seeds: keep repeats=")
    count = math.prod(len(part.values) for part in dimensions)
    if sampled := [part for part in dimensions if part.ends]:
        if find_spec("optuna") is None:
            line = f"{sampled[0]} is a range, which Optuna samples, and that is not installed: pip install optuna"
            raise SetupError(f"{line}, or type a list: {sampled[0].key}=[{','.join(sampled[0].values)}]")
    elif count == 1:
        what = f"{dimensions[0]} is one trial" if dimensions else "every key has one value"
        raise RecipeError(
            f"{what}: type the values to try, as in optimizer.lr=[0.01,0.03,0.1], or a range, optimizer.lr=0.001..1 "
            "(of a key whose value is a list: data.mean=[[0.5],[0.4]])"
        )
    elif trials or count > MOST:
        line = f"lists are tried in every combination, here {count:,}"
        more = "trials= is for ranges, leave it out" if trials else f"at most {MOST:,}, shorten the lists"
        raise RecipeError(f"{line}: {more}, or type a range, as in optimizer.lr=0.001..1")
