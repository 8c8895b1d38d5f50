"""Recipes: defaults < YAML < `key=value` words, checked completely before anything heavy is imported.

`load` is the whole interface: it returns a frozen `Recipe` or raises a `RecipeError` whose one line names the key and
the nearest thing that works. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from trainer.errors import RecipeError

Mode = Literal["single", "dp", "ddp", "split", "pipeline", "local_sgd", "hogwild"]
MODES: tuple[str, ...] = get_args(Mode)
MANY_PROCESS_MODES = ("ddp", "local_sgd", "hogwild")  # and pipeline under a schedule over processes
MANY_DEVICE_MODES = ("dp", "split", "pipeline")  # in one process
STREAMS = "streams"  # the one pipeline schedule that runs in one process
Schedule = Literal[
    "streams", "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"
]

MAX_BYTES, MAX_ALIASES, MAX_DEPTH = 256 * 1024, 20, 20
DEVICE = r"cpu|cuda(:\d{1,3})?"


def _devices(value: Any) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list) or not value:
        example = value if isinstance(value, str) and re.fullmatch(DEVICE, value) else "cuda:0"
        raise ValueError(f"must be auto or a list, as in devices=[{example}]")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(DEVICE, name):
            raise ValueError(f"'{_shown(name)}' is not a device: write cpu, cuda or cuda:0")
    return value


def _count(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError("must be auto or a number, as in 8")
    return value


def _cuts(value: Any) -> Any:
    if value == "auto":
        return value
    names = [str(name) if type(name) is int else name for name in value] if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be auto or a list of names, as in [layer2.3] or ['0.3']")
    return names


Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Devices = Annotated[Literal["auto"] | list[str], BeforeValidator(_devices)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelRecipe(_Section):
    name: str = "cnn"
    weights: str | None = None  # torchvision's name of published weights, or DEFAULT
    init_from: str | None = None  # a run folder, checkpoint or .safetensors file to start from
    num_classes: Positive | None = None  # null: as many as the data has


class DataRecipe(_Section):
    name: str = "digits"
    root: str | None = None
    image_size: Positive | None = None  # null: the data set's own, 224 for photos
    channels: Literal[1, 3] | None = None  # null: the data set's own
    workers: Annotated[int, Field(ge=0, le=256)] | None = None  # null: chosen from cores and ranks
    download: bool = True
    missing: Literal["error", "synthetic"] = "error"
    on_error: Literal["stop", "skip"] = "stop"
    samples: Positive = 1024  # size of the synthetic training set
    val_samples: Positive = 256  # and of its evaluation set


class AugmentRecipe(_Section):
    crop: Literal["none", "pad", "resized"] = "none"
    crop_padding: Annotated[int, Field(ge=1, le=64)] = 4  # pixels around the image for crop=pad
    crop_scale: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=2, max_length=2)] = [0.08, 1.0]
    hflip: Probability = 0.0
    auto: Literal["none", "trivial", "rand", "autoaugment"] = "none"
    mixup: Amount = 0.0  # alpha of Beta(alpha, alpha), drawn for each pair of images, not once a batch; 0 is off
    cutmix: Amount = 0.0
    erase: Probability = 0.0

    @property
    def together(self) -> int:
        """Neighbouring images that a shard must not part: pairs under mixup and cutmix."""
        return 2 if self.mixup or self.cutmix else 1


class OptimizerRecipe(_Section):
    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Decay = 0.9  # sgd
    nesterov: bool = False  # sgd
    weight_decay: Amount = 0.0  # of all parameters
    norm_weight_decay: Amount | None = None  # of normalisation layers and biases; null: as weight_decay
    betas: Annotated[list[Decay], Field(min_length=2, max_length=2)] = [0.9, 0.999]  # adam
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8  # adam


class ScheduleRecipe(_Section):
    name: Literal["constant", "cosine", "step"] = "cosine"
    warmup_epochs: Amount = 0.0
    warmup_factor: Annotated[float, Field(gt=0, le=1)] = 0.01  # the first step's share of lr
    min_lr: Amount = 0.0  # cosine ends here
    step_epochs: Positive = 30  # step: every so many epochs
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1  # step: lr is multiplied by this


class LossRecipe(_Section):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class PipelineRecipe(_Section):
    schedule: Schedule | None = None  # null: streams in one process, 1f1b in several
    stages: Annotated[int, Field(ge=2, le=1024)] | None = None  # null: as many as there are devices or processes
    virtual_stages: Annotated[int, Field(ge=1, le=64)] | None = None  # a rank; null: 2 where the schedule has them
    microbatches: Annotated[Literal["auto"] | int, BeforeValidator(_count)] = "auto"
    split_size: Positive | None = None  # images of a micro-batch, instead of microbatches
    cuts: Annotated[Literal["auto"] | list[str], BeforeValidator(_cuts)] = "auto"
    deferred_batch_norm: bool = True  # running statistics once a mini-batch, as without micro-batches
    recompute: bool = False  # activations in the backward pass, for memory
    timeline: bool = False  # each stage's forward and backward spans as a trace and as a picture


class LocalSGDRecipe(_Section):
    every: Positive | None = None  # steps between averagings; null: every epoch


class PredictRecipe(_Section):
    """How `predict` labels images; training looks at none of it."""

    batch_size: Positive | None = None  # null: what each device handles best
    split: Literal["train", "val"] | None = None  # of the data set, instead of data.root's files
    format: Literal["csv", "jsonl"] = "csv"
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0  # seconds for one image


class SaveRecipe(_Section):
    every_epochs: Positive | None = 1
    every_steps: Positive | None = None
    keep: Annotated[int, Field(ge=2)] = 2


class LoggingRecipe(_Section):
    every_steps: Positive = 100
    warmup_steps: Annotated[int, Field(ge=0)] = 10  # left out of every speed figure
    tensorboard: bool = True
    progress: bool = True
    verdict: bool = True  # what bounds the step, found at the run's end with at most 1 % of its time


class Recipe(_Section):
    """Everything a run depends on. `batch_size` is global: over all devices, per optimizer step."""

    mode: Mode = "ddp"
    model: ModelRecipe = ModelRecipe()
    data: DataRecipe = DataRecipe()
    augment: AugmentRecipe = AugmentRecipe()
    batch_size: Positive = 128
    accumulate: Positive = 1
    epochs: Positive = 10
    max_steps: Positive | None = None
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    loss: LossRecipe = LossRecipe()
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    channels_last: bool = True
    compile: bool = False
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None  # decay; after n steps at most (1 + n) / (10 + n)
    clip_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    sync_bn: bool = False
    pipeline: PipelineRecipe = PipelineRecipe()
    local_sgd: LocalSGDRecipe = LocalSGDRecipe()
    devices: Devices = "auto"
    threads: Positive | None = None  # per process; null: cores / local ranks
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0  # seconds to wait for a silent rank or worker
    grace: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0  # seconds a step may still take after SIGTERM
    save: SaveRecipe = SaveRecipe()
    resume: Literal["auto"] | None = None
    resume_weights_only: bool = False  # start the optimizer anew where a checkpoint's does not fit
    logging: LoggingRecipe = LoggingRecipe()
    predict: PredictRecipe = PredictRecipe()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    deterministic: bool = False
    output: str | None = None

    _name: str = PrivateAttr(default="recipe")

    @property
    def name(self) -> str:
        """What this recipe is called: the shipped name or the file's."""
        return self._name

    @property
    def many_processes(self) -> bool:
        """Whether the mode wants several processes, one a device, whoever starts them."""
        return self.mode in MANY_PROCESS_MODES or (
            self.mode == "pipeline" and self.pipeline.schedule not in (None, STREAMS)
        )

    @property
    def many_devices(self) -> bool:
        """Whether one process may drive several devices."""
        return self.mode in MANY_DEVICE_MODES

    @property
    def every_sample(self) -> bool:
        """Whether each worker uses all samples of its own shard, rather than a share of every full global batch."""
        return self.mode in ("local_sgd", "hogwild")

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as plain Python values."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that `load` accepts again."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        return text

    def replace(self, **words: Any) -> Recipe:
        """A copy with some keys changed; dots are written as two underscores: `data__root="x"`."""
        tree = self.to_dict()
        for key, value in words.items():
            *parents, last = key.split("__")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        return _validated(tree, self._name)


