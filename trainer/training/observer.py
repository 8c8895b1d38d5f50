"""The observer of a run on one rank: timers, logs, warnings, and properties of the whole model."""

from dataclasses import dataclass, field

from trainer.devices.host import Strain, StrainMeter
from trainer.distributed.world import World
from trainer.recipe import Recipe
from trainer.telemetry.clocks import Ledger, StepTimer
from trainer.telemetry.rank_watch import RankWatch, ShareWatch
from trainer.telemetry.tracking import NullTracker


@dataclass
class Noticed:
    """Observations and warnings of a run.

    `meter`, `announced`, `is_load_checked` and `state_seen` belong to this rank alone.

    Attributes:
        meter: Measures the load by other programs on this machine, since the run was built.
        strain: The highest load by other programs on any rank since the run was built. Updated at
            the end of each epoch and of the run.
        classes: The counts of the last two evaluations, older first: the number of validation
            samples of each class (`actual`), and of predictions of each class (`predicted`). Empty
            if the task does not count them.
        warnings: Sentences about current problems and those of `lasting`, by kind.
        announced: Kinds of problems that were printed already.
        lasting: Sentences about slow ranks, by kind, which remain even if the problem passes.
        ranks: Detects a rank that delays the others, if all do the same work.
        passes_to_compare: Number of passes that `noticing.compare_passes` still has to inspect. The
            first one only fills `state_seen`.
        state_seen: State after the last inspected pass. The keys are the names that messages use.
        shares: Measures the speed of each rank. None without shares=auto, or with a single rank.
        is_load_checked: Whether `noticing.print_early_load` has checked the load.
    """

    meter: StrainMeter
    strain: Strain = field(default_factory=Strain)
    classes: list[dict[str, list[int]]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)
    lasting: dict[str, str] = field(default_factory=dict)
    ranks: RankWatch = field(default_factory=RankWatch)
    passes_to_compare: int = 0
    state_seen: dict[str, object] = field(default_factory=dict)
    shares: ShareWatch | None = None
    is_load_checked: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the whole model, computed before a mode divides it.

    Attributes:
        parameters: Number of parameters.
        batch_norm: Whether any BatchNorm layer uses batch statistics in training.
        notes: Banner lines by title, about start weights, frozen parameters, learning rates, and
            devices that emulate the precision.
        training_flops: FLOPs of training on one sample. 0 if they or `peak_flops` are unknown.
        peak_flops: Peak FLOP/s of all GPUs together. None on CPUs, or if the peak or
            `training_flops` is unknown.
        knn_top1: Accuracy of the nearest neighbors of a linear probe's features, see
            `probing.measure_neighbors`. None without a probe, on ranks other than 0, and if images
            do not have exactly one class.
    """

    parameters: int
    batch_norm: bool
    notes: dict[str, str]
    training_flops: int
    peak_flops: float | None
    knn_top1: float | None = None


class Observer:
    """Timers, logs and observations of a run. A checkpoint holds none of them."""

    def __init__(
        self, recipe: Recipe, world: World, tracker: NullTracker, ledger: Ledger, model: ModelFacts
    ) -> None:
        """Create the timers. `ledger` has measured times since the start of this attempt."""
        self.tracker = tracker
        self.ledger = ledger
        self.model = model
        self.ledger.devices = world.local_devices
        self.timer = StepTimer(world.local_devices, recipe.logging.warmup_steps)
        self.noticed = Noticed(StrainMeter(world.place.local_size))
        # Peak memory in bytes by device name, for the devices of all ranks.
        self.memory: dict[str, int] = {}
        # Lines of the banner, by title.
        self.banner_lines: dict[str, str] = {}
