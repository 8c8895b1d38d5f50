"""Schema of a recipe: type, default, limits and comment of every key, and invalid combinations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from trainer.errors import RecipeError
from trainer.recipe.explaining import explain_invalid
from trainer.recipe.field_types import (
    MOST_CHANNELS,
    Arguments,
    Cache,
    Check,
    Columns,
    Cuts,
    Decay,
    Deviations,
    Devices,
    Duration,
    Fold,
    Fractions,
    Freeze,
    Interpolation,
    Interval,
    Logger,
    Metrics,
    MicroBatches,
    PixelRange,
    PixelSize,
    Positive,
    Probability,
    Restart,
    Share,
    Shares,
    Transforms,
)
from trainer.recipe.known_names import AUXILIARY, TASKS
from trainer.recipe.mode_table import TRAITS, Mode, Processes, Traits
from trainer.recipe.optimizer_table import OPTIMIZERS, OptimizerTraits
from trainer.recipe.schedule_table import LR_SCHEDULES, OWN_KEYS, ScheduleTraits
from trainer.recipe.text import (
    explain_unstorable,
    flatten,
    format_neighbors,
    format_value,
    format_yaml_document,
    with_value,
)

# The only pipeline schedule that runs in one process.
STREAMS = "streams"
# The pipeline schedule made from the measured times of the stages.
MEASURED = "measured"
# The schedule of stages that work one at a time.
IN_TURN = "split"
Schedule = Literal[
    "streams",
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "loopedbfs",
    "interleavedzerobubble",
    "zbv",
    "dualpipev",
    "measured",
]

# Section -> table of the optimizers or schedules from which the section's key `name` chooses. The
# field `keys` of a row lists the keys of the section that this row reads but some other rows do
# not.
TABLES: dict[str, Mapping[str, OptimizerTraits | ScheduleTraits]] = {
    "optimizer": OPTIMIZERS,
    "schedule": LR_SCHEDULES,
}

# Keys whose values are paths on this machine. `Recipe.for_others` omits them.
LOCAL = ("data__root", "data__labels", "data__cache_dir", "model__init_from")
# Name in messages for a recipe that does not come from a file.
NAMELESS = "recipe"
# Key of a recipe file that names the recipe on which the file is based. A `Recipe` does not have
# this key, because loading a file resolves it.
EXTENDS = "extends"
EXTENDS_COMMENT = (
    "the recipe that this file changes: a shipped name, or a file or run folder relative to this "
    "file"
)


def readers(key: str) -> list[str]:
    """Return the optimizers or schedules that read a key; empty if every run can read it."""
    section, _, field = key.partition(".")
    rows = TABLES.get(section, {})
    return [name for name, row in rows.items() if field in row.keys]


def is_read(key: str, name: str) -> bool:
    """Return whether the optimizer or schedule `name` reads a key that only some of them read."""
    section, _, field = key.partition(".")
    row = TABLES[section].get(name)
    if row is not None:
        return field in row.keys
    # The user's own ones are not known before their module is imported. An optimizer of this kind
    # reads its arguments from `optimizer.args`.
    return section == "schedule" and field in OWN_KEYS


def listed(key: str) -> str:
    """Format the names of the optimizers or schedules that read a key, for the key's comment."""
    return ", ".join(readers(key))


class _Section(BaseModel):
    # Strict, because a string such as "1e3" is not a number. Frozen, because changes after
    # the checks would not be checked.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def key(default: Any, comment: str, example: Any = None, **limits: Any) -> Any:
    """Define a key of a recipe.

    Args:
        default: default value.
        comment: description for the command `recipes`, the key reference and editors.
        example: value to show in the reference if the default is not instructive.
        **limits: limits of the value, as arguments of pydantic's `Field`.
    """
    examples = None
    if example is not None:
        examples = [example]
    return Field(default, description=comment, examples=examples, **limits)


