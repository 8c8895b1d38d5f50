"""Search space of a sweep: the keys that vary, what all trials share, and where each trial runs.

A key varies over a list of values, `optimizer.lr=[0.01,0.1]`, or over a range,
`optimizer.lr=0.001..1`, from which Optuna's TPE sampler draws values.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from trainer import recipe as recipes
from trainer.devices.assignment import named_devices
from trainer.errors import RecipeError, SetupError, load_extra
from trainer.launch import launching
from trainer.launch.topology import Launch
from trainer.processes import resources
from trainer.recipe import Recipe, format_value
from trainer.recipe.checks import check_names
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.recipe_files import parse_value
from trainer.recipe.reflection import list_key_types

OWN_WORDS = ("recipe", "repeats", "trials", "metric", "nproc", "plugin", "output", "resume")
# Default number of trials if there is a range.
SAMPLED = 20
# Number of random trials before the sampler uses their results.
RANDOM = 10
# Maximum number of combinations of lists; a sweep with more combinations is refused.
MOST = 1000
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
# A range of positive numbers is sampled on a logarithmic scale if its upper end is at least this
# multiple of its lower end.
FACTOR = 10
# Keys that a sweep cannot vary, and what to type instead.
FIXED = {
    "mode": "every mode trains the same model: compare 'modes=[...]' tells which is fastest",
    "devices": "they say where trials run, one trial each: write devices=[cuda:0,cuda:1]",
    "task.metric": "it ranks the trials: write one metric, as in task.metric=f1_macro",
    "threads": "they change no result: write one number, or leave it out",
}


class TrialSample(NamedTuple):
    """Fold and seed of one run of a trial.

    Attributes:
        label: Name of the run in sweep.json: the seed; with folds, the fold, followed by the seed
            if there are several.
        words: Arguments that distinguish the run from others of its trial: data.fold, and any seed
            except the recipe's.
    """

    label: int | str
    words: list[str]


@dataclass(frozen=True)
class Dimension:
    """Recipe key that varies over a list or a range.

    Attributes:
        key: Name of the key.
        values: Values as in an override; for a range, its ends.
        ends: Both ends of a range, which are included; None for a list.
        whole: Whether the range has whole numbers only, because the key accepts only these.
    """

    key: str
    values: tuple[str, ...]
    ends: tuple[float, float] | None = None
    whole: bool = False

    @property
    def log(self) -> bool:
        """Whether a range is sampled on a logarithmic scale."""
        if self.ends is None:
            return False
        low, high = self.ends
        return low > 0 and high >= FACTOR * low

    def typed(self, value: Any) -> str:
        """Return the text of `value` in an override, without the key.

        Numbers of a range are rounded to four significant digits, unless they are whole.
        """
        if self.ends is None:
            return str(value)
        if self.whole:
            return str(int(value))
        low, high = self.ends
        # Rounding can lead out of the range, so the rounded number is limited to the range.
        rounded = min(max(float(f"{value:.4g}"), low), high)
        return f"{rounded:.12g}"

    def distribution(self) -> Any:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.ends is None:
            return CategoricalDistribution(self.values)
        kind = IntDistribution if self.whole else FloatDistribution
        return kind(*self.ends, self.log)

    def __str__(self) -> str:
        if self.ends is None:
            return f"{self.key}={' or '.join(self.values)}"
        scale = " on a log scale" if self.log else ""
        return f"{self.key} from {' to '.join(self.values)}{scale}"


def parse_dimension(key: str, text: str) -> Dimension | None:
    """Parse `key=text` into a dimension; return None for a single value or an unknown key.

    The schema distinguishes a list of values from a list that is one value. For example,
    `data.mean=[0.5]` is one value, and `data.mean=[[0.5],[0.4]]` lists two values. For a size,
    `data.image_size=[96,128]` lists two squares, and `data.image_size=[[96,128]]` lists one size.

    Raises:
        RecipeError: The list or the range is wrong.
    """
    accepted = set(list_key_types().get(key, ()))
    # A value of these keys contains no comma, so brackets may be left out.
    has_no_comma = accepted and (key == "data.fold" or not {str, list} & accepted)
    if has_no_comma and "," in text and not text.startswith("["):
        text = f"[{text}]"
    if text.startswith("["):
        if not accepted:
            return None
        # A key for a size accepts a whole number as well as a list, so [96,128] is two sizes.
        is_list_valued = list in accepted and (int not in accepted or str in accepted)
        return _parse_list(key, text, is_list_valued)
    if not {int, float} & accepted or str in accepted or ".." not in text:
        return None
    whole = float not in accepted
    match = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})", text.lower())
    low = high = math.nan
    if match:
        low = float(match[1])
        high = float(match[2])
    is_range = -math.inf < low < high < math.inf
    if not is_range or (whole and not (low.is_integer() and high.is_integer())):
        rule = "two numbers"
        example = "0.001..0.1"
        if whole:
            rule = "two whole numbers"
            example = "16..256"
        raise RecipeError(
            f"{key}={format_value(text)} is not a range: write {rule}, the smaller first, as in "
            f"{key}={example}"
        )
    part = Dimension(key, (), (low, high), whole)
    return replace(part, values=(part.typed(low), part.typed(high)))


def _parse_list(key: str, text: str, is_list_valued: bool) -> Dimension | None:
    """Return the dimension of a list; None if the list is one value of a key with list values."""
    try:
        values = yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        values = None
    if not isinstance(values, list) or not values:
        raise RecipeError(
            f"{key}={format_value(text)} lists no values: write {key}=[first,second], in quotes "
            "for the shell"
        )
    has_whole_values = any(isinstance(value, list) or value in ("auto", "null") for value in values)
    if is_list_valued and not has_whole_values:
        return None

    def render(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(render, value))}]"
        return str(value)

    rendered = tuple(map(render, values))
    distinct = {repr(parse_value(key, value)) for value in rendered}
    if len(distinct) < len(rendered):
        raise RecipeError(
            f"{key}={format_value(text)} has values that are the same: keep one of them"
        )
    return Dimension(key, rendered)


class SearchSpace:
    """Validated values to try, and the settings that all trials share.

    Attributes:
        words: Overrides of every trial.
        dimensions: Keys that vary, except data.fold.
        folds: Listed values of data.fold. Every trial runs with each of them. Empty if no list was
            typed.
        base: Recipe without the values of the dimensions.
        trials: Number of trials to sample; None if every combination is tried.
    """

    def __init__(
        self,
        source: str,
        words: Sequence[str],
        repeats: int = 1,
        trials: int | None = None,
        nproc: str | None = None,
        plugin: str | None = None,
        speed: bool = False,
    ) -> None:
        """Parse and check the arguments.

        Args:
            source: Name or file of the recipe.
            words: Overrides, lists and ranges.
            repeats: Number of seeds with which each trial runs, in each fold if folds are listed.
            trials: Number of trials to sample. None: `SAMPLED` if there is a range; if only lists
                vary, nothing is sampled.
            nproc: Value of nproc=; None if it was not given.
            plugin: Value of plugin=; None if it was not given.
            speed: Whether images/s are compared instead of the task's metric.

        Raises:
            RecipeError: A trial could not run.
            SetupError: There is a range, but Optuna is not installed.
        """
        self.source = source
        self.repeats = repeats
        self.nproc = nproc
        self.plugin = plugin
        self.speed = speed
        self.words: list[str] = []
        self.dimensions: list[Dimension] = []
        self.folds: tuple[str, ...] = ()
        swept = []
        keys = []
        for word in words:
            key, _, text = word.partition("=")
            keys.append(key)
            part = parse_dimension(key, text)
            if part is None:
                self.words.append(word)
                continue
            swept.append(part)
            if key == "data.fold":
                self.folds = part.values
            else:
                self.dimensions.append(part)
        self.swept = {part.key: str(part) for part in swept}
        self.base = recipes.load(source, *self.words)
        _check_dimensions(swept, keys, repeats, trials)
        is_sampled = any(part.ends for part in self.dimensions)
        self.trials = (trials or SAMPLED) if is_sampled else None
        is_chosen = nproc is not None or "mode" in keys
        if self.base.traits.exchanges in ("gradients", "copies") and not is_chosen:
            # Modes that exchange gradients or copies compute the same as `single`, which needs one
            # device per trial. So `single` is used unless the user chose a mode or nproc=.
            self.words.append("mode=single")
            self.base = recipes.load(source, *self.words)
        launching.load_plugin(plugin)
        first = {part.key: part.values[0] for part in self.dimensions}
        if "null" in self.folds:
            raise RecipeError(f"{self.swept['data.fold']}: null is no fold: leave it out")
        for fold in self.folds:
            self._check({**first, "data.fold": fold})
        if len({fold.partition("/")[2] for fold in self.folds}) > 1:
            raise RecipeError(
                f"{self.swept['data.fold']}: these belong to different divisions, so they overlap: "
                "type folds of the same number, as in data.fold=[1/3,2/3,3/3]"
            )
        if not is_sampled:
            for values in self.combinations():
                self._check(values)
            return
        # Samples are drawn later, so each end is checked with the first value of every other key.
        for part in self.dimensions:
            for value in part.values:
                self._check({**first, part.key: value})

    def combinations(self) -> list[dict[str, str]]:
        """Return the values of every combination of lists; the last key changes fastest."""
        keys = [part.key for part in self.dimensions]
        lists = itertools.product(*(part.values for part in self.dimensions))
        return [dict(zip(keys, values, strict=True)) for values in lists]

    def samples(self) -> list[TrialSample]:
        """List the runs of each trial: all folds with the first seed, then with the next."""
        runs = []
        for repeat in range(self.repeats):
            seed = self.base.seed + repeat
            words = [f"seed={seed}"] if repeat else []
            if not self.folds:
                runs.append(TrialSample(seed, words))
            for fold in self.folds:
                label = f"{fold} seed={seed}" if self.repeats > 1 else fold
                runs.append(TrialSample(label, [f"data.fold={fold}", *words]))
        return runs

    def sampled(
        self, ended: Sequence[tuple[Mapping[str, str], float | None]], larger: bool
    ) -> dict[str, str]:
        """Sample the values of the next trial.

        Args:
            ended: Pairs (values, metric) of the trials so far. The metric is None for a trial that
                failed or has not ended.
            larger: Whether larger metrics are better.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = (self.base.seed + len(ended)) % 2**32
        sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed)
        direction = "maximize" if larger else "minimize"
        study = optuna.create_study(sampler=sampler, direction=direction)
        distributions = {part.key: part.distribution() for part in self.dimensions}
        states = optuna.trial.TrialState
        for values, value in ended:
            params: dict[str, Any] = {**values}
            for part in self.dimensions:
                if part.ends:
                    params[part.key] = float(params[part.key])
            state = states.FAIL if value is None else states.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(
                    state=state, value=value, params=params, distributions=distributions
                )
            )
        params = study.ask(distributions).params
        return {part.key: part.typed(params[part.key]) for part in self.dimensions}

    def typed(self, values: Mapping[str, str]) -> list[str]:
        """Return the arguments that train with a trial's values.

        The overrides devices= and threads= are left out, because they say where the trials of the
        sweep run. A mode with a single device gets the first of the devices that the user named.
        """
        own = []
        if self.plugin is not None:
            own.append(f"plugin={self.plugin}")
        if self.nproc is not None:
            own.append(f"nproc={self.nproc}")
        if self.base.devices != "auto" and self.base.traits.single_device:
            own.append(f"devices=[{self.base.devices[0]}]")
        own += [word for word in self.words if not word.startswith(("devices=", "threads="))]
        return [f"recipe={self.source}", *own, *(f"{key}={value}" for key, value in values.items())]

    def _check(self, values: Mapping[str, str]) -> None:
        """Raise RecipeError if a trial with these values cannot run."""
        words = [f"{key}={value}" for key, value in values.items()]
        try:
            chosen = recipes.load(self.source, *self.words, *words)
            # Trials that differ only in a key without effect would train the same model twice.
            for note in recipes.notes_on_idle(self.source, *self.words, *words):
                if note.partition("=")[0] in values:
                    raise RecipeError(note)
            if self.plugin is None:
                check_names(chosen)
            self._launch(chosen)
        except RecipeError as error:
            raise RecipeError(f"a trial with {' '.join(words)} cannot run: {error}") from None

    def _launch(self, recipe: Recipe) -> Launch | None:
        """Return the ranks to start for a trial; None if no ranks have to be started.

        The trial uses the first of the sweep's devices, and only as many as it needs.
        """
        count = None
        if recipe.traits.single_device:
            count = 1
        elif self.nproc and self.nproc.isdigit():
            count = int(self.nproc)
        if count and recipe.devices != "auto":
            recipe = recipe.replace(devices=recipe.devices[:count])
        return launching.launch_to_start(recipe, self.nproc)

    def count(self) -> int:
        """Return the number of trials."""
        return self.trials or math.prod(len(part.values) for part in self.dimensions)

    def asked(self) -> dict[str, Any]:
        """Return the settings in which a resumed sweep must agree with the stopped one.

        The arguments trials=, repeats=, output= and resume= are left out, because they may differ.
        """
        kept = {
            "swept": self.swept,
            "nproc": self.nproc,
            "plugin": self.plugin,
            "settings": self.base.replace(output=None, resume=None).model_dump(mode="json"),
        }
        if self.speed:
            kept["metric"] = "speed"
        return kept

    def places(self) -> list[list[str]]:
        """Return the arguments of each worker slot; one trial runs in each slot at a time.

        A slot is a group of devices, or some cores. There are no more slots than runs. Speeds are
        measured in one slot, because runs at the same time would slow each other down.

        Raises:
            RecipeError: The launch spans several nodes, or there are no such devices.
        """
        recipe = self.base
        runs = 1 if self.speed else self.count() * len(self.samples())
        launch = self._launch(recipe)
        if launch is not None and launch.nnodes > 1:
            raise RecipeError(
                f"sweep runs on one node, but NNODES or SLURM say {launch.nnodes}: unset them"
            )
        ranks = launch.nproc if launch else 1
        cores = resources.count_cores()
        names = named_devices(recipe, resources.count_requested_cuda(recipe))
        gpus = [name for name in names if name != "cpu"]
        if recipe.traits.many_devices and ranks == 1:
            groups = [names]
        elif gpus:
            starts = range(0, len(gpus) - ranks + 1, ranks)
            groups = [gpus[start : start + ranks] for start in starts][:runs]
        else:
            if len(names) > 1 and recipe.traits.single_device:
                count = len(names)
            else:
                count = max(1, cores // (ranks * (recipe.threads or 1)))
            groups = [["cpu"]] * min(runs, count)
        cores_per_rank = max(1, cores // (len(groups) * ranks))
        words = [f"threads={recipe.threads or cores_per_rank}"]
        if recipe.traits.processes != "one":
            words.append(f"nproc={ranks}")
        if recipe.data.name in OWN_PHOTOS and recipe.data.workers is None:
            words.append(f"data.workers={cores_per_rank}")
        return [[f"devices=[{','.join(group)}]", *words] for group in groups]


def _check_dimensions(
    dimensions: Sequence[Dimension], typed: Sequence[str], repeats: int, trials: int | None
) -> None:
    """Check that the dimensions form a valid sweep.

    Args:
        dimensions: Keys that vary.
        typed: All keys of the command, with repetitions.
        repeats: Runs of each trial.
        trials: Value of trials=; None if it was not given.

    Raises:
        RecipeError: A key cannot be swept or is given twice, or the number of trials is not
            allowed.
        SetupError: There is a range, but Optuna is not installed.
    """
    for part in dimensions:
        key = part.key
        if key in FIXED:
            raise RecipeError(f"{key}= is not for a sweep: {FIXED[key]}")
        if typed.count(key) > 1:
            raise RecipeError(f"{key} is given twice: keep the list or the range")
        if key == "seed" and repeats > 1:
            raise RecipeError(
                f"seed=[...] and repeats={repeats} both give the seeds: keep repeats="
            )
    count = math.prod(len(part.values) for part in dimensions)
    ranges = [part for part in dimensions if part.ends]
    if ranges:
        try:
            load_extra(f"{ranges[0]} is a range, which", "optuna")
        except SetupError as error:
            raise SetupError(
                f"{error}, or type a list: {ranges[0].key}=[{','.join(ranges[0].values)}]"
            ) from None
    elif count == 1:
        problem = "every key has one value"
        if dimensions:
            problem = f"{dimensions[0]} is one trial"
        raise RecipeError(
            f"{problem}: type the values to try, as in optimizer.lr=[0.01,0.03,0.1], or a range, "
            "optimizer.lr=0.001..1 (of a key whose value is a list: data.mean=[[0.5],[0.4]])"
        )
    elif trials or count > MOST:
        remedy = f"at most {MOST:,}, shorten the lists"
        if trials:
            remedy = "trials= is for ranges, leave it out"
        raise RecipeError(
            f"lists are tried in every combination, here {count:,}: {remedy}, or type a range, as "
            "in optimizer.lr=0.001..1"
        )
