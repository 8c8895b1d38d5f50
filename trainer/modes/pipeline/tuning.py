"""Choice of a pipeline's cuts and number of micro-batches, by measurements on its own devices."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.errors import DeviceMemoryError
from trainer.memory.device import compute_usable_bytes
from trainer.memory.measuring import Pass
from trainer.memory.needs import COPIES, measure_peak
from trainer.models.balance import TIE, BlockCost, choose_cuts, group_by_stage, sum_stage_seconds
from trainer.models.partition import Traced
from trainer.modes.pipeline.torch_schedules import (
    assign_ranks,
    list_actions,
    predict_step_and_bubble,
)
from trainer.recipe import MEASURED, Recipe

# Numbers of micro-batches per worker that are tried. Fewer micro-batches would leave a large
# bubble, and more would be too small to keep a device busy.
CANDIDATES = (2, 3, 4, 6, 8, 12)
# This number of plans are run: those with the shortest predicted steps. The best plan of each
# schedule is run in addition. This is also the maximum number of close plans that a round runs
# again.
FINALISTS = 3
# A plan is run again if its step is at most this fraction longer than that of the fastest plan.
CLOSE = 0.1
# Maximum number of rounds in which close plans are run again.
ROUNDS = 4
Cuts = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Cuts of a model, number of micro-batches of a batch, and schedule."""

    # Names of the cuts in the order of the model (see `Traced.cuts`).
    cuts: Cuts
    # Number of micro-batches of a batch.
    microbatches: int
    # Name of the schedule (see `list_actions`).
    schedule: str
    # Forward and backward time of each stage in seconds, if the schedule is the measured one; else
    # empty.
    stage_seconds: tuple[tuple[float, float], ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages over all workers."""
        return len(self.cuts) + 1


@dataclass(frozen=True)
class Pipe:
    """Constraints on a plan.

    Run folders contain the text of an instance (see `build_key`), so the names of its fields must
    not change.
    """

    # Number of ranks, or of devices in one process.
    workers: int
    # Names of schedules (see `list_actions`), each with the number of stages over all workers. The
    # first schedule is used unless a trial of another one is faster.
    schedules: tuple[tuple[str, int], ...]
    # Number of images of the batch that is cut into micro-batches.
    rows: int
    # Possible numbers of micro-batches.
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """Measurement of a plan."""

    # Duration of a step in seconds; infinite if memory was too small.
    seconds: float
    # Working time in seconds of each stage in a step; empty if memory was too small.
    busy: Sequence[float]

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)


@dataclass(frozen=True)
class Tuner:
    """Search for the fastest plan by measurements."""

    traced: Traced
    recipe: Recipe
    pipe: Pipe
    # Function that measures all blocks for a number of images per micro-batch. Times are infinite
    # if memory is too small.
    probe: Callable[[int], list[BlockCost]]
    # Function that runs a plan. Its time is infinite if memory is too small.
    trial: Callable[[Plan], Trial]
    say: Callable[[str], None]
    # Number of free bytes of the worker that has the fewest.
    free_bytes: float

    def find_plan(self) -> tuple[Plan, dict[str, Any]]:
        """Choose a plan: values of the recipe, and the fastest values where the recipe has `auto`.

        Returns:
            (plan, entry): the plan, and its entry in the run folder with the key, the plan, the
            prediction, the times of the stages, and the trials that fit into memory.

        Raises:
            DeviceMemoryError: memory is too small for all plans that were tried.
        """
        candidates = choose_counts(self.pipe)
        if len(candidates) > 1:
            counts = ", ".join(map(str, candidates))
            self.say(f"pipeline: measuring {len(candidates)} numbers of micro-batches ({counts})")
        costs = self._probe_blocks(candidates)
        if len(costs) < len(candidates):
            too_large = ", ".join(str(m) for m in candidates if m not in costs)
            self.say(
                f"pipeline: {too_large} micro-batches would be too large for the free memory, "
                "and are left out"
            )
        plans: list[Plan] = []
        for schedule, stages in self.pipe.schedules:
            # The recipe's schedule comes first and is tried in any case.
            is_first = not plans
            if not is_first and stages > len(self.traced.cuts) + 1:
                continue
            for m in sorted(costs):
                plan = self._make_plan(schedule, stages, m, costs[m])
                if is_first or self._fits(plan, costs[m]):
                    plans.append(plan)
        best = plans[0]
        trials: dict[Plan, Trial] = {}
        if len(plans) > 1:
            best, trials = self._run_trials(plans, costs)
        seconds, bubble = self._predict(best, costs)
        fitting = [asdict(plan) | asdict(trial) for plan, trial in trials.items() if trial.fits]
        return best, {
            "key": build_key(self.traced, self.recipe, self.pipe),
            "plan": asdict(best),
            "predicted": {"step_seconds": seconds, "bubble": bubble},
            "stage_seconds": sum_stage_seconds(self.traced, best.cuts, costs[best.microbatches]),
            "trials": fitting,
        }

    def _predict(
        self,
        plan: Plan,
        costs: Mapping[int, Sequence[BlockCost]],
    ) -> tuple[float, float]:
        """Predict (seconds, bubble) of a step, without the time of transfers."""
        seconds = sum_stage_seconds(self.traced, plan.cuts, costs[plan.microbatches])
        return predict_step_and_bubble(plan.schedule, self.pipe.workers, plan.microbatches, seconds)

    def _make_plan(
        self,
        schedule: str,
        stages: int,
        microbatches: int,
        costs: Sequence[BlockCost],
    ) -> Plan:
        """Make a plan with the recipe's cuts, or with cuts that a search finds if they are "auto".

        The search starts from stages with equal times. Then each cut, and each pair of neighboring
        cuts, moves to the position with the shortest predicted step, until no move shortens the
        predicted step.
        """
        traced = self.traced
        workers = self.pipe.workers
        recipe_cuts = self.recipe.pipeline.cuts
        holders = assign_ranks(schedule, workers, stages // workers)

        @cache
        def predict_step(cuts: Cuts) -> float:
            seconds = sum_stage_seconds(traced, cuts, costs)
            return predict_step_and_bubble(schedule, workers, microbatches, seconds)[0]

        def bound_step(cuts: Cuts) -> float:
            """Return a lower bound of the step: the work of the busiest worker, without waiting."""
            work = [0.0] * workers
            for holder, passes in zip(holders, sum_stage_seconds(traced, cuts, costs), strict=True):
                work[holder] += microbatches * sum(passes)
            return max(work)

        cuts = choose_cuts(traced, recipe_cuts, stages, costs)
        before = None
        while recipe_cuts == "auto" and cuts != before:
            before = cuts
            positions = range(len(cuts))
            for moving in [*((position,) for position in positions), *pairwise(positions)]:
                shortest = cuts
                for moved in _move_cuts(cuts, moving, traced.cuts):
                    # Most moves are rejected without the expensive prediction.
                    if bound_step(moved) * TIE >= predict_step(cuts):
                        continue
                    if shortest is cuts or predict_step(moved) < predict_step(shortest):
                        shortest = moved
                if predict_step(shortest) * TIE < predict_step(cuts):
                    cuts = shortest
        measured = tuple(sum_stage_seconds(traced, cuts, costs)) if schedule == MEASURED else ()
        return Plan(cuts, microbatches, schedule, measured)

    def _probe_blocks(self, candidates: Sequence[int]) -> dict[int, list[BlockCost]]:
        """Measure the blocks for each number of micro-batches, from small to large micro-batches.

        The measurements stop at the first size of micro-batches that does not fit, or that cannot
        fit by an estimate from the memory of the previous size.
        """
        measured: dict[int, list[BlockCost]] = {}
        for m in reversed(candidates):
            rows = -(-self.pipe.rows // m)
            if measured:
                previous = min(measured)
                growth = rows / -(-self.pipe.rows // previous)
                estimates = []
                for cost in measured[previous]:
                    kept = round(cost.kept * growth)
                    estimates.append(replace(cost, kept=kept, bytes=round(cost.bytes * growth)))
                schedule, stages = self.pipe.schedules[0]
                cuts = choose_cuts(self.traced, self.recipe.pipeline.cuts, stages, estimates)
                if not self._fits(Plan(cuts, m, schedule), estimates):
                    break
            costs = self.probe(rows)
            if not all(math.isfinite(cost.forward) for cost in costs):
                break
            measured[m] = costs
        if not measured:
            raise describe_too_little_memory(self.pipe, candidates[-1])
        return measured

    def _fits(
        self,
        plan: Plan,
        costs: Sequence[BlockCost],
    ) -> bool:
        """Return True if every worker has enough memory for a plan.

        A worker needs memory for its weights with their gradients and optimizer states, and for the
        activations of its micro-batches.
        """
        stages = group_by_stage(self.traced, plan.cuts, costs)
        passes = []
        received = 0
        for stage in stages:
            kept = sum(cost.kept for cost in stage)
            saved = 0 if self.recipe.recompute else kept
            passes.append(Pass(saved, kept, kept, received))
            received = stage[-1].bytes
        virtual = plan.stages // self.pipe.workers
        orders = list_actions(
            plan.schedule,
            self.pipe.workers,
            virtual,
            plan.microbatches,
            plan.stage_seconds,
        )
        needed_bytes = [measure_peak(order, passes) for order in orders]
        holders = assign_ranks(plan.schedule, self.pipe.workers, virtual)
        for stage, holder in zip(stages, holders, strict=True):
            needed_bytes[holder] += COPIES * sum(cost.weights for cost in stage)
        return max(needed_bytes) <= compute_usable_bytes(self.free_bytes)

    def _run_trials(
        self,
        plans: Sequence[Plan],
        costs: Mapping[int, Sequence[BlockCost]],
    ) -> tuple[Plan, dict[Plan, Trial]]:
        """Run the plans with the best predictions, and return the fastest plan with all trials.

        At least one plan of each schedule is run. If the recipe's cuts are "auto", the fastest plan
        gets new cuts from its measured times and is run again, at most twice. Plans that are close
        to the fastest are run again until the fastest does not change, at most `ROUNDS` times.
        """
        trials: dict[Plan, Trial] = {}

        def step_seconds(plan: Plan) -> float:
            return trials[plan].seconds

        def run(*more: Plan) -> Plan:
            """Run plans, keep the shorter trial of each, and return the fastest plan of all."""
            for plan in more:
                trial = self.trial(plan)
                if plan not in trials or trial.seconds <= trials[plan].seconds:
                    trials[plan] = trial
            return min(trials, key=step_seconds)

        promising = sorted(plans, key=lambda plan: self._predict(plan, costs)[0])
        best_of_schedule = {(plan.schedule, plan.stages): plan for plan in reversed(promising)}
        finalists = dict.fromkeys([*promising[:FINALISTS], *best_of_schedule.values()])
        # The smallest micro-batches run first: if memory runs out later, a plan that fits is known.
        chosen = run(*sorted(finalists, key=lambda plan: -plan.microbatches))
        if not trials[chosen].fits:
            raise describe_too_little_memory(self.pipe, chosen.microbatches)
        # The cuts are chosen again, because the probe measured one block at a time, but stages that
        # work at the same time slow each other down.
        for _ in range(2 if self.recipe.pipeline.cuts == "auto" else 0):
            costs_in_step = self._correct(chosen, trials[chosen].busy, costs[chosen.microbatches])
            plan = self._make_plan(
                chosen.schedule,
                chosen.stages,
                chosen.microbatches,
                costs_in_step,
            )
            if plan in trials or run(plan) != plan:
                break
            chosen = plan
        for _ in range(ROUNDS):
            limit = (1 + CLOSE) * trials[chosen].seconds
            ranked = sorted(trials, key=step_seconds)
            close = [plan for plan in ranked if step_seconds(plan) <= limit]
            before = chosen
            if len(close) == 1:
                break
            chosen = run(*close[:FINALISTS])
            if chosen == before:
                break
        return chosen, trials

    def _correct(
        self,
        plan: Plan,
        busy: Sequence[float],
        costs: Sequence[BlockCost],
    ) -> list[BlockCost]:
        """Scale the times of blocks so that their sums equal the measured times of the stages."""
        corrected = []
        blocks_of_stages = group_by_stage(self.traced, plan.cuts, costs)
        for seconds, blocks in zip(busy, blocks_of_stages, strict=True):
            predicted = plan.microbatches * sum(cost.forward + cost.backward for cost in blocks)
            factor = seconds / predicted if predicted else 1.0
            for cost in blocks:
                forward = factor * cost.forward
                corrected.append(replace(cost, forward=forward, backward=factor * cost.backward))
        return corrected


def _move_cuts(
    cuts: Cuts,
    moving: Sequence[int],
    possible: Sequence[str],
) -> Iterator[Cuts]:
    """Yield `cuts` with each possible placement of the cuts at the consecutive indices `moving`."""
    first = moving[0]
    last = moving[-1]
    low = 0
    high = len(possible)
    if first:
        low = possible.index(cuts[first - 1]) + 1
    if last + 1 < len(cuts):
        high = possible.index(cuts[last + 1])
    for placed in combinations(possible[low:high], len(moving)):
        yield (*cuts[:first], *placed, *cuts[last + 1 :])


def describe_too_little_memory(
    pipe: Pipe,
    microbatches: int,
    fitting: int | None = None,
) -> DeviceMemoryError:
    """Return the error that memory is too small, with arguments that need less memory.

    Args:
        pipe: constraints on the plan.
        microbatches: number of micro-batches that ran out of memory.
        fitting: larger number of micro-batches that did not run out of memory, if any.
    """
    rows = -(-pipe.rows // microbatches)
    noun = "micro-batch" if microbatches == 1 else "micro-batches"
    problem = f"out of memory while measuring {microbatches} {noun} of {rows} images: type "
    if len(pipe.counts) == 1:
        return DeviceMemoryError(
            f"{problem}a smaller batch_size, or a larger accumulate or pipeline.microbatches"
        )
    if fitting is None:
        larger = [m for m in pipe.counts if m > microbatches]
        if larger:
            fitting = next((m for m in larger if m >= 2 * microbatches), larger[-1])
    if fitting:
        problem += f"pipeline.microbatches={fitting}, "
    return DeviceMemoryError(f"{problem}recompute=true or a smaller batch_size")


def recall_plan(
    tuned: Mapping[str, Any],
    key: str,
    traced: Traced,
) -> Plan | None:
    """Return the plan that the run folder contains for `key`.

    Returns None if the entry has another key, is incomplete or damaged, or has unknown cuts.

    Args:
        tuned: entry of the run folder.
        key: the result of `build_key`.
        traced: the graph of the model.
    """
    if tuned.get("key") != key or not {"predicted", "trials"} <= tuned.keys():
        return None
    # A damaged entry is ignored, so that a new plan is measured.
    with suppress(ValidationError):
        plan = TypeAdapter(Plan).validate_python(tuned.get("plan"))
        if {*plan.cuts} <= {*traced.cuts}:
            return plan
    return None


def build_key(
    traced: Traced,
    recipe: Recipe,
    pipe: Pipe,
) -> str:
    """Format all values that a plan depends on as the key of its entry in the run folder."""
    section = recipe.pipeline
    options = f"{section.cuts} {section.microbatches} {section.split_size} {recipe.recompute}"
    return (
        f"{recipe.model.name} {len(traced.cuts)} {recipe.mode} {pipe} {options} {recipe.precision}"
    )


def choose_counts(pipe: Pipe) -> list[int]:
    """Select a few of the possible numbers of micro-batches, in ascending order."""
    if len(pipe.counts) == 1:
        return list(pipe.counts)
    few = CANDIDATES[0] * pipe.workers
    many = CANDIDATES[-1] * pipe.workers
    # A micro-batch should have more than one row.
    possible = [m for m in pipe.counts if few <= m <= many and pipe.rows // m > 1]
    if not possible:
        possible = [min(pipe.counts, key=lambda m: abs(m - few))]
    chosen = set()
    for factor in CANDIDATES:
        target = factor * pipe.workers
        # The smaller of two equally close numbers is chosen.
        chosen.add(min(possible, key=lambda m: (abs(m - target), m)))
    return sorted(chosen)
