"""Every key of a recipe: its type, default and limits, and which keys are right alone and wrong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from trainer.errors import RecipeError
from trainer.recipe.explaining import explain_invalid
from trainer.recipe.field_types import (
    MOST_CHANNELS,
    Amount,
    Cache,
    Check,
    Columns,
    Cuts,
    Decay,
    Deviations,
    Devices,
    Fractions,
    Freeze,
    Logger,
    MicroBatches,
    PixelRange,
    PixelSize,
    Positive,
    Probability,
    Restart,
    Shares,
    Workers,
)
from trainer.recipe.known_names import AUXILIARY
from trainer.recipe.mode_table import TRAITS, Mode, Processes, Traits
from trainer.recipe.text import as_yaml, flatten, neighbours, shown, unstorable

STREAMS = "streams"  # the only pipeline schedule that runs in one process
MEASURED = "measured"  # the pipeline schedule made from the measured times of the stages
IN_TURN = "split"  # the schedule of stages that work one at a time
Schedule = Literal[
    "streams", "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev", "measured"
]

LOCAL = ("data__root", "data__labels", "data__cache_dir", "model__init_from")  # paths
NAMELESS = "recipe"  # the name in messages of a recipe that is not a file
EXTENDS = "extends"  # the key of a file, not of a recipe, that names the recipe it is made from
EXTENDS_COMMENT = "the recipe that this file changes: a shipped name, or a file or run folder relative to this file"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def key(default: Any, comment: str, example: Any = None, **limits: Any) -> Any:
    """A key with its default and the one comment that `recipes`, the key reference and editors show of it.

    `example` is a value to show, where the default and what it takes are none to learn from.
    """
    return Field(default, description=comment, examples=None if example is None else [example], **limits)


class ModelRecipe(_Section):
    """The network."""

    name: str = key(
        "cnn", "mlp, cnn, cnn_gn, vit_tiny, resnet8, resnet20, fast_cnn (_small, _mirrored), torchvision, timm:NAME"
    )
    weights: str | None = key(
        None, "published weights of torchvision or timm to start from: a name, or DEFAULT", "DEFAULT"
    )
    init_from: str | None = key(
        None, "a run folder, checkpoint or .safetensors file to start from, instead of weights", "runs/first"
    )
    num_classes: Positive | None = key(None, "number of outputs; null: the number of classes", 10, le=2**20)
    freeze: Freeze = key(None, "number of first blocks to freeze (-1: all but the last), or names, as in [conv1]", 3)

    @model_validator(mode="before")
    @classmethod
    def _init_from_first(cls, plain: Any) -> Any:
        """The user's weights take the place of published ones, which a shipped recipe may name; see `zoo.form`."""
        given = isinstance(plain, dict) and plain.get("init_from") is not None
        tells = given and plain.get("name") in AUXILIARY and plain.get("weights") != "DEFAULT"
        return {**plain, "weights": None} if given and not tells else plain


class DataRecipe(_Section):
    """The images."""

    name: str = key("digits", "digits, mnist, fashion_mnist, cifar10, cifar100, synthetic; yours: imagefolder, shards")
    root: str | None = key(
        None, "folder of the images, or pattern of shards; null: ~/.cache/trainer, for downloads", "photos"
    )
    labels: str | None = key(None, "CSV file with the labels of each image; null: the names of folders", "labels.csv")
    image_column: str | None = key(None, "column of data.labels with the images' paths; null: the first", "photo")
    label_column: Columns | None = key(None, "column with the labels, or several; null: all others", ["age", "height"])
    val_fraction: float = key(0.2, "share of each class to hold out if the photos have no val folder", gt=0, lt=1)
    image_size: PixelSize | None = key(
        None, "pixels per side, or [height,width]; null: the data set's own, 224 for photos", 128
    )
    channels: Positive | None = key(
        None, "1 gray, 3 colour; to 64 of TIFF and .npy files; null: the data set's own, 1 or 3", 5, le=MOST_CHANNELS
    )
    mean: Fractions | None = key(
        None, "mean of the pixels, 0 to 1 per channel; null: the data set's or the model's", [0.485, 0.456, 0.406]
    )
    std: Deviations | None = key(None, "standard deviation of the pixels; null: as for mean", [0.229, 0.224, 0.225])
    pixel_range: PixelRange | None = key(
        None, "black and white in images of over 8 bits; null: [0, 65535], for floating point [0, 1]", [0, 4095]
    )
    balance: bool = key(False, "draw all classes equally often, however many images each has")
    workers: Workers | None = key(None, "processes per rank that read photos; null: one per core", 4)
    download: bool = key(True, "download a published data set that is missing")
    missing: Literal["error", "synthetic"] = key("error", "synthetic: use made-up images if data.root is not set")
    cache: Cache = key("off", "keep small, decoded copies of photos", "disk")
    cache_format: Literal["raw", "jpeg"] | None = key(
        None, "raw is fastest, jpeg takes a tenth of the bytes; null: raw", "jpeg"
    )
    cache_size: PixelSize | None = key(
        None, "shorter side of the copies, or what they cover; null: as for evaluation, 256 for 224", 320
    )
    cache_dir: str | None = key(None, "folder of the copies; null: ~/.cache/trainer/cache", "/fast/cache")
    on_error: Literal["stop", "skip"] = key(
        "stop", "what to do if an image cannot be read; skip replaces and counts it"
    )
    check: Check = key("headers", "find damaged photos before the first step, by beginning and end of each file")
    samples: Positive = key(1024, "training images of data.name=synthetic")
    val_samples: Positive = key(256, "held-out images of data.name=synthetic")