class ModelRecipe(_Section):
    """The network."""

    name: str = key(
        "cnn",
        "mlp, cnn, cnn_gn, vit_tiny, resnet8, resnet20, fast_cnn, airbench (_small), torchvision, "
        "timm:NAME",
        "mlp",
    )
    weights: str | None = key(
        None,
        "published weights of torchvision or timm to start from: a name, or DEFAULT",
        "DEFAULT",
    )
    init_from: str | None = key(
        None,
        "a run folder, checkpoint or .safetensors file to start from, instead of weights",
        "runs/first",
    )
    num_classes: Positive | None = key(
        None, "number of outputs; null: the number of classes", 10, le=2**20
    )
    freeze: Freeze = key(
        None, "number of first blocks to freeze (-1: all but the last), or names, as in [conv1]", 3
    )
    probe: bool = key(
        False, "train the last layer alone, on features that the others compute once per image"
    )
    args: Arguments = key(
        {}, "more arguments of the function that builds the model", {"drop_path_rate": 0.1}
    )

    @model_validator(mode="before")
    @classmethod
    def _init_from_first(cls, plain: Any) -> Any:
        """Remove the published weights, which a shipped recipe may name, if `init_from` is set.

        For `AUXILIARY` models, any name other than DEFAULT remains, because `zoo.resolve_weights`
        reads it.
        """
        if not isinstance(plain, dict) or plain.get("init_from") is None:
            return plain
        if plain.get("name") in AUXILIARY and plain.get("weights") != "DEFAULT":
            return plain
        return {**plain, "weights": None}


class DataRecipe(_Section):
    """The images."""

    name: str = key(
        "digits",
        "digits, mnist, fashion_mnist, cifar10, cifar100, synthetic; yours: imagefolder, shards",
        "mnist",
    )
    root: str | None = key(
        None,
        "folder of the images, or pattern of shards; null: ~/.cache/trainer, for downloads",
        "photos",
    )
    labels: str | None = key(
        None, "CSV file with the labels of each image; null: the names of folders", "labels.csv"
    )
    image_column: str | None = key(
        None, "column of data.labels with the images' paths; null: the first", "photo"
    )
    label_column: Columns | None = key(
        None, "column with the labels, or several; null: all others", ["age", "height"]
    )
    val_fraction: float = key(
        0.2, "share of each class to hold out if the photos have no val folder", gt=0, lt=1
    )
    fold: Fold = key(
        None,
        "hold out this fold of the training images instead, as in 1/5: cross-validation",
        "1/5",
    )
    fraction: Share = key(1.0, "share of each class to train on; what is held out stays whole", 0.1)
    image_size: PixelSize | None = key(
        None, "pixels per side, or [height,width]; null: the data set's own, 224 for photos", 128
    )
    train_size: PixelSize | None = key(
        None, "pixels per side of training photos; null: image_size, as for evaluation", 176
    )
    resize: PixelSize | None = key(
        None,
        "shorter side of a photo before its middle is cut out, or what it covers; null: "
        "image_size / 0.875",
        232,
    )
    interpolation: Interpolation = key("bilinear", "how images are resized")
    channels: Positive | None = key(
        None,
        "1 gray, 3 color; to 64 of TIFF and .npy files; null: the data set's own, 1 or 3",
        5,
        le=MOST_CHANNELS,
    )
    mean: Fractions | None = key(
        None,
        "mean of the pixels, 0 to 1 per channel; null: the data set's or the model's",
        [0.485, 0.456, 0.406],
    )
    std: Deviations | None = key(
        None, "standard deviation of the pixels; null: as for mean", [0.229, 0.224, 0.225]
    )
    pixel_range: PixelRange | None = key(
        None,
        "black and white in images of over 8 bits; null: [0, 65535], for floating point [0, 1]",
        [0, 4095],
    )
    balance: bool = key(False, "draw all classes equally often, however many images each has")
    workers: int | None = key(
        None, "processes per rank that read photos; null: one per core", 4, ge=0, le=256
    )
    decode: Literal["cpu", "gpu"] = key(
        "cpu",
        "where JPEG photos are decoded; gpu: by the GPU of the model, if workers are too slow",
    )
    download: bool = key(True, "download a published data set that is missing")
    missing: Literal["error", "synthetic"] = key(
        "error", "synthetic: use made-up images if data.root is not set"
    )
    cache: Cache = key("off", "keep small, decoded copies of photos", "disk")
    cache_format: Literal["raw", "jpeg"] | None = key(
        None, "raw is fastest, jpeg takes a tenth of the bytes; null: raw", "jpeg"
    )
    cache_size: PixelSize | None = key(
        None,
        "shorter side of the copies, or what they cover; null: as for evaluation, 256 for 224",
        320,
    )
    cache_dir: str | None = key(
        None, "folder of the copies; null: ~/.cache/trainer/cache", "/fast/cache"
    )
    on_error: Literal["stop", "skip"] = key(
        "stop", "what to do if an image cannot be read; skip replaces and counts it"
    )
    check: Check = key(
        "headers", "find damaged photos before the first step, by beginning and end of each file"
    )
    samples: Positive = key(1024, "training images of data.name=synthetic")
    val_samples: Positive = key(256, "held-out images of data.name=synthetic")