def words_of(recipe: Recipe) -> list[str]:
    """What to type for a recipe: its name where it is a shipped one, and every key that differs from that."""
    shipped = recipe.name in shipped_recipes()
    was, now = flatten((load(recipe.name) if shipped else Recipe()).to_dict()), flatten(recipe.to_dict())

    def typed(value: Any) -> str:
        text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
        return text.removesuffix("...\n").strip()

    changed = [f"{key}={typed(value)}" for key, value in now.items() if value != was[key]]
    return [f"recipe={recipe.name}", *changed] if shipped else changed or [f"mode={recipe.mode}"]


# What a continued run may change: where it runs and what it writes, never what it computes.
FREE_ON_RESUME = {"mode", "devices", "threads", "timeout", "save", "logging", "resume", "output", "pipeline", "predict"}
FREE_ON_RESUME |= {"grace", "resume_weights_only", "data.root", "data.workers", "data.download"}


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two recipes differ and a continued run may not, with (old, new) values."""
    was, now = flatten(old.to_dict()), flatten(new.to_dict())

    free = FREE_ON_RESUME | ({"optimizer"} if new.resume_weights_only else set())

    def fixed(key: str) -> bool:
        return key not in free and key.split(".")[0] not in free

    return {key: (was[key], now[key]) for key in now if fixed(key) and was[key] != now[key]}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when none is."""
    options = list(choices)
    # A key without its section, or a section's key on the wrong level.
    alike = [option for option in options if option.rpartition(".")[2] == word.rpartition(".")[2]]
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    found = alike + close if "." not in word else close + alike
    return found[0] if found else None


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes that come with the package, with their files."""
    here = Path(__file__).parent
    folder = here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def describe(path: Path) -> str:
    """A recipe's first comment line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def load(recipe: str | Path | Mapping[str, Any] | None = None, *words: str, **keywords: Any) -> Recipe:
    """Merge defaults < a shipped recipe or YAML file < words < keywords.

    Args:
        recipe: a shipped name ("digits"), a path to a YAML file or run folder, a mapping, or None for the defaults.
        words: `key=value` with dotted keys, values in YAML: "optimizer.lr=0.05", "devices=[cuda:0,cuda:1]".
        keywords: top-level keys with Python values: `epochs=1`.

    Raises:
        RecipeError: naming the key, what was found, and the nearest thing that works.
    """
    name, tree = "recipe", OmegaConf.create({})
    if isinstance(recipe, str | Path):
        path = find(str(recipe))
        name, tree = path.parent.name if path.name == "recipe.yaml" else path.stem, _read(path)
    try:
        if isinstance(recipe, Mapping):
            tree = OmegaConf.create(dict(recipe))
        merged = OmegaConf.merge(tree, _words(words), OmegaConf.create(keywords))
        plain = OmegaConf.to_container(merged)
    except RecipeError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{name}: {_one_line(error)}") from None
    return _validated(plain, name)


