"""The keys of a plan: what `plan` returns and `plan --json` prints. They are stable.

Sizes are bytes, times seconds; None is what is not known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelFigures:
    name: str
    parameters: int
    forward_flops_per_image: int
    precision: str


@dataclass(frozen=True)
class DataFigures:
    """`source` tells how they are known."""

    name: str
    train_samples: int | None
    val_samples: int | None
    classes: int
    channels: int
    image_size: int
    source: str


@dataclass(frozen=True)
class BatchFigures:
    whole: int  # the global batch: "global", where it is written
    shards: int
    per_shard: int
    per_device: float
    accumulate: int
    per_pass: int
    microbatch: int | None
    wider: str | None  # words to try where GPUs get few images each


@dataclass(frozen=True)
class StepFigures:
    per_epoch: int | None
    epochs: int
    total: int | None
    patience: int | None  # epochs without a better metric that end it


@dataclass(frozen=True)
class RateFigures:
    """The learning rate at its highest and, where the number of steps is known, at the first and the last."""

    schedule: str
    warmup_epochs: float
    highest: float
    first: float | None
    last: float | None


@dataclass(frozen=True)
class Device:
    """Bytes on one device."""

    device: str
    parameters: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int
    images: int
    activations: int  # most at once in a step beyond weights, gradients and images
    peak: int  # most at once in all. Less than the sum where gradients take the place of activations


@dataclass(frozen=True)
class GraphFigures:
    """Bytes on each device for recorded steps beyond launched ones: those that stay, and those of a moment, in which a
    replayed step is compared with a launched one."""

    stays: int
    moment: int


@dataclass(frozen=True)
class LimitFigures:
    """What a device has, how much of it can be used, and how that is known."""

    bytes: int
    usable: float
    source: str


@dataclass(frozen=True)
class Advice:
    """Words that make the run fit, and the peak that they lead to."""

    words: str
    peak: int
    note: str


@dataclass(frozen=True)
class StageFigures:
    device: str
    parameters: int
    forward_flops: int
    flops_share: float
    sent_bytes: int


@dataclass(frozen=True)
class BubbleFigures:
    """A schedule's ideal bubble, and the most micro-batches that a worker has begun and not finished."""

    schedule: str
    microbatches: int
    bubble: float
    in_flight: int


@dataclass(frozen=True)
class PipelineFigures:
    schedule: str
    microbatches: int
    rows: int
    cuts: list[str]
    balanced_by: str
    stages: list[StageFigures]
    bubble_ideal: float | None
    bubbles: list[BubbleFigures]


@dataclass(frozen=True)
class TrafficFigures:
    """What goes between devices in a step, and what that takes at a stated bandwidth."""

    all_reduce_bytes_per_device: int
    crossing_bytes: int
    every_steps: int | None
    epoch_bytes_per_device: int
    seconds: float | None


@dataclass(frozen=True)
class DiskFigures:
    """A checkpoint, a weights file, a run folder when it is fullest."""

    checkpoint: int
    weights: int
    folder: int


@dataclass(frozen=True)
class PredictionFigures:
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    optimizer_seconds: float
    other_seconds: float
    bubble: float | None
    samples_per_sec: float


@dataclass(frozen=True)
class ReadingFigures:
    """Photos, as this machine reads them: a process's seconds for one, and images/s of all.
    Which of loader and model bounds a run, where the model's speed is predicted."""

    processes: int
    read_seconds: float
    decode_seconds: float
    transform_seconds: float
    samples_per_sec: float
    bound: Literal["loader", "model"] | None


@dataclass(frozen=True)
class ModeFigures:
    """A mode on as many devices: bytes on the fullest one, bytes sent by a device in a step (all that cross, where the
    model is in stages or copied), the ideal share of a step in which stages wait; or why it cannot be."""

    mode: str
    world_size: int | None = None
    devices: int | None = None
    peak: int | None = None
    activations: int | None = None
    fits: bool | None = None
    traffic: int | None = None
    bubble: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class RunPlan:
    """All of it."""

    recipe: str
    mode: str
    world_size: int
    devices: list[str]
    model: ModelFigures
    data: DataFigures
    batch: BatchFigures
    steps: StepFigures
    learning_rate: RateFigures
    memory_per_device: list[Device]
    graphs: GraphFigures | None  # None where steps are launched
    memory_limit: LimitFigures | None
    peak: int
    fits: bool | None
    advice: list[Advice]
    pipeline: PipelineFigures | None
    communication: TrafficFigures
    disk: DiskFigures
    reading: ReadingFigures | None
    prediction: PredictionFigures | None
    predicted_samples_per_sec: float | None
    commands: list[str]
    needs_folder: bool
    assumptions: list[str]
    modes: list[ModeFigures] | None

    def to_dict(self) -> dict[str, Any]:
        """As `plan --json` prints it."""
        batch = {"global" if key == "whole" else key: value for key, value in asdict(self.batch).items()}
        return asdict(self) | {"batch": batch}