class AugmentRecipe(_Section):
    """How training images are varied. Images of the validation split are not."""

    crop: Literal["none", "pad", "resized"] = key(
        "none", "pad: shift by some pixels; resized: enlarge a random part"
    )
    crop_padding: Positive = key(4, "how far augment.crop=pad shifts, in pixels", le=64)
    crop_scale: list[Share] = key(
        [0.08, 1.0],
        "least and largest share of an image that augment.crop=resized keeps",
        min_length=2,
        max_length=2,
    )
    hflip: Probability = key(0.0, "probability of a left-right flip", 0.5)
    alternate: bool = key(
        False, "augment.hflip is drawn for the first epoch, and goes the other way in every second"
    )
    vflip: Probability = key(0.0, "probability of an up-down flip", 0.5)
    auto: Literal["none", "trivial", "rand", "autoaugment"] = key(
        "none", "torchvision's automatic policies"
    )
    operations: Positive = key(2, "operations per image of augment.auto=rand", 3, le=16)
    magnitude: int = key(9, "strength of the operations of augment.auto=rand", 15, ge=0, le=30)
    mixup: NonNegativeFloat = key(
        0.0, "alpha of Beta(alpha, alpha) for blending two images; 0: off", 0.2
    )
    cutmix: NonNegativeFloat = key(
        0.0,
        "like mixup, but pastes a rectangle of one image into another; with both, half of the "
        "pairs each",
        1.0,
    )
    erase: Probability = key(0.0, "probability of blanking a rectangle", 0.25)
    repeats: Positive = key(
        1,
        "how often an image comes in an epoch, varied each time; the epoch is as long as without",
        4,
        le=64,
    )
    transforms: Transforms = key(
        [],
        "transforms of torchvision.transforms.v2, each a name or {name: arguments}",
        ["RandomInvert", "RandomEqualize"],
    )

    @property
    def together(self) -> int:
        """Number of neighboring images that stay in one micro-batch.

        The number is 2 if mixup or cutmix may mix the images of a pair, else 1.
        """
        if self.mixup or self.cutmix:
            return 2
        return 1


