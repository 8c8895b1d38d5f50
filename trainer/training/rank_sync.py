"""Exchange of loss, failures, signals and times between training ranks, about once a second."""

import math
import shlex
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from trainer.errors import Interrupted, NotFiniteError, Preempted
from trainer.recipe.field_types import parse_duration
from trainer.training import noticing
from trainer.training.observer import Observer
from trainer.training.snapshots import Snapshots
from trainer.training.verifying import Verifier


class TimeIsUp(Exception):
    """The run has trained for `max_time`. Raised on every rank at the same step."""


class RankReport(NamedTuple):
    """Values that a rank sends and that are summed over the ranks.

    True is sent as 1, so the sum of a flag is the number of ranks on which the flag is True.

    Attributes:
        loss: Sum of the losses of the steps since the last logged step.
        seconds: Seconds of a step, or of a batch of an evaluation.
        bad: Whether a loss or gradient was not finite.
        interrupted: Whether Ctrl-C was received.
        stopped: Whether any signal was received.
        unsaved: Whether a save has failed.
        late: Whether `max_time` is over.
        unverified: Whether the time of `verify.every` is over.
    """

    loss: float
    seconds: float
    bad: float
    interrupted: float
    stopped: float
    unsaved: float
    late: float
    unverified: float


@dataclass(frozen=True)
class SyncedState:
    """Values that all ranks agree on at the same step, and this rank's `window`.

    Attributes:
        loss: Loss summed over the ranks and the steps since the last logged step. 0 within an
            evaluation.
        finite: Whether all losses and gradients of these steps were finite.
        stop: Type of the error to stop with if a rank received a signal or `max_time` is over, or
            else None.
        ranks: For each rank the seconds of a step, the seconds of waiting for data in a step, and
            the seconds of a forward pass (of one block, if weights are sharded). Empty within an
            evaluation, and if the ranks cannot be compared by these times (see
            `Measures.forward_watch`).
        window: This rank's number of steps, their seconds, and their seconds of waiting for data,
            since the last logged step and without warm-up steps.
    """

    loss: float
    finite: bool
    stop: type[Exception] | None
    ranks: list[list[float]]
    window: tuple[int, float, float]