class AugmentRecipe(_Section):
    """How training images are varied; held-out ones never are."""

    crop: Literal["none", "pad", "resized"] = key("none", "pad: shift by some pixels; resized: enlarge a random part")
    crop_padding: int = key(4, "how far augment.crop=pad shifts, in pixels", ge=1, le=64)
    crop_scale: list[Annotated[float, Field(gt=0, le=1)]] = key(
        [0.08, 1.0],
        "least and largest share of an image that augment.crop=resized keeps",
        min_length=2,
        max_length=2,
    )
    hflip: Probability = key(0.0, "probability of a left-right flip", 0.5)
    alternate: bool = key(False, "augment.hflip is drawn for the first epoch, and goes the other way in every second")
    auto: Literal["none", "trivial", "rand", "autoaugment"] = key("none", "torchvision's automatic policies")
    mixup: Amount = key(0.0, "alpha of Beta(alpha, alpha) for blending two images; 0: off", 0.2)
    cutmix: Amount = key(
        0.0, "like mixup, but pastes a rectangle of one image into another; with both, half of the pairs each", 1.0
    )
    erase: Probability = key(0.0, "probability of blanking a rectangle", 0.25)

    @property
    def together(self) -> int:
        """Neighbouring images that a shard must not part: pairs under mixup and cutmix."""
        return 2 if self.mixup or self.cutmix else 1


class OptimizerRecipe(_Section):
    """How gradients change weights."""

    name: Literal["sgd", "adam", "adamw", "muon"] = key(
        "sgd", "sgd has momentum, adam betas and eps; adamw suits transformers", "adamw"
    )
    lr: float = key(0.1, "highest learning rate, for the whole batch_size", 0.05, gt=0, allow_inf_nan=False)
    lr_per: Positive | None = key(
        None, "images per step that lr is meant for; lr scales with batch_size; null: it does not", 256
    )
    layer_decay: float | None = key(
        None, "a block's learning rate as a share of the next block's; null: 1", 0.75, gt=0, le=1
    )
    momentum: Decay = key(0.9, "sgd, muon: the share of the last step that goes into the next")
    nesterov: bool = key(False, "sgd, muon: Nesterov's form of momentum")
    weight_decay: Amount = key(
        0.0, "pulls weights towards zero, BatchNorm and biases included; see norm_weight_decay", 0.0005
    )
    norm_weight_decay: Amount | None = key(
        None, "weight decay of normalisation layers and biases; null: same as weight_decay", 0.0
    )
    betas: list[Decay] = key(
        [0.9, 0.999], "adam, adamw, muon: decay of the averages of gradients and squares", min_length=2, max_length=2
    )
    eps: float = key(1e-8, "adam, adamw, muon: added to the divisor", gt=0, allow_inf_nan=False)


class ScheduleRecipe(_Section):
    """How the learning rate changes over the run."""

    name: Literal["constant", "cosine", "step"] = key("cosine", "how the learning rate changes after the warm-up")
    warmup_epochs: Amount = key(0.0, "epochs over which the rate rises to optimizer.lr; fractions work too", 0.5)
    warmup_factor: float = key(0.01, "the share of optimizer.lr at the first step", gt=0, le=1)
    min_lr: Amount = key(0.0, "cosine: the last learning rate", 0.0001)
    restart: Restart = key(False, "cosine: true lets epochs that are added begin a new one; a list: after which", [5])
    step_epochs: Positive = key(30, "step: epochs between changes, counted after the warm-up")
    gamma: float = key(0.1, "step: factor of the learning rate at each change", gt=0, le=1)

    @property
    def restarts(self) -> list[float]:
        """The epochs after which a cosine begins anew at the highest rate, in their order."""
        return self.restart if isinstance(self.restart, list) and self.name == "cosine" else []