class OptimizerRecipe(_Section):
    """How gradients change weights."""

    # mypy cannot read the names from the table, so the error is ignored.
    name: Literal[*OPTIMIZERS] | str = key(  # type: ignore[valid-type]
        "sgd",
        "adamw suits transformers; timm:NAME needs timm; or one that a plugin registers",
        "adamw",
    )
    lr: PositiveFloat = key(0.1, "highest learning rate, for the whole batch_size", 0.05)
    lr_per: Positive | None = key(
        None,
        "images per step that lr is meant for; lr scales with batch_size; null: it does not",
        256,
        le=2**24,
    )
    layer_decay: Share | None = key(
        None, "a block's learning rate as a share of the next block's; null: 1", 0.75
    )
    adamw_lr: PositiveFloat | None = key(
        None,
        f"{listed('optimizer.adamw_lr')}: highest learning rate of what AdamW trains; null: lr",
        0.001,
    )
    momentum: Decay = key(0.9, f"{listed('optimizer.momentum')}: share of the last step")
    nesterov: bool = key(False, f"{listed('optimizer.nesterov')}: Nesterov's form of momentum")
    weight_decay: NonNegativeFloat = key(
        0.0,
        "pulls weights towards zero, BatchNorm and biases included; see norm_weight_decay",
        0.0005,
    )
    norm_weight_decay: NonNegativeFloat | None = key(
        None, "weight decay of normalization layers and biases; null: same as weight_decay", 0.0
    )
    betas: list[Decay] = key(
        [0.9, 0.999],
        f"{listed('optimizer.betas')}: decay of the averages of gradients and squares",
        min_length=2,
        max_length=2,
    )
    eps: PositiveFloat = key(1e-8, f"{listed('optimizer.eps')}: added to the divisor")
    args: Arguments = key({}, "more arguments of the optimizer's class", {"amsgrad": True})


class ScheduleRecipe(_Section):
    """How the learning rate changes over the run."""

    # mypy cannot read the names from the table, so the error is ignored.
    name: Literal[*LR_SCHEDULES] | str = key(  # type: ignore[valid-type]
        "cosine",
        "how the learning rate changes after the warm-up; or one that a plugin registers",
    )
    warmup_epochs: NonNegativeFloat = key(
        0.0, "epochs over which the rate rises to optimizer.lr; fractions work too", 0.5
    )
    warmup_factor: Share = key(0.01, "the share of optimizer.lr at the first step")
    min_lr: NonNegativeFloat = key(
        0.0, f"{listed('schedule.min_lr')}: the last learning rate", 0.0001
    )
    restart: Restart = key(
        False,
        f"{listed('schedule.restart')}: true lets epochs that are added begin a new one; a list: "
        "after which",
        [5],
    )
    step_epochs: Positive = key(
        30, f"{listed('schedule.step_epochs')}: epochs between changes, counted after the warm-up"
    )
    gamma: Share = key(
        0.1,
        f"{listed('schedule.gamma')}: factor of the learning rate at each change; exponential: "
        "each epoch",
    )
    power: PositiveFloat = key(
        1.0,
        f"{listed('schedule.power')}: exponent of the share of the steps that are left",
        0.9,
    )
    patience: Positive = key(
        10,
        f"{listed('schedule.patience')}: epochs without a better metric before the rate changes",
        3,
    )

    @property
    def restarts(self) -> list[float]:
        """Epochs after which the schedule restarts at the highest rate, in ascending order.

        Empty unless `restart` is a list and the schedule reads it.
        """
        if isinstance(self.restart, list) and self.name in readers("schedule.restart"):
            return self.restart
        return []


class TaskRecipe(_Section):
    """The prediction that the network makes for an image."""

    name: str = key(
        "classification", f"{', '.join(TASKS)}, or one that a plugin registers", "multilabel"
    )
    metric: str | None = key(
        None,
        "metric that chooses the best epoch, for stop.patience and sweep; null: the task's",
        "f1_macro",
    )
    metrics: Metrics | None = key(
        None,
        "metrics to show and write; null: the task's to show, all to write",
        ["auroc", "f1_macro"],
    )


class LossRecipe(_Section):
    """The loss that training minimizes."""

    label_smoothing: float = key(
        0.0, "share of the target spread over all classes", 0.1, ge=0, lt=1
    )
    class_weights: Literal["balanced"] | list[NonNegativeFloat] | None = key(
        None,
        "weight of each class in the loss: balanced (rare classes more), or a number per class",
    )


class DistillRecipe(_Section):
    """Learning from a trained model, the teacher, in addition to the labels."""

    teacher: str | None = key(
        None, "a run, a file of its weights, timm:NAME or torchvision's NAME", "runs/teacher"
    )
    weight: float | None = key(None, "the teacher's share of the loss; null: 0.5", 0.7, ge=0, le=1)
    temperature: float | None = key(
        None, "divides the outputs of both, before softmax; null: 4", 2.0, ge=0.1, le=100
    )