class RankSync:
    """Synchronization of all ranks in one small all-reduce about once a second."""

    def __init__(
        self, observer: Observer, snapshots: Snapshots, verifier: Verifier, done: int = 0
    ) -> None:
        """Create the synchronization of an epoch or of an evaluation.

        Args:
            observer: Timers and warnings of the run.
            snapshots: Saves the run.
            verifier: Verifies the run if the time of `verify.every` is over on any rank.
            done: Number of steps of the run, or of batches of the evaluation, that are done.
        """
        self.resolved = snapshots.resolved
        self.state = snapshots.state
        self.interrupts = snapshots.interrupts
        self.observer = observer
        self.snapshots = snapshots
        self.verifier = verifier
        # Number of the step, or of the batch of an evaluation, after which the ranks synchronize
        # again.
        self.next = done + 1
        self._window = (0, 0.0, 0.0)
        self._deadline = math.inf
        if self.resolved.recipe.max_time is not None:
            seconds = parse_duration(self.resolved.recipe.max_time) or math.inf
            self._deadline = observer.ledger.run_start + seconds

    def after_step(self, log: bool) -> SyncedState:
        """Synchronize after a training step. Collective.

        Args:
            log: Whether this step is logged, so that the next window starts after it.

        Raises:
            NotFiniteError: A loss or gradient of some rank is not finite. Raised on every rank.
        """
        state = self.state
        observer = self.observer
        timer = observer.timer
        ledger = observer.ledger
        noticed = observer.noticed
        recipe = self.resolved.recipe
        step = state.position.step
        self.resolved.world.heartbeat()
        losses = torch.stack(state.unlogged).tolist()
        is_bad = state.updater.is_bad()
        steps, seconds, data_wait = timer.stop()
        ledger.note_steps(steps, seconds, data_wait, timer.waits[not timer.steps])
        is_warm = timer.seen - steps >= recipe.logging.warmup_steps
        if is_warm:
            window_steps, window_seconds, window_wait = self._window
            self._window = (window_steps + steps, window_seconds + seconds, window_wait + data_wait)
        count = max(1, steps)
        first = timer.seen <= count
        step_seconds = seconds / count
        watch = state.strategy.forward_watch
        rank_seconds = None
        if watch:
            rank_seconds = step_seconds, data_wait / count, watch.lap()
        synced = self.exchange(step, step_seconds, math.fsum(losses), is_bad, first, rank_seconds)
        if not synced.finite:
            kind = "gradient" if math.isfinite(synced.loss) else "loss"
            raise NotFiniteError(
                f"a {kind} was not finite at step {step} or shortly before; no checkpoint contains "
                f"it. Try optimizer.lr={min(0.1, recipe.optimizer.lr / 10):g}, "
                "schedule.warmup_epochs=1, or clip_grad_norm=1"
            )
        if timer.seen >= self.snapshots.replicas.next:
            self.snapshots.replicas.compare_again()
        if synced.ranks and not first:
            with ledger.span("logging"):
                noticing.watch_ranks(self.resolved, noticed, step, steps, synced.ranks)
            if noticed.shares:
                noticed.shares.add(steps, synced.ranks)
            if is_warm:
                # In the all-reduce of a step, each rank waits for the rank that waits longest for
                # data.
                longest_wait = steps * max(rank[1] for rank in synced.ranks)
                peer_wait = max(0.0, longest_wait - data_wait)
                ledger.note_peers(peer_wait)
                # Count this time as waiting for data in the timer and in the log, too, so that all
                # reports of the run agree.
                timer.waits[0] += peer_wait
                window_steps, window_seconds, window_wait = self._window
                self._window = (window_steps, window_seconds, window_wait + peer_wait)
                synced = replace(synced, window=self._window)
        if log:
            self._window = (0, 0.0, 0.0)
        return synced

    def exchange(
        self,
        done: int,
        seconds: float,
        loss: float = 0.0,
        bad: bool = False,
        first: bool = False,
        rank_seconds: tuple[float, float, float] | None = None,
    ) -> SyncedState:
        """Exchange values with all ranks, and choose the next step to synchronize at. Collective.

        If `max_time` is over on any rank, `SyncedState.stop` is `TimeIsUp`, unless there is a
        signal.

        Args:
            done: Number of steps, or of batches of an evaluation, that are done.
            seconds: Seconds of one step or batch.
            loss: This rank's sum of losses.
            bad: Whether a loss or gradient of this rank was not finite.
            first: Whether this is the first step or batch, which takes longer than others.
            rank_seconds: This rank's row of `SyncedState.ranks`, or None if it is not measured.
        """
        world = self.resolved.world
        saver = self.snapshots.saver
        signal = self.interrupts.received
        report = RankReport(
            loss,
            seconds,
            bad,
            interrupted=signal is not None and signal.name == "SIGINT",
            stopped=signal is not None,
            unsaved=saver.error is not None,
            late=time.perf_counter() >= self._deadline,
            unverified=self.verifier.is_late(),
        )
        # Each rank fills its own row, so that the sum has the rows of all ranks.
        rows = torch.zeros(0, 3, dtype=torch.float64)
        if rank_seconds:
            rows = torch.zeros(world.size, 3, dtype=torch.float64)
            rows[world.rank] = torch.tensor(rank_seconds, dtype=torch.float64)
        values = torch.tensor(report, dtype=torch.float64)
        values = torch.cat([values, rows.flatten()])
        summed = world.sum_(values)
        total = RankReport(*summed[: len(report)].tolist())
        if total.unverified:
            self.verifier.is_requested = True
        if total.unsaved:
            self.snapshots.finish_saving()
        seconds = total.seconds / world.size
        per_second = int(1 / max(seconds, 1e-6))
        self.next = done + max(1, min(1000, per_second))
        self.interrupts.beat()
        save_seconds = saver.costs[-1].seconds if saver.costs else 0.0
        if not first and (warning := self.interrupts.too_slow(seconds, save_seconds)):
            self.resolved.tracker.say(warning)
        stop: type[Exception] | None = None
        if total.interrupted:
            stop = Interrupted
        elif total.stopped:
            stop = Preempted
        elif total.late:
            stop = TimeIsUp
        is_finite = not total.bad and math.isfinite(total.loss)
        ranks = summed[len(report) :].view(-1, 3).tolist()
        return SyncedState(total.loss, is_finite, stop, ranks, self._window)

    def save_and_stop(self, stop: type[Exception]) -> None:
        """Save the run and raise `stop`. Collective.

        Call this only after `exchange` has informed all ranks of a signal, or of the end of
        `max_time`. A run that ends by `max_time` also saves its last weights, because it has ended
        without an error.
        """
        resolved = self.resolved
        files = ["last"] if stop is TimeIsUp else []
        with self.observer.ledger.span("saving"):
            self.snapshots.save(files)
            self.snapshots.finish_saving()
        if stop is TimeIsUp:
            raise TimeIsUp
        quoted_folder = shlex.quote(str(resolved.tracker.path))
        folder = resolved.world.broadcast_object(quoted_folder)
        saved = ""
        if not resolved.speed_only:
            saved = (
                f"; saved step {self.state.position.step}: continue with recipe={folder} "
                f"output={folder} resume=auto"
            )
        name = "Ctrl-C"
        if stop is not Interrupted:
            # If only another rank has received the signal, its name is unknown here, and SIGTERM is
            # assumed.
            name = getattr(self.interrupts.received, "name", "SIGTERM")
        raise stop(f"stopped by {name}{saved}")
