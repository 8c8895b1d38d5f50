"""Which run comes next: every combination in its order, or what Optuna samples, which also ends hopeless ones early."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.commands.sweep.space import SearchSpace, SweepTrial
from trainer.recipe.search_space import Choices, Dimension

JOURNAL = "optuna.log"
RANDOM = 10  # trials that are drawn at random before the sampler looks at what was good
UNPRUNED = 5  # trials that run to their end before one is ended early
PATIENT = 3  # a trial is left alone for the first of so many parts of its epochs


@dataclass(frozen=True)
class TrialRun:
    """One run of a trial; `repeat` counts from 0, and each has a seed of its own."""

    trial: SweepTrial
    repeat: int


@dataclass(frozen=True)
class TrialOutcome:
    """How a run ended."""

    value: float | None  # of the metric in its best epoch; None where there is none
    epochs: int  # that were evaluated
    seconds: float  # of training, over all parts of the run
    images: int = 0  # that were held out
    error: str | None = None  # why it failed; None where it did not
    code: int = 0  # exit code; 0 where it did not fail
    early: bool = False  # whether it was ended early, as worse than others at that epoch


class Combinations:
    """Every combination with the first seed, then every one with the next: what is stopped early tells most."""

    def __init__(self, space: SearchSpace) -> None:
        self.trials = space.combinations()
        self._waiting = deque(TrialRun(trial, repeat) for repeat in range(space.repeats) for trial in self.trials)
        self._failed: set[int] = set()

    def next(self) -> TrialRun | None:
        """The next run; None where there is none, or none before another ends."""
        while self._waiting:
            run = self._waiting.popleft()
            if run.trial.number not in self._failed:
                return run
        return None

    def hopeless(self, run: TrialRun, epoch: int, value: float) -> bool:
        """Whether to end a run early, after an epoch with this value of the metric."""
        return False

    def given_up(self, run: TrialRun) -> bool:
        """Whether an earlier part of the sweep ended it early."""
        return False

    def ended(self, run: TrialRun, outcome: TrialOutcome) -> None:
        """A run ended, now or before this sweep went on."""
        if outcome.error is not None:
            self._failed.add(run.trial.number)


class Sampled:
    """What Optuna's TPE sampler draws, one trial after another, from those that have ended by then.

    Its storage is a file in the sweep's folder: trials that a stop cut short are taken up again, with their values. A
    trial whose first run is below the median of the others at the same epoch is ended early, and not repeated.
    """

    def __init__(self, space: SearchSpace, folder: Path, larger_is_better: bool) -> None:
        self.space = space
        self._study = _study(folder / JOURNAL, space, larger_is_better)
        self.trials: list[SweepTrial] = []
        self._open: dict[int, Any] = {}  # Optuna's trials by number, as long as it waits for their value
        self._outcomes: dict[int, list[TrialOutcome]] = {}
        self._waiting: deque[TrialRun] = deque()
        self._before = deque(self._study.trials)

    def next(self) -> TrialRun | None:
        if self._waiting:
            return self._waiting.popleft()
        while self._before:
            frozen = self._before.popleft()
            if set(frozen.params) == set(self.space.keys):  # else it was stopped before it had its values
                asked = None if frozen.state.is_finished() else _resumed(self._study, frozen)
                return self._begun(frozen.number, frozen.params, asked)
        if len(self.trials) >= (self.space.trials or 0):
            return None
        self._study.sampler = _sampler(self.space.base.seed + len(self._study.trials))  # a restart draws something new
        asked = self._study.ask(_distributions(self.space.dimensions))
        return self._begun(asked.number, asked.params, asked)

    def _begun(self, number: int, params: dict[str, Any], asked: Any) -> TrialRun:
        """The first run of a trial of Optuna's."""
        values = {
            part.key: str(params[part.key]) if isinstance(part, Choices) else part.typed(params[part.key])
            for part in self.space.dimensions
        }
        trial = SweepTrial(number + 1, values)
        self.trials.append(trial)
        if asked is not None:
            self._open[trial.number] = asked
        return TrialRun(trial, 0)

    def hopeless(self, run: TrialRun, epoch: int, value: float) -> bool:
        asked = self._open.get(run.trial.number)
        if asked is None or run.repeat:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an epoch that an earlier part of the sweep has told
            asked.report(value, epoch)
        return bool(asked.should_prune())

    def ended(self, run: TrialRun, outcome: TrialOutcome) -> None:
        number = run.trial.number
        outcomes = self._outcomes.setdefault(number, [])
        outcomes.append(outcome)
        going_on = outcome.error is None and not outcome.early
        if going_on and len(outcomes) < self.space.repeats:
            self._waiting.append(TrialRun(run.trial, len(outcomes)))
            return
        asked = self._open.pop(number, None)
        if asked is None:
            return
        if outcome.early:
            self._study.tell(asked, state=_states().PRUNED)
        elif outcome.error is not None:
            self._study.tell(asked, state=_states().FAIL)
        else:
            self._study.tell(asked, fmean(outcome.value for outcome in outcomes if outcome.value is not None))

    def given_up(self, run: TrialRun) -> bool:
        return bool(self._study.trials[run.trial.number - 1].state == _states().PRUNED)


Source = Combinations | Sampled  # what is to run, and who hears of it


class _HeldAlready:
    """Optuna's lock on its file: the sweep holds the folder, and a lock of Optuna's own would outlive SIGKILL."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def _study(file: Path, space: SearchSpace, larger_is_better: bool) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if file.exists():
        text = file.read_bytes()
        file.write_bytes(text[: text.rfind(b"\n") + 1])  # SIGKILL may have cut the last line short
    lock: Any = _HeldAlready()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(file), lock)),
        sampler=_sampler(space.base.seed),
        pruner=optuna.pruners.MedianPruner(UNPRUNED, space.base.epochs // PATIENT),
        study_name="sweep",
        direction="maximize" if larger_is_better else "minimize",
        load_if_exists=True,
    )


def _states() -> Any:
    from optuna.trial import TrialState

    return TrialState


def _sampler(seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed % 2**32)


def _distributions(dimensions: tuple[Dimension, ...]) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    made: dict[str, Any] = {}
    for part in dimensions:
        if isinstance(part, Choices):
            made[part.key] = CategoricalDistribution(part.values)
        elif part.whole:
            made[part.key] = IntDistribution(int(part.low), int(part.high), log=part.log)
        else:
            made[part.key] = FloatDistribution(part.low, part.high, log=part.log)
    return made


def _resumed(study: Any, frozen: Any) -> Any:
    """Optuna's handle on a trial that an earlier part of the sweep began."""
    import optuna

    return optuna.trial.Trial(study, frozen._trial_id)