class TaskRecipe(_Section):
    """What the network predicts for an image."""

    name: str = key("classification", "classification, multilabel, regression, or one that a plugin registers")


class LossRecipe(_Section):
    """What training minimises."""

    label_smoothing: float = key(0.0, "share of the target spread over all classes", 0.1, ge=0, lt=1)
    class_weights: Literal["balanced"] | list[Amount] | None = key(
        None, "weight of each class in the loss: balanced (rare classes more), or a number per class"
    )


class DistillRecipe(_Section):
    """Learning from a trained model, the teacher, beside the labels."""

    teacher: str | None = key(None, "a run, a file of its weights, timm:NAME or torchvision's NAME", "runs/teacher")
    weight: float | None = key(None, "the teacher's share of the loss; null: 0.5", 0.7, ge=0, le=1)
    temperature: float | None = key(None, "divides the outputs of both, before softmax; null: 4", 2.0, ge=0.1, le=100)


class PipelineRecipe(_Section):
    """How the stages of a model work; for mode=split and mode=pipeline."""

    schedule: Schedule | None = key(
        None,
        "order of the work; null: streams in one process, else 1f1b, or measured if faster",
        "gpipe",
    )
    stages: int | None = key(None, "number of stages; null: one per device or process", 4, ge=2, le=1024)
    virtual_stages: int | None = key(None, "stages on each rank; null: 2 if the schedule has several", 2, ge=1, le=64)
    microbatches: MicroBatches = key("auto", "number of micro-batches; auto measures a few numbers", 8)
    split_size: Positive | None = key(None, "images per micro-batch, instead of microbatches", 16)
    cuts: Cuts = key("auto", "names of the modules after which to cut; auto balances the measured times", ["layer2.3"])
    deferred_batch_norm: bool = key(True, "BatchNorm's running statistics over whole batches, as without micro-batches")
    timeline: bool = key(False, "draw each stage's work as timeline.png and timeline.json")


class DdpRecipe(_Section):
    """For mode=ddp."""

    compress: Literal["bf16"] | None = key(
        None, "bf16: round gradients, to send half the bytes; null: send them as they are"
    )


class LocalSGDRecipe(_Section):
    """For mode=local_sgd."""

    every: Positive | None = key(None, "steps between averagings of the weights; null: every epoch", 20)
    outer_lr: float = key(
        1.0,
        "learning rate of the step from the last average to the new one; 1: all the way",
        0.7,
        gt=0,
        allow_inf_nan=False,
    )
    outer_momentum: Decay | None = key(
        None,
        "Nesterov momentum of these steps; 0: none; null: 0.5 if every is given, else 0",
        0.5,
    )

    @property
    def momentum(self) -> float:
        """`outer_momentum`, or what is best on CIFAR-10 where it is left open (the guide's page on modes)."""
        return self.outer_momentum if self.outer_momentum is not None else 0.5 * (self.every is not None)

    @property
    def outer_copies(self) -> int:
        """Copies of the weights that the outer optimizer keeps; none where its step is the average."""
        return 0 if (self.outer_lr, self.momentum) == (1.0, 0.0) else 1 + (self.momentum > 0)


class FsdpRecipe(_Section):
    """For mode=fsdp."""

    shards: int | None = key(None, "ranks that hold one copy of the weights; null: all ranks", 8, ge=2, le=2**16)
    reshard: bool = key(
        True, "free a block's weights after its forward pass; false: gather them once less, needs more memory"
    )
    offload: bool = key(False, "keep a GPU's shards, their gradients and the optimizer in host memory")


class PredictRecipe(_Section):
    """How `predict` labels images; training ignores it."""

    batch_size: Positive | None = key(None, "images at once; null: what each device handles best", 64, le=2**24)
    split: Literal["train", "val"] | None = key(
        None, "label this part of the data set instead of data.root's files", "val"
    )
    format: Literal["csv", "jsonl"] = key("csv", "format of the predictions file")
    timeout: float = key(60.0, "seconds allowed for one image", gt=0, allow_inf_nan=False)


class StopRecipe(_Section):
    """When a run ends before its last epoch."""

    patience: Positive | None = key(None, "end after this many epochs without a better metric; null: do not", 5)