class PipelineRecipe(_Section):
    """How the stages of a model work; for mode=split and mode=pipeline."""

    schedule: Schedule | None = key(
        None,
        "order of the work; null: streams in one process, else 1f1b, or measured if faster",
        "gpipe",
    )
    stages: int | None = key(
        None, "number of stages; null: one per device or process", 4, ge=2, le=1024
    )
    virtual_stages: Positive | None = key(
        None, "stages on each rank; null: 2 if the schedule has several", 2, le=64
    )
    microbatches: MicroBatches = key(
        "auto", "number of micro-batches; auto measures a few numbers", 8
    )
    split_size: Positive | None = key(None, "images per micro-batch, instead of microbatches", 16)
    cuts: Cuts = key(
        "auto",
        "names of the modules after which to cut; auto balances the measured times",
        ["layer2.3"],
    )
    deferred_batch_norm: bool = key(
        True, "BatchNorm's running statistics over whole batches, as without micro-batches"
    )
    timeline: bool = key(False, "draw each stage's work as timeline.png and timeline.json")


class DdpRecipe(_Section):
    """Options of mode=ddp."""

    compress: Literal["bf16"] | None = key(
        None, "bf16: round gradients, to send half the bytes; null: send them as they are"
    )


class LocalSGDRecipe(_Section):
    """Options of mode=local_sgd."""

    every: Positive | None = key(
        None, "steps between averagings of the weights; null: every epoch", 20
    )
    outer_lr: PositiveFloat = key(
        1.0,
        "learning rate of the step from the last average to the new one; 1: all the way",
        0.7,
    )
    outer_momentum: Decay | None = key(
        None, "Nesterov momentum of these steps; 0: none; null: 0.5 if every is given, else 0", 0.5
    )
    fragments: Positive = key(
        1, "parts of the weights that are averaged in turn, every / fragments steps apart", 4
    )
    delay: int = key(
        0, "steps of training while averages are exchanged; less than every", 5, ge=0, le=2**20
    )
    compress: Literal["bf16"] | None = key(
        None, "bf16: send and sum the changes of weights in bf16, half the bytes; null: do not"
    )

    @property
    def momentum(self) -> float:
        """Momentum of the outer optimizer: `outer_momentum`, or its default."""
        if self.outer_momentum is not None:
            return self.outer_momentum
        # The defaults are the best values on CIFAR-10, see the guide's page `modes`.
        if self.every is not None:
            return 0.5
        return 0.0

    @property
    def streams(self) -> bool:
        """Whether workers exchange fragments of the weights instead of all weights at once."""
        return self.every is not None and (
            self.fragments > 1 or self.delay > 0 or self.compress is not None
        )

    @property
    def outer_copies(self) -> int:
        """Number of copies of the weights that the outer optimizer stores."""
        if self.streams:
            # Outer weights, velocities, and the sum of the outer gradients.
            return 2 + (self.momentum > 0)
        if self.momentum > 0:
            return 2
        # With learning rate 1 the new weights are the average, so no old weights are needed.
        if self.outer_lr == 1.0:
            return 0
        return 1


class FsdpRecipe(_Section):
    """Options of mode=fsdp."""

    shards: int | None = key(
        None, "ranks that hold one copy of the weights; null: all ranks", 8, ge=2, le=2**16
    )
    reshard: bool = key(
        True,
        "free a block's weights after its forward pass; false: gather them once less, needs more "
        "memory",
    )
    offload: bool = key(
        False, "keep a GPU's shards, their gradients and the optimizer in host memory"
    )


class PredictRecipe(_Section):
    """How `predict` labels images; training ignores it."""

    batch_size: Positive | None = key(
        None, "images at once; null: what each device handles best", 64, le=2**24
    )
    split: Literal["train", "val"] | None = key(
        None, "label this part of the data set instead of data.root's files", "val"
    )
    format: Literal["csv", "jsonl"] = key("csv", "format of the predictions file")
    features: bool = key(
        False, "write the inputs of the last layer too, to features.npy, and paths to features.csv"
    )
    tta: Literal["flip"] | None = key(
        None, "average the probabilities of each image and its mirror image", "flip"
    )
    timeout: PositiveFloat = key(60.0, "seconds allowed for one image")