def find(recipe: str) -> Path:
    """The file that `recipe=` names: a shipped name, a file, or a run folder holding recipe.yaml."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    path = Path(recipe).expanduser()
    try:
        if (path / "recipe.yaml").is_file():
            return path / "recipe.yaml"
        if path.is_file():
            return path
    except (OSError, ValueError) as error:
        raise RecipeError(f"recipe={recipe[:80]!r} cannot be read: {_one_line(error)}") from None
    guess = nearest(recipe, shipped)
    hint = f"did you mean recipe={guess}? " if guess else ""
    raise RecipeError(f"recipe={recipe}: no such recipe or file; {hint}shipped: {', '.join(shipped)}")


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: {path.stat().st_size} bytes is no recipe (at most {MAX_BYTES})")
        text = path.read_text(encoding="utf-8")
        _check_shape(text, str(path))
        tree = OmegaConf.load(path)
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: a binary file, not a YAML recipe") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: {_one_line(error)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or 'holds no key: value pairs'}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: not a YAML recipe ({_one_line(error)})") from None
    if not OmegaConf.is_dict(tree):
        raise RecipeError(f"{path}: a recipe is a list of 'key: value' lines")
    if not tree:
        raise RecipeError(f"{path}: the file is empty; python -m trainer recipes digits prints one to start from")
    return tree


def _check_shape(text: str, name: str) -> None:
    """Refuse what would grow without limit when read (aliases of aliases, ${a}${a}) or overflow the stack."""
    depth = aliases = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or aliases > MAX_ALIASES:
            raise RecipeError(f"{name}: nested deeper than {MAX_DEPTH} or more than {MAX_ALIASES} aliases is no recipe")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise RecipeError(f"{name}: '{_shown(event.value)}': write the value itself, ${{...}} is not looked up")


def _words(words: Iterable[str]) -> Any:
    seen: dict[str, str] = {}
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise RecipeError(f"'{word}' is not key=value, as in optimizer.lr=0.05")
        if key in seen:
            raise RecipeError(f"{key} is given twice, as '{seen[key]}' and as '{word}': keep one")
        seen[key] = word
    merged = OmegaConf.create({})
    for key, word in seen.items():
        try:
            _check_shape(word.partition("=")[2], key)
            merged.merge_with_dotlist([word])
        except RecipeError:
            raise
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            raise RecipeError(f"'{_shown(word)}': {_one_line(error)}") from None
    return merged


def _validated(plain: Any, name: str) -> Recipe:
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        raise RecipeError(f"{name}: {_explain(error)}") from None
    _check_together(recipe, name)
    recipe._name = name
    return recipe


def _check_together(recipe: Recipe, name: str) -> None:
    """Keys that are right alone and wrong together."""
    if recipe.batch_size % recipe.accumulate:
        sizes = neighbours(recipe.batch_size, recipe.accumulate)
        raise RecipeError(
            f"{name}: batch_size={recipe.batch_size} does not divide into accumulate={recipe.accumulate} equal parts; "
            f"try batch_size={sizes}"
        )
    optimizer = recipe.optimizer
    if optimizer.name == "sgd" and optimizer.nesterov and optimizer.momentum == 0:
        raise RecipeError(f"{name}: optimizer.nesterov=true needs optimizer.momentum above 0")
    if recipe.schedule.min_lr > optimizer.lr:
        raise RecipeError(f"{name}: schedule.min_lr={recipe.schedule.min_lr} is above optimizer.lr={optimizer.lr}")
    if recipe.pipeline.split_size is not None and recipe.pipeline.microbatches != "auto":
        raise RecipeError(f"{name}: pipeline.split_size and pipeline.microbatches say the same twice: keep one")
    low, high = recipe.augment.crop_scale
    if low > high:
        raise RecipeError(f"{name}: augment.crop_scale=[{low},{high}] is the wrong way round; try [{high},{low}]")


def neighbours(size: int, step: int) -> str:
    """The multiples of `step` around `size`, in words."""
    below, above = size // step * step, math.ceil(size / step) * step
    return f"{below} or {above}" if below else f"{above}"


# pydantic's kinds of error, as the words that follow "key=value must be".
KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}",
}


def _explain(error: ValidationError) -> str:
    """The first of pydantic's findings, as one line that says what to type."""
    first = error.errors(include_url=False)[0]
    where, kind = first["loc"], first["type"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    defaults = flatten(Recipe().to_dict())
    if kind == "extra_forbidden":
        given = flatten({key: first["input"]})  # a misspelt section is recognised by what it holds
        section = key.rpartition(".")[0]
        within = [name for name in defaults if section and name.startswith(f"{section}.")]
        guess = nearest(key, within or [*defaults, *Recipe.model_fields])
        guess = guess or next(filter(None, (nearest(name, defaults) for name in given)), None)
        hint = f"did you mean {guess}?" if guess else "python -m trainer recipes digits prints them all"
        return f"{key} is not a key; {hint}"
    value = first["input"]
    found = f"{key}={_shown(value)}"
    if isinstance(value, Mapping) and value and key in defaults:
        return f"{key} has no keys of its own, as {key}.{next(iter(value))} would be"
    if kind == "literal_error":
        choices = [word for word in re.findall(r"\w+", first["ctx"]["expected"]) if word != "or"]
        choices += ["null"] if key in defaults and defaults[key] is None else []
        guess = nearest(str(value).lower(), choices)
        return f"{found} is not one of {', '.join(choices)}" + (f"; did you mean {key}={guess}?" if guess else "")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        inner = next((name for name in defaults if name.startswith(f"{key}.")), "optimizer.lr")
        return f"{found} must be a section, as in {inner}=..."
    if kind == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return f"{found} {message}" if message.startswith("must") else f"{key}: {message}"
    limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in first.get("ctx", {}).items()}
    message = KINDS[kind].format(**limits) if kind in KINDS else first["msg"]
    if key in defaults and defaults[key] is None:
        message += ", or null"
    if kind == "string_type" and isinstance(value, int | float):
        message += f"; put it in quotes, as in \"{key}='{_shown(value)}'\""
    return f"{found} must be {message}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        text = f"[{','.join(map(_shown, value))}]"
    else:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    noise = ("full_key:", "object_type=", "while constructing", 'in "<unicode')
    kept = [line for line in lines if line and not line.startswith(noise)]
    return "; ".join(kept)[:300] or type(error).__name__