class SaveRecipe(_Section):
    """How often checkpoints are written."""

    every_epochs: Positive | None = key(1, "epochs between checkpoints; null: do not save at the end of epochs")
    every_steps: Positive | None = key(None, "steps between checkpoints within epochs; null: none", 500)
    keep: int = key(2, "number of newest checkpoints to keep", 5, ge=2)


class LoggingRecipe(_Section):
    """What a run logs and shows."""

    every_steps: Positive = key(100, "steps between points in TensorBoard and rows of steps.csv")
    warmup_steps: int = key(10, "number of first steps that speed figures leave out", ge=0)
    tensorboard: bool = key(True, "write TensorBoard's events into the run folder")
    wandb: Logger = key(None, "Weights & Biases project that also receives the figures, or true", "my-project")
    mlflow: Logger = key(None, "MLflow server or folder that also receives the figures, or true", "http://host:5000")
    progress: bool = key(True, "show a progress bar on the terminal")
    verdict: bool = key(True, "say at the end what limits the speed; takes at most 1 % of the run")


class Recipe(_Section):
    """Everything a run depends on. `batch_size` is global: over all devices, per optimizer step."""

    mode: Mode = key("ddp", "how several devices share the work; single is one device")
    task: TaskRecipe = TaskRecipe()
    model: ModelRecipe = ModelRecipe()
    data: DataRecipe = DataRecipe()
    augment: AugmentRecipe = AugmentRecipe()
    batch_size: Positive = key(128, "images per optimizer step, over all devices", 256, le=2**24)
    accumulate: MicroBatches = key(
        1, "compute a batch in this many pieces, one after the other, to save memory; auto: the fewest that fit", 4
    )
    shares: Shares = key(
        None,
        "what part of every batch each rank computes, in proportion; auto: as fast as each is; null: equal",
        [3, 1],
    )
    epochs: Positive = key(10, "passes over the training images", 30)
    max_steps: Positive | None = key(None, "end after this many optimizer steps, if that is sooner than epochs", 100)
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    loss: LossRecipe = LossRecipe()
    distill: DistillRecipe = DistillRecipe()
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = key(
        "fp32", "number format to compute in; on a GPU bf16 is fastest, tf32 more precise; weights stay fp32", "bf16"
    )
    channels_last: bool = key(True, "memory order of images and convolutions; usually faster")
    compile: bool = key(False, "torch.compile: minutes at the start, faster steps on a GPU")
    graphs: bool | Literal["auto"] = key(
        "auto", "record a step's kernels once and replay them, on a GPU; auto: if that is faster"
    )
    ema: float | None = key(
        None, "decay of a moving average of the weights; lower in the first steps", 0.999, gt=0, lt=1
    )
    recompute: bool | Literal["auto"] = key(
        False, "compute activations again in the backward pass, to save memory; auto: if a GPU's does not suffice"
    )
    clip_grad_norm: float | None = key(None, "clip the gradient norm to this", 1.0, gt=0, allow_inf_nan=False)
    sync_bn: bool = key(False, "ddp: BatchNorm over the global batch instead of each rank's share")
    pipeline: PipelineRecipe = PipelineRecipe()
    ddp: DdpRecipe = DdpRecipe()
    local_sgd: LocalSGDRecipe = LocalSGDRecipe()
    fsdp: FsdpRecipe = FsdpRecipe()
    devices: Devices = key("auto", "auto for all devices, or a list", ["cuda:0", "cuda:1"])
    threads: Positive | None = key(None, "CPU threads of a process; null: cores / local ranks", 4, le=4096)
    timeout: float = key(600.0, "seconds to wait for a silent rank, loader worker or GPU", gt=0, allow_inf_nan=False)
    grace: float = key(60.0, "seconds a step may still take after SIGTERM", gt=0, allow_inf_nan=False)
    stop: StopRecipe = StopRecipe()
    save: SaveRecipe = SaveRecipe()
    resume: Literal["auto"] | None = key(None, "auto: continue from the newest intact checkpoint in output")
    logging: LoggingRecipe = LoggingRecipe()
    predict: PredictRecipe = PredictRecipe()
    seed: int = key(0, "seed of everything random", 1, ge=0, lt=2**63)
    deterministic: bool = key(False, "give the same bits in each run on a GPU, with slower kernels")
    output: str | None = key(None, "the run folder; null: a new one below runs/", "runs/first")

    _name: str = PrivateAttr(default=NAMELESS)

    @property
    def name(self) -> str:
        """What this recipe is called: the shipped name or the file's; without one, by its model and data."""
        return re.sub(r"[^\w.-]", "_", f"{self.model.name}-{self.data.name}") if self._name == NAMELESS else self._name

    @property
    def traits(self) -> Traits:
        """The properties of the mode."""
        return TRAITS[self.mode]

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up: `optimizer.lr`, or so much of it as batch_size is of `optimizer.lr_per`.

        Goyal et al., "Accurate, Large Minibatch SGD" (arXiv:1706.02677), section 2.1: the linear scaling rule.
        """
        optimizer = self.optimizer
        return optimizer.lr if optimizer.lr_per is None else optimizer.lr * self.batch_size / optimizer.lr_per

    @property
    def pieces(self) -> int:
        """`accumulate` as a number: 1 as long as it is auto, which a run replaces before its first step."""
        return 1 if self.accumulate == "auto" else int(self.accumulate)

    @property
    def processes(self) -> Processes:
        """Whether one process trains or several, whoever starts them; a pipeline that names no schedule can be both."""
        if self.traits.processes != "either" or self.pipeline.schedule is None:
            return self.traits.processes
        return "one" if self.pipeline.schedule == STREAMS else "many"

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as plain Python values."""
        return self.model_dump()

    def for_others(self) -> dict[str, Any]:
        """The recipe in the metadata of weights: without paths of this machine, a teacher and loggers."""
        tree = self.replace(distill={}, **dict.fromkeys(("output", "resume", *LOCAL))).to_dict()
        del tree["logging"]
        return tree

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that `load` accepts again."""
        return as_yaml(self.to_dict())

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


def key_fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys of a recipe, or of a section of it, dotted, with their fields."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from key_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def validated(plain: Any, name: str, origins: Mapping[str, str] | None = None) -> Recipe:
    """A recipe of plain values; raises RecipeError with the line of what to type.

    `origins` has the file that dotted keys are from; a message about a key of another file than `name` names it.
    """
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        key, line = explain_invalid(error, flatten(Recipe().to_dict()), [*Recipe.model_fields, EXTENDS])
        sources, key = origins or {}, key.partition("[")[0]
        source = sources.get(key) or next((sources[inner] for inner in sources if inner.startswith(f"{key}.")), name)
        raise RecipeError(f"{name}: {line}" + (f" (in {source})" if source != name else "")) from None
    _check_texts(recipe, name)
    _check_together(recipe, name)
    recipe._name = name
    return recipe


def _check_texts(recipe: Recipe, name: str) -> None:
    """Texts that cannot be stored in a run's files and read back."""
    for key, value in flatten(recipe.to_dict()).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (fault := unstorable(text)):
                raise RecipeError(f"{name}: {key}={shown(text)}: {fault}")