class StopRecipe(_Section):
    """When a run ends before its last epoch."""

    patience: Positive | None = key(
        None, "end after this many epochs without a better metric; null: do not", 5
    )


class EvaluateRecipe(_Section):
    """When a run evaluates besides the end of every epoch."""

    every_steps: Positive | None = key(
        None, "steps between evaluations within epochs; null: none", 500
    )


class VerifyRecipe(_Section):
    """How often a run verifies that its devices compute correctly."""

    every: Interval = key(
        None, "steps or time between steps that are computed twice as a check; null: never", "30m"
    )


class SaveRecipe(_Section):
    """How often checkpoints are written."""

    every_epochs: Positive | None = key(
        1, "epochs between checkpoints; null: do not save at the end of epochs"
    )
    every_steps: Positive | None = key(
        None, "steps between checkpoints within epochs; null: none", 500
    )
    keep: int = key(2, "number of newest checkpoints to keep", 5, ge=2)
    top_k: Positive | None = key(
        None, "number of best evaluated checkpoints to keep besides; null: none", 3
    )


class LoggingRecipe(_Section):
    """Logs and output of a run."""

    every_steps: Positive = key(100, "steps between points in TensorBoard and rows of steps.csv")
    warmup_steps: int = key(10, "number of first steps that speed figures leave out", ge=0)
    tensorboard: bool = key(True, "write TensorBoard's events into the run folder")
    wandb: Logger = key(
        None, "Weights & Biases project that also receives the figures, or true", "my-project"
    )
    mlflow: Logger = key(
        None, "MLflow server or folder that also receives the figures, or true", "http://host:5000"
    )
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
        1,
        "compute a batch in this many pieces, one after the other, to save memory; auto: the "
        "fewest that fit",
        4,
    )
    shares: Shares = key(
        None,
        "what part of every batch each rank computes, in proportion; auto: as fast as each is; "
        "null: equal",
        [3, 1],
    )
    epochs: Positive = key(10, "passes over the training images", 30)
    max_steps: Positive | None = key(
        None, "end after this many optimizer steps, if that is sooner than epochs", 100
    )
    max_time: Duration = key(
        None, "save and end after this time of one start: 90s, 30m, 2h, 1d; null: no limit", "2h"
    )
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()
    loss: LossRecipe = LossRecipe()
    distill: DistillRecipe = DistillRecipe()
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = key(
        "fp32",
        "number format to compute in; on a GPU bf16 is fastest, tf32 more precise; weights stay "
        "fp32",
        "bf16",
    )
    channels_last: bool = key(True, "memory order of images and convolutions; usually faster")
    compile: bool = key(False, "torch.compile: minutes at the start, faster steps on a GPU")
    graphs: bool | Literal["auto"] = key(
        "auto", "record a step's kernels once and replay them, on a GPU; auto: if that is faster"
    )
    ema: float | None = key(
        None,
        "decay of a moving average of the weights; lower in the first steps",
        0.999,
        gt=0,
        lt=1,
    )
    recompute: bool | Literal["auto"] = key(
        False,
        "compute activations again in the backward pass, to save memory; auto: if a GPU's does not "
        "suffice",
    )
    clip_grad_norm: PositiveFloat | None = key(None, "clip the gradient norm to this", 1.0)
    sync_bn: bool = key(False, "ddp: BatchNorm over the global batch instead of each rank's share")
    pipeline: PipelineRecipe = PipelineRecipe()
    ddp: DdpRecipe = DdpRecipe()
    local_sgd: LocalSGDRecipe = LocalSGDRecipe()
    fsdp: FsdpRecipe = FsdpRecipe()
    devices: Devices = key("auto", "auto for all devices, or a list", ["cuda:0", "cuda:1"])
    threads: Positive | None = key(
        None, "CPU threads of a process; null: cores / local ranks", 4, le=4096
    )
    timeout: PositiveFloat = key(600.0, "seconds to wait for a silent rank, loader worker or GPU")
    grace: PositiveFloat = key(60.0, "seconds a step may still take after SIGTERM")
    stop: StopRecipe = StopRecipe()
    evaluate: EvaluateRecipe = EvaluateRecipe()
    verify: VerifyRecipe = VerifyRecipe()
    save: SaveRecipe = SaveRecipe()
    resume: Literal["auto"] | None = key(
        None, "auto: continue from the newest intact checkpoint in output"
    )
    logging: LoggingRecipe = LoggingRecipe()
    predict: PredictRecipe = PredictRecipe()
    seed: int = key(0, "seed of everything random", 1, ge=0, lt=2**63)
    deterministic: bool = key(False, "give the same bits in each run on a GPU, with slower kernels")
    output: str | None = key(None, "the run folder; null: a new one below runs/", "runs/first")

    _name: str = PrivateAttr(default=NAMELESS)
    # YAML does not store this, so child ranks get the typed keys as arguments (`format_typed`).
    _typed: tuple[str, ...] = PrivateAttr(default=())

    @property
    def typed(self) -> tuple[str, ...]:
        """Keys that the user typed, or passed as keywords, even with their default values."""
        return self._typed

    @property
    def name(self) -> str:
        """Name of the recipe's file or run folder, or else of its model and data set."""
        if self._name == NAMELESS:
            return re.sub(r"[^\w.-]", "_", f"{self.model.name}-{self.data.name}")
        return self._name

    @property
    def traits(self) -> Traits:
        """Properties of the mode."""
        return TRAITS[self.mode]

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up: `optimizer.lr`, scaled by batch_size / `lr_per` if set.

        This is the linear scaling rule of Goyal et al., "Accurate, Large Minibatch SGD"
        (arXiv:1706.02677), section 2.1.
        """
        optimizer = self.optimizer
        if optimizer.lr_per is None:
            return optimizer.lr
        return optimizer.lr * self.batch_size / optimizer.lr_per

    @property
    def pieces(self) -> int:
        """Number of micro-batches per local batch: `accumulate`, or 1 if it is auto.

        A run replaces auto by a number.
        """
        if self.accumulate == "auto":
            return 1
        return int(self.accumulate)

    @property
    def processes(self) -> Processes:
        """Whether one process trains ("one"), several train ("many"), or both work ("either").

        The mode determines the result. If the mode allows either and the recipe sets
        `pipeline.schedule`, the schedule determines it.
        """
        if self.traits.processes != "either" or self.pipeline.schedule is None:
            return self.traits.processes
        if self.pipeline.schedule == STREAMS:
            return "one"
        return "many"

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested dictionaries of plain Python values."""
        return self.model_dump()

    def for_others(self) -> dict[str, Any]:
        """Return the recipe for the metadata of weights.

        Paths on this machine, the teacher and the loggers are left out.
        """
        omitted = dict.fromkeys(("output", "resume", *LOCAL))
        tree = self.replace(distill={}, **omitted).to_dict()
        del tree["logging"]
        return tree

    def to_yaml(self) -> str:
        """Return the recipe as YAML, which `load` accepts."""
        return format_yaml_document(self.to_dict())

    def replace(self, **words: Any) -> Recipe:
        """Return a copy with other values of some keys.

        Args:
            **words: values by key, with two underscores for a dot: `data__root="x"`.
        """
        tree = self.to_dict()
        for key, value in words.items():
            tree = with_value(tree, key.split("__"), value)
        changed = validated(tree, self._name)
        changed._typed = self._typed
        return changed


