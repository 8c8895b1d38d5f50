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
    """Observations and warnings of a run, the same on every rank.

    Attributes:
        meter: Measures what keeps this machine from computing, since the run was built.
        strain: The worst strain of all ranks at the end of the last epoch.
        classes: Number of validation samples of each class (`actual`) and of predictions of each
            class (`predicted`), in the last two epochs. Empty if the task does not count them.
        warnings: Sentences about current problems, by kind.
        announced: Kinds of problems that were printed already.
        lasting: Warnings about problems that have passed since, by kind.
        ranks: Detects a rank that delays the others, if all do the same work.
        passes_to_compare: Number of passes whose state remains to be compared with the pass before.
        state_seen: State after the last compared pass, by names for messages.
        shares: Measures the speed of each rank, with shares=auto.
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


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the whole model, taken before a mode divides it.

    Attributes:
        parameters: Number of parameters.
        batch_norm: Whether the model has BatchNorm layers that train.
        notes: Banner lines about frozen parameters and parameter groups.
        training_flops: FLOPs of training on one sample. 0 if the peak of the devices is unknown.
        peak_flops: Peak FLOP/s of all devices together.
    """

    parameters: int
    batch_norm: bool
    notes: dict[str, str]
    training_flops: int
    peak_flops: float | None


class Observer:
    """Timers, logs and observations of a run. A checkpoint holds none of them."""

    def __init__(
        self, recipe: Recipe, world: World, tracker: NullTracker, ledger: Ledger, model: ModelFacts
    ) -> None:
        """Create the timers. `ledger` has counted since the process began to work."""
        self.tracker = tracker
        self.ledger = ledger
        self.model = model
        self.ledger.devices = world.local_devices
        self.timer = StepTimer(world.local_devices, recipe.logging.warmup_steps)
        self.noticed = Noticed(StrainMeter(world.place.local_size))
        # Peak bytes by device name.
        self.memory: dict[str, int] = {}
        # Lines about what is about to run, by title.
        self.banner_lines: dict[str, str] = {}
