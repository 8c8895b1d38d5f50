"""Every key of a recipe: its type, default and limits, and which keys are right alone and wrong together."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from trainer.errors import RecipeError
from trainer.recipe.explaining import explain_invalid
from trainer.recipe.text import flatten, neighbours, shown
from trainer.recipe.traits import TRAITS, Mode, Processes, Traits

STREAMS = "streams"  # the one pipeline schedule that runs in one process
IN_TURN = "split"  # what stages have for a schedule that work one at a time
Schedule = Literal[
    "streams", "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"
]

DEVICE = r"cpu|cuda(:\d{1,3})?"


def _devices(value: Any) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list) or not value:
        example = value if isinstance(value, str) and re.fullmatch(DEVICE, value) else "cuda:0"
        raise ValueError(f"must be auto or a list, as in devices=[{example}]")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(DEVICE, name):
            raise ValueError(f"'{shown(name)}' is not a device: write cpu, cuda or cuda:0")
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


def _shares(value: Any) -> Any:
    values = value if isinstance(value, list) else []
    if len(values) not in (1, 3) or not all(type(one) in (int, float) and 0 <= one <= 1 for one in values):
        raise ValueError("must be a number from 0 to 1 for each channel, as in [0.485, 0.456, 0.406] (of 255: divide)")
    return [float(one) for one in values]


def _spreads(value: Any) -> Any:
    values = _shares(value)
    if not all(values):
        raise ValueError("must be above 0, as in [0.229, 0.224, 0.225]")
    return values


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
    labels: str | None = None  # a CSV that tells each image's labels; null: the folder that it lies in
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2  # of each class, held out where photos have no val folder
    image_size: Positive | None = None  # null: the data set's own, 224 for photos
    channels: Literal[1, 3] | None = None  # null: the data set's own
    mean: Annotated[list[float], BeforeValidator(_shares)] | None = None  # of pixels; null: the data set's or model's
    std: Annotated[list[float], BeforeValidator(_spreads)] | None = None  # and their standard deviation
    balance: bool = False  # draw all classes equally often, whatever their numbers of images
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


class TaskRecipe(_Section):
    name: str = "classification"  # or multilabel, regression, or one that a plugin registers


class LossRecipe(_Section):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    class_weights: Literal["balanced"] | list[Amount] | None = None  # what a sample of each class counts


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
    task: TaskRecipe = TaskRecipe()
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
    def traits(self) -> Traits:
        """What is to know of the mode."""
        return TRAITS[self.mode]

    @property
    def processes(self) -> Processes:
        """Whether one process trains or several, whoever starts them; a pipeline that names no schedule can be both."""
        if self.traits.processes != "either" or self.pipeline.schedule is None:
            return self.traits.processes
        return "one" if self.pipeline.schedule == STREAMS else "many"

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
        return validated(tree, self._name)


def validated(plain: Any, name: str) -> Recipe:
    """A recipe of plain values; raises RecipeError with the line of what to type."""
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        raise RecipeError(
            f"{name}: {explain_invalid(error, flatten(Recipe().to_dict()), Recipe.model_fields)}"
        ) from None
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
    if recipe.data.balance and recipe.loss.class_weights == "balanced":
        raise RecipeError(f"{name}: data.balance=true and loss.class_weights=balanced do the same twice: keep one")
    low, high = recipe.augment.crop_scale
    if low > high:
        raise RecipeError(f"{name}: augment.crop_scale=[{low},{high}] is the wrong way round; try [{high},{low}]")
