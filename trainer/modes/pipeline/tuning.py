"""Choosing a pipeline's cuts and its number of micro-batches, by measuring on the devices that will run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.errors import DeviceMemoryError
from trainer.models import memory
from trainer.models.balance import TIE, BlockCost, by_stage, cuts_for, stage_seconds
from trainer.models.partition import Traced
from trainer.modes.pipeline.torch_schedules import pipeline_order, ranks_of_stages, step_and_bubble
from trainer.recipe import MEASURED, Recipe

CANDIDATES = (2, 3, 4, 6, 8, 12)  # micro-batches for each stage's worker: fewer leave a bubble, more are too small
FINALISTS = 3
CLOSE = 0.1  # plans within this share of the fastest are tried again
ROUNDS = 4  # at most
Cuts = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """How a model is split: its cuts, into how many micro-batches a batch goes, and in which order stages work."""

    cuts: Cuts
    microbatches: int
    schedule: str
    stage_seconds: tuple[tuple[float, float], ...] = ()  # that the measured schedule is made of, forward and backward

    @property
    def stages(self) -> int:
        """Over all workers."""
        return len(self.cuts) + 1


@dataclass(frozen=True)
class Pipe:
    """What a plan is for."""

    workers: int  # ranks, or devices of one process
    # Their names in the recipe, and the stages of each over all workers; the first unless another is found to be
    # faster. Streams runs as 1F1B.
    schedules: tuple[tuple[str, int], ...]
    rows: int  # images of a batch that is cut into micro-batches
    counts: tuple[int, ...]  # numbers of micro-batches that can run


@dataclass(frozen=True)
class Trial:
    """What a plan took when it was run."""

    seconds: float  # of one step
    busy: tuple[float, ...]  # seconds of each stage in it

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)


@dataclass(frozen=True)
class Tuner:
    """Chooses a plan for a pipe by measuring."""

    traced: Traced
    recipe: Recipe
    pipe: Pipe
    probe: Callable[[int], list[BlockCost]]  # times all blocks at so many images a micro-batch; infinite without memory
    trial: Callable[[Plan], Trial]  # runs a plan; infinite likewise
    say: Callable[[str], None]
    room: float = math.inf  # free bytes of each worker

    def find_plan(self) -> tuple[Plan, dict[str, Any]]:
        """The recipe's cuts and micro-batches, and what is left to `auto` as it was measured to be fastest; and what
        the run folder keeps of it: its key, its predicted bubble, the trials.

        Raises DeviceMemoryError where nothing of what was tried fits.
        """
        candidates = counts_to_try(self.pipe)
        if len(candidates) > 1:
            counts = ", ".join(map(str, candidates))
            self.say(f"pipeline: measuring {len(candidates)} numbers of micro-batches ({counts})")
        costs = self._probed(candidates)
        if len(costs) < len(candidates):
            large = ", ".join(str(m) for m in candidates if m not in costs)
            self.say(
                f"pipeline: {large} micro-batches would be too large for the memory that is free, and are left out"
            )
        plans: list[Plan] = []
        for schedule, stages in self.pipe.schedules:
            if plans and stages > len(self.traced.cuts) + 1:
                continue
            some = [self._planned(schedule, stages, m, costs[m]) for m in sorted(costs)]
            plans += [plan for plan in some if self._fits(plan, costs[plan.microbatches])] if plans else some
        best, trials = (plans[0], dict[Plan, Trial]()) if len(plans) == 1 else self._run(plans, costs)
        seconds, bubble = self._predicted(best, costs)
        return best, {
            "key": key_of(self.traced, self.recipe, self.pipe),
            "plan": asdict(best),
            "predicted": {"step_seconds": seconds, "bubble": bubble},
            "stage_seconds": stage_seconds(self.traced, best.cuts, costs[best.microbatches]),
            "trials": [{**asdict(plan), **asdict(tried)} for plan, tried in trials.items() if tried.fits],
        }

    def _predicted(self, plan: Plan, costs: Mapping[int, Sequence[BlockCost]]) -> tuple[float, float]:
        """Seconds of a step and its bubble, transfers left out."""
        seconds = stage_seconds(self.traced, plan.cuts, costs[plan.microbatches])
        return step_and_bubble(plan.schedule, self.pipe.workers, plan.microbatches, seconds)

    def _planned(self, schedule: str, stages: int, microbatches: int, costs: Sequence[BlockCost]) -> Plan:
        """The recipe's cuts, or those with which this schedule's step is shortest.

        From stages that are equally fast on, one cut after the other, and each with its neighbour, goes where the step
        is shortest, until none moves.
        """
        traced, workers, wanted = self.traced, self.pipe.workers, self.recipe.pipeline.cuts
        holders = ranks_of_stages(schedule, workers, stages // workers)

        @cache
        def step(cuts: Cuts) -> float:
            return step_and_bubble(schedule, workers, microbatches, stage_seconds(traced, cuts, costs))[0]

        def least(cuts: Cuts) -> float:
            """Of the fullest worker if it never waits: no step is shorter, and it is known at once."""
            work = [0.0] * workers
            for holder, passes in zip(holders, stage_seconds(traced, cuts, costs), strict=True):
                work[holder] += microbatches * sum(passes)
            return max(work)

        cuts, before = cuts_for(traced, wanted, stages, costs), None
        while wanted == "auto" and cuts != before:
            before = cuts
            places = range(len(cuts))
            for moving in [*((place,) for place in places), *pairwise(places)]:
                hopeful = [moved for moved in _moved(cuts, moving, traced.cuts) if least(moved) * TIE < step(cuts)]
                shortest = min(hopeful, key=step, default=cuts)
                if step(shortest) * TIE < step(cuts):
                    cuts = shortest
        measured = tuple(stage_seconds(traced, cuts, costs)) if schedule == MEASURED else ()
        return Plan(cuts, microbatches, schedule, measured)

    def _probed(self, candidates: Sequence[int]) -> dict[int, list[BlockCost]]:
        """The costs of blocks for each number of micro-batches, from the smallest micro-batches on, while they fit."""
        measured: dict[int, list[BlockCost]] = {}
        for m in reversed(candidates):
            rows = -(-self.pipe.rows // m)
            if measured:
                smaller = min(measured)
                larger, known = rows / -(-self.pipe.rows // smaller), measured[smaller]
                guess = [replace(c, kept=round(c.kept * larger), bytes=round(c.bytes * larger)) for c in known]
                schedule, stages = self.pipe.schedules[0]
                cuts = cuts_for(self.traced, self.recipe.pipeline.cuts, stages, guess)
                if not self._fits(Plan(cuts, m, schedule), guess):
                    break
            costs = self.probe(rows)
            if not all(math.isfinite(cost.forward) for cost in costs):
                break
            measured[m] = costs
        if not measured:
            raise too_little(self.pipe, candidates[-1])
        return measured

    def _fits(self, plan: Plan, costs: Sequence[BlockCost]) -> bool:
        """Whether the fullest worker has room for its weights with their gradients and optimizer, and for what its
        micro-batches keep."""
        stages = by_stage(self.traced, plan.cuts, costs)
        received = [0, *(stage[-1].bytes for stage in stages[:-1])]
        kept = [sum(cost.kept for cost in stage) for stage in stages]
        saved = [0] * len(kept) if self.recipe.recompute else kept
        passes = [memory.Pass(s, k, k, r) for s, k, r in zip(saved, kept, received, strict=True)]
        virtual = plan.stages // self.pipe.workers
        orders = pipeline_order(plan.schedule, self.pipe.workers, virtual, plan.microbatches, plan.stage_seconds)
        needed = [memory.held(order, passes) for order in orders]
        for stage, holder in zip(stages, ranks_of_stages(plan.schedule, self.pipe.workers, virtual), strict=True):
            needed[holder] += memory.COPIES * sum(cost.weights for cost in stage)
        return max(needed) <= memory.room_in(self.room)

    def _run(self, plans: Sequence[Plan], costs: Mapping[int, Sequence[BlockCost]]) -> tuple[Plan, dict[Plan, Trial]]:
        """Try the most promising plans, one of each schedule among them, and the fastest with cuts after its own
        seconds. What is close to the fastest is tried again until a round changes nothing.
        """
        trials: dict[Plan, Trial] = {}

        def best(*more: Plan) -> Plan:
            for plan in more:
                again = self.trial(plan)
                trials[plan] = min(again, trials.get(plan, again), key=lambda tried: tried.seconds)
            return min(trials, key=lambda plan: trials[plan].seconds)

        promising = sorted(plans, key=lambda plan: self._predicted(plan, costs)[0])
        firsts = {(plan.schedule, plan.stages): plan for plan in reversed(promising)}
        finalists = dict.fromkeys([*promising[:FINALISTS], *firsts.values()])
        # From the smallest micro-batches on: should memory end, then with a plan in hand that runs.
        chosen = best(*sorted(finalists, key=lambda plan: -plan.microbatches))
        if not trials[chosen].fits:
            raise too_little(self.pipe, chosen.microbatches)
        for _ in range(2 if self.recipe.pipeline.cuts == "auto" else 0):  # side by side, stages slow each other
            corrected = self._corrected(chosen, trials[chosen].busy, costs[chosen.microbatches])
            again = self._planned(chosen.schedule, chosen.stages, chosen.microbatches, corrected)
            if again in trials or best(again) != again:
                break
            chosen = again
        for _ in range(ROUNDS):
            limit = (1 + CLOSE) * trials[chosen].seconds
            ranked = sorted(trials, key=lambda plan: trials[plan].seconds)
            close = [plan for plan in ranked if trials[plan].seconds <= limit]
            before = chosen
            if len(close) == 1 or (chosen := best(*close[:FINALISTS])) == before:
                break
        return chosen, trials

    def _corrected(self, plan: Plan, busy: Sequence[float], costs: Sequence[BlockCost]) -> list[BlockCost]:
        """The costs of blocks as the plan's stages took them in a step, not one after the other."""
        corrected = []
        for seconds, blocks in zip(busy, by_stage(self.traced, plan.cuts, costs), strict=True):
            predicted = plan.microbatches * sum(cost.forward + cost.backward for cost in blocks)
            factor = seconds / predicted if predicted else 1.0
            corrected += [replace(c, forward=factor * c.forward, backward=factor * c.backward) for c in blocks]
        return corrected