def _check_together(recipe: Recipe, name: str) -> None:
    """Keys that are right alone and wrong together."""
    if recipe.batch_size % recipe.pieces:
        sizes = neighbours(recipe.batch_size, recipe.pieces)
        raise RecipeError(
            f"{name}: batch_size={recipe.batch_size} does not divide into accumulate={recipe.pieces} equal parts; "
            f"try batch_size={sizes}"
        )
    optimizer = recipe.optimizer
    if optimizer.name in ("sgd", "muon") and optimizer.nesterov and optimizer.momentum == 0:
        raise RecipeError(f"{name}: optimizer.nesterov=true needs optimizer.momentum above 0")
    if recipe.schedule.min_lr > recipe.peak_lr:
        of = "" if optimizer.lr_per is None else f", which is {recipe.peak_lr:g} at batch_size={recipe.batch_size}"
        raise RecipeError(f"{name}: schedule.min_lr={recipe.schedule.min_lr} is above optimizer.lr={optimizer.lr}{of}")
    if recipe.pipeline.split_size is not None and recipe.pipeline.microbatches != "auto":
        raise RecipeError(f"{name}: pipeline.split_size and pipeline.microbatches set the same: keep one")
    if recipe.data.balance and recipe.loss.class_weights == "balanced":
        raise RecipeError(f"{name}: data.balance=true and loss.class_weights=balanced do the same: keep one")
    for key, numbers in (("mean", recipe.data.mean), ("std", recipe.data.std)):
        count, channels = len(numbers or ()), recipe.data.channels or 3
        if numbers and count != channels and {count, channels} - {1, 3}:
            raise RecipeError(f"{name}: data.{key} has {count} numbers, and data.channels={channels}: one for each")
    low, high = recipe.augment.crop_scale
    if low > high:
        raise RecipeError(f"{name}: augment.crop_scale=[{low},{high}] is in the wrong order; try [{high},{low}]")