def key_fields(
    model: type[BaseModel] = Recipe, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield each dotted key of a recipe, or of a section, with its field."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from key_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def validated(plain: Any, name: str, origins: Mapping[str, str] | None = None) -> Recipe:
    """Build a recipe from nested dictionaries of plain values.

    Args:
        plain: the values.
        name: name of the recipe.
        origins: source of each dotted key, such as a file. An error message names the source unless
            it is the recipe itself.

    Raises:
        RecipeError: a key or value is invalid. The message says what to type.
    """
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        key, line = explain_invalid(
            error, flatten(Recipe().to_dict()), [*Recipe.model_fields, EXTENDS]
        )
        key = key.partition("[")[0]
        sources = origins or {}
        source = name
        for inner in (key, *sources):
            if inner in sources and f"{inner}.".startswith(f"{key}."):
                source = sources[inner]
                break
        if source != name:
            line += f" (in {source})"
        raise RecipeError(f"{name}: {line}") from None
    # Limits of single keys are checked by pydantic above, and combinations here.
    _check_texts(recipe, name)
    _check_together(recipe, name)
    # The name is a private attribute, because equal recipes may have different names.
    recipe._name = name
    return recipe


def _check_texts(recipe: Recipe, name: str) -> None:
    """Refuse strings that cannot be stored in the files of a run and read back."""
    for key, value in flatten(recipe.to_dict()).items():
        for text in _list_texts(value):
            if fault := explain_unstorable(text):
                raise RecipeError(f"{name}: {key}={format_value(text)}: {fault}")


def _list_texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value of a key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _list_texts([*value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _list_texts(item)


def _check_together(recipe: Recipe, name: str) -> None:
    """Refuse values that are valid alone but not together."""
    if recipe.batch_size % recipe.pieces:
        sizes = format_neighbors(recipe.batch_size, recipe.pieces)
        raise RecipeError(
            f"{name}: batch_size={recipe.batch_size} does not divide into "
            f"accumulate={recipe.pieces} equal parts; try batch_size={sizes}"
        )
    optimizer = recipe.optimizer
    has_nesterov = optimizer.nesterov and is_read("optimizer.nesterov", optimizer.name)
    if has_nesterov and optimizer.momentum == 0:
        raise RecipeError(f"{name}: optimizer.nesterov=true needs optimizer.momentum above 0")
    schedule = recipe.schedule
    if schedule.min_lr > recipe.peak_lr:
        scaled = ""
        if optimizer.lr_per is not None:
            scaled = f", which is {recipe.peak_lr:g} at batch_size={recipe.batch_size}"
        raise RecipeError(
            f"{name}: schedule.min_lr={schedule.min_lr} is above "
            f"optimizer.lr={optimizer.lr}{scaled}"
        )
    patience = recipe.stop.patience
    is_waiting = is_read("schedule.patience", schedule.name)
    if is_waiting and patience is not None and patience <= schedule.patience:
        raise RecipeError(
            f"{name}: stop.patience={patience} ends the run before "
            f"schedule.patience={schedule.patience} lowers the learning rate: type "
            f"stop.patience={2 * schedule.patience} or more, or null"
        )
    if recipe.pipeline.split_size is not None and recipe.pipeline.microbatches != "auto":
        raise RecipeError(
            f"{name}: pipeline.split_size and pipeline.microbatches set the same: keep one"
        )
    data = recipe.data
    if data.balance and recipe.loss.class_weights == "balanced":
        raise RecipeError(
            f"{name}: data.balance=true and loss.class_weights=balanced do the same: keep one"
        )
    if data.balance and recipe.augment.repeats > 1:
        raise RecipeError(
            f"{name}: data.balance=true repeats images itself: set augment.repeats=1 or "
            "data.balance=false"
        )
    channels = data.channels or 3
    for key, numbers in (("mean", data.mean), ("std", data.std)):
        count = len(numbers or (0,) * channels)
        # Numbers for gray images can be converted to numbers for color images, and back.
        if count != channels and {count, channels} - {1, 3}:
            raise RecipeError(
                f"{name}: data.{key} has {count} numbers, and data.channels={channels}: one for "
                "each"
            )
    low, high = recipe.augment.crop_scale
    if low > high:
        raise RecipeError(
            f"{name}: augment.crop_scale=[{low},{high}] is in the wrong order; try [{high},{low}]"
        )