def _moved(cuts: Cuts, moving: Sequence[int], possible: Sequence[str]) -> Iterator[Cuts]:
    """All ways to place these neighbouring cuts between those that stay."""
    first, last = moving[0], moving[-1]
    low = possible.index(cuts[first - 1]) + 1 if first else 0
    high = possible.index(cuts[last + 1]) if last + 1 < len(cuts) else len(possible)
    for some in combinations(possible[low:high], len(moving)):
        yield (*cuts[:first], *some, *cuts[last + 1 :])


def too_little(pipe: Pipe, tried: int, ran: int | None = None) -> DeviceMemoryError:
    """What to type where so many micro-batches do not fit, and others of smaller ones ran or have not been tried."""
    rows = -(-pipe.rows // tried)
    what = f"out of memory while measuring {tried} micro-batch{'es' * (tried > 1)} of {rows} images: type "
    if len(pipe.counts) == 1:
        return DeviceMemoryError(f"{what}a smaller batch_size, or a larger accumulate or pipeline.microbatches")
    more = [m for m in pipe.counts if m > tried]
    wanted = ran or next((m for m in more if m >= 2 * tried), more[-1] if more else None)
    first = f"pipeline.microbatches={wanted}, " if wanted else ""
    return DeviceMemoryError(f"{what}{first}recompute=true or a smaller batch_size")


def recall(tuned: Mapping[str, Any], key: str, traced: Traced) -> Plan | None:
    """The plan that an earlier part of the run found for the same pipe of the same model."""
    if tuned.get("key") != key or not {"predicted", "trials"} <= tuned.keys():
        return None
    with suppress(ValidationError):  # of a damaged file
        plan = TypeAdapter(Plan).validate_python(tuned.get("plan"))
        return plan if {*plan.cuts} <= {*traced.cuts} else None
    return None


def key_of(traced: Traced, recipe: Recipe, pipe: Pipe) -> str:
    """What a plan was found for."""
    section = recipe.pipeline
    wanted = f"{section.cuts} {section.microbatches} {section.split_size} {recipe.recompute}"
    return f"{recipe.model.name} {len(traced.cuts)} {recipe.mode} {pipe} {wanted} {recipe.precision}"


def counts_to_try(pipe: Pipe) -> list[int]:
    """A handful of the possible numbers of micro-batches."""
    if len(pipe.counts) == 1:
        return list(pipe.counts)
    few, many = CANDIDATES[0] * pipe.workers, CANDIDATES[-1] * pipe.workers
    within = [m for m in pipe.counts if few <= m <= many and pipe.rows // m > 1]
    within = within or [min(pipe.counts, key=lambda m: abs(m - few))]
    wanted = (factor * pipe.workers for factor in CANDIDATES)
    return sorted({min(within, key=lambda m: (abs(m - want), m)) for want in wanted})
