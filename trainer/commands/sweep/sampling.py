"""Ranges: what Optuna's TPE sampler draws, kept in Optuna's own file in the sweep's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.commands.sweep.space import Choices, Dimension, SearchSpace, SweepTrial

JOURNAL = "optuna.log"
RANDOM = 10  # trials that are drawn at random before the sampler looks at what was good


class Sampler:
    """Draws one trial after another, from those that have ended by then; what a stop cut short comes again first."""

    def __init__(self, space: SearchSpace, folder: Path, larger_is_better: bool) -> None:
        self.space, self.study = space, _study(folder / JOURNAL, larger_is_better)
        self._open: dict[int, Any] = {}  # Optuna's trials by number, as long as it waits for their value

    def trials(self) -> Iterator[SweepTrial]:
        import optuna

        # One that was stopped before it had its values is none.
        kept = [trial for trial in self.study.trials if {*trial.params} == {*self.space.keys}]
        for frozen in kept:
            open_again = None if frozen.state.is_finished() else optuna.trial.Trial(self.study, frozen._trial_id)
            yield self._trial(frozen, open_again)
        for _ in range(len(kept), self.space.trials or 0):
            seed = self.space.base.seed + len(self.study.trials)  # a restart draws something new
            self.study.sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed % 2**32)
            asked = self.study.ask({part.key: _distribution(part) for part in self.space.dimensions})
            yield self._trial(asked, asked)

    def ended(self, number: int, value: float | None) -> None:
        """Tell what the runs of a trial came to; None: it failed."""
        import optuna

        if (asked := self._open.pop(number, None)) is not None:
            state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
            self.study.tell(asked, value, state)

    def _trial(self, drawn: Any, asked: Any) -> SweepTrial:
        if asked is not None:
            self._open[drawn.number + 1] = asked
        values = {
            part.key: str(drawn.params[part.key]) if isinstance(part, Choices) else part.typed(drawn.params[part.key])
            for part in self.space.dimensions
        }
        return SweepTrial(drawn.number + 1, values)


class _HeldAlready:
    """Optuna's lock on its file: the sweep holds the folder, and a lock of Optuna's own would outlive SIGKILL."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def _study(file: Path, larger_is_better: bool) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if file.exists():
        text = file.read_bytes()
        file.write_bytes(text[: text.rfind(b"\n") + 1])  # SIGKILL may have cut the last line short
    lock: Any = _HeldAlready()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(file), lock)),
        study_name="sweep",
        direction="maximize" if larger_is_better else "minimize",
        load_if_exists=True,
    )


def _distribution(part: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(part, Choices):
        return CategoricalDistribution(part.values)
    if part.whole:
        return IntDistribution(int(part.low), int(part.high), log=part.log)
    return FloatDistribution(part.low, part.high, log=part.log)
