"""Choosing a pipeline's cuts and its number of micro-batches, by measuring on the devices that will run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ValidationError

from trainer.errors import DeviceMemoryError
from trainer.models import memory
from trainer.models.balance import BlockCost, by_stage, cuts_for, stage_seconds
from trainer.models.partition import Traced
from trainer.modes.pipeline.torch_schedules import pipeline_order, ranks_of_stages, step_and_bubble
from trainer.recipe import Recipe

CANDIDATES = (2, 3, 4, 6, 8, 12)  # micro-batches for each stage's worker: fewer leave a bubble, more are too small
FINALISTS = 3
CLOSE = 0.1  # plans within this share of the fastest are tried again
ROUNDS = 4  # at most


@dataclass(frozen=True)
class Plan:
    """How a model is split: its cuts, into how many micro-batches a batch goes, and in which order stages work."""

    cuts: tuple[str, ...]
    microbatches: int
    schedule: str


@dataclass(frozen=True)
class Pipe:
    """What a plan is for.

    Attributes:
        stages: over all workers.
        workers: ranks, or devices of one process.
        schedules: by their names in the recipe; the first unless another is found to be faster. Streams runs as 1F1B.
        rows: images of a batch that is cut into micro-batches.
        counts: numbers of micro-batches that can run.
    """

    stages: int
    workers: int
    schedules: tuple[str, ...]
    rows: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """What a plan took when it was run."""

    seconds: float  # of one step
    busy: tuple[float, ...]  # seconds of each stage in it

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)


class _Predicted(BaseModel):
    step_seconds: float
    bubble: float


class _Known(BaseModel):
    """What `find_plan` returns beside the plan, as a file gives it back."""

    plan: Plan
    stable: bool = True
    predicted: _Predicted
    stage_seconds: list[tuple[float, float]]
    trials: list[dict[str, Any]]


def find_plan(
    traced: Traced,
    recipe: Recipe,
    pipe: Pipe,
    probe: Callable[[int], list[BlockCost]],
    trial: Callable[[Plan], Trial],
    say: Callable[[str], None],
    room: float = math.inf,
) -> tuple[Plan, dict[str, Any]]:
    """The recipe's cuts and micro-batches, and what is left to `auto` as it was measured to be fastest.

    Args:
        probe: times every block at so many images a micro-batch; infinite where memory is too small for that.
        trial: runs a plan; infinite likewise.
        room: free bytes of each worker.

    Returns:
        The plan, and what is known of it: its key, whether more trials would choose it too, its predicted bubble, and
        the trials.

    Raises:
        DeviceMemoryError: nothing of what was tried fits.
    """
    key = key_of(traced, recipe, pipe)
    candidates = counts_to_try(pipe)
    if len(candidates) > 1:
        say(f"pipeline: measuring {len(candidates)} numbers of micro-batches ({', '.join(map(str, candidates))})")
    costs = _probed(traced, recipe, pipe, candidates, probe, room)
    if len(costs) < len(candidates):
        large = ", ".join(str(m) for m in candidates if m not in costs)
        say(f"pipeline: {large} micro-batches would be too large for the memory that is free, and are left out")
    candidates = sorted(costs)
    plans = [
        Plan(cuts_for(traced, recipe.pipeline.cuts, pipe.stages, costs[m]), m, pipe.schedules[0]) for m in candidates
    ]
    each = {plan: stage_seconds(traced, plan.cuts, costs[plan.microbatches]) for plan in plans}
    predictions = {plan: predict(pipe, plan.microbatches, each[plan]) for plan in plans}
    best, trials, stable = plans[0], dict[Plan, Trial](), True
    if len(plans) > 1:
        best, trials, stable = _run(traced, recipe, pipe, sorted(plans, key=lambda plan: predictions[plan][0]), trial)
    of_best = stage_seconds(traced, best.cuts, costs[best.microbatches])
    seconds, bubble = predict(pipe, best.microbatches, of_best, best.schedule)
    return best, {
        "key": key,
        "plan": asdict(best),
        "stable": stable,
        "predicted": {"step_seconds": seconds, "bubble": bubble},
        "stage_seconds": of_best,
        "trials": [{**asdict(plan), **asdict(tried)} for plan, tried in trials.items() if tried.fits],
    }


def _probed(
    traced: Traced,
    recipe: Recipe,
    pipe: Pipe,
    candidates: Sequence[int],
    probe: Callable[[int], list[BlockCost]],
    room: float,
) -> dict[int, list[BlockCost]]:
    """The costs of blocks for each number of micro-batches, from the smallest micro-batches on, while they fit."""
    measured: dict[int, list[BlockCost]] = {}
    for m in reversed(candidates):
        rows = -(-pipe.rows // m)
        if measured:
            smaller = min(measured)
            larger = rows / -(-pipe.rows // smaller)
            guess = [replace(c, kept=round(c.kept * larger), bytes=round(c.bytes * larger)) for c in measured[smaller]]
            if needed(traced, recipe, pipe, m, guess) > memory.USABLE * room:
                break
        costs = probe(rows)
        if not all(math.isfinite(cost.forward) for cost in costs):
            break
        measured[m] = costs
    if not measured:
        raise too_little(pipe, candidates[-1])
    return measured


def needed(traced: Traced, recipe: Recipe, pipe: Pipe, microbatches: int, costs: Sequence[BlockCost]) -> int:
    """Bytes on the fullest worker: its weights with their gradients and optimizer, and what its micro-batches keep."""
    stages = by_stage(traced, cuts_for(traced, recipe.pipeline.cuts, pipe.stages, costs), costs)
    received = [0, *(stage[-1].bytes for stage in stages[:-1])]
    kept = [sum(cost.kept for cost in stage) for stage in stages]
    passes = [memory.Pass(0 if recipe.pipeline.recompute else k, k, k, r) for k, r in zip(kept, received, strict=True)]
    schedule, virtual = pipe.schedules[0], pipe.stages // pipe.workers
    workers = [memory.held(order, passes) for order in pipeline_order(schedule, pipe.workers, virtual, microbatches)]
    for stage, holder in zip(stages, ranks_of_stages(schedule, pipe.workers, virtual), strict=True):
        workers[holder] += memory.COPIES * sum(cost.weights for cost in stage)
    return max(workers)


def too_little(pipe: Pipe, tried: int, ran: int | None = None) -> DeviceMemoryError:
    """What to type where so many micro-batches do not fit, and others of smaller ones ran or have not been tried."""
    rows = -(-pipe.rows // tried)
    what = f"out of memory while measuring {tried} micro-batch{'es' * (tried > 1)} of {rows} images: type "
    if len(pipe.counts) == 1:
        return DeviceMemoryError(f"{what}a smaller batch_size, or a larger accumulate or pipeline.microbatches")
    more = [m for m in pipe.counts if m > tried]
    wanted = ran or next((m for m in more if m >= 2 * tried), more[-1] if more else None)
    first = f"pipeline.microbatches={wanted}, " if wanted else ""
    return DeviceMemoryError(f"{what}{first}pipeline.recompute=true or a smaller batch_size")


def recall(known: Mapping[str, Any], key: str, traced: Traced, pipe: Pipe) -> Plan | None:
    """The plan that an earlier part of the run found for the same pipe; None where what was kept makes no sense."""
    if known.get("key") != key:
        return None
    try:
        known_plan = _Known.model_validate(known)
    except ValidationError:
        return None
    plan = known_plan.plan
    in_order = plan.cuts == tuple(cut for cut in traced.cuts if cut in plan.cuts)
    whole = pipe.stages == len(known_plan.stage_seconds) == len(plan.cuts) + 1
    return plan if in_order and whole and plan.microbatches in pipe.counts and plan.schedule in pipe.schedules else None


def key_of(traced: Traced, recipe: Recipe, pipe: Pipe) -> str:
    """What a plan was found for."""
    section = recipe.pipeline
    wanted = f"{section.cuts} {section.microbatches} {section.split_size} {section.recompute}"
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


def predict(
    pipe: Pipe, microbatches: int, stages: Sequence[tuple[float, float]], schedule: str | None = None
) -> tuple[float, float]:
    """Seconds of a step and its bubble, from the seconds of each stage, transfers left out.

    `schedule`: instead of the pipe's first.
    """
    return step_and_bubble(schedule or pipe.schedules[0], pipe.workers, microbatches, stages)


def _run(
    traced: Traced, recipe: Recipe, pipe: Pipe, plans: Sequence[Plan], trial: Callable[[Plan], Trial]
) -> tuple[Plan, dict[Plan, Trial], bool]:
    """Try the most promising plans, the fastest in other orders and with a cut moved.

    What is close to the fastest is tried again until a round changes nothing, and the last value says whether it did.
    """
    trials: dict[Plan, Trial] = {}

    def best(*more: Plan) -> Plan:
        for plan in more:
            again = trial(plan)
            trials[plan] = min(again, trials.get(plan, again), key=lambda tried: tried.seconds)
        return min(trials, key=lambda plan: trials[plan].seconds)

    # From the smallest micro-batches on: should memory end, then with a plan in hand that runs.
    chosen = best(*sorted(plans[:FINALISTS], key=lambda plan: -plan.microbatches))
    if not trials[chosen].fits:
        raise too_little(pipe, chosen.microbatches)
    if chosen.microbatches % pipe.workers == 0:  # what the other orders want
        chosen = best(*(replace(chosen, schedule=schedule) for schedule in pipe.schedules[1:]))
    if recipe.pipeline.cuts == "auto":
        for _ in range(2):  # side by side, stages slow each other: move a cut of the slowest inwards while that helps
            before = chosen
            chosen = best(*(plan for plan in _shrunk(traced, chosen, trials[chosen].busy) if plan not in trials))
            if chosen == before:
                break
    for _ in range(ROUNDS):
        limit = (1 + CLOSE) * trials[chosen].seconds
        close = [
            plan for plan in sorted(trials, key=lambda plan: trials[plan].seconds) if trials[plan].seconds <= limit
        ]
        before = chosen
        if len(close) == 1 or (chosen := best(*close[:FINALISTS])) == before:
            return chosen, trials, True
    return chosen, trials, False


def _shrunk(traced: Traced, plan: Plan, busy: Sequence[float]) -> list[Plan]:
    """The plans in which the busiest stage gives one block to a neighbour."""
    at = [traced.cuts.index(cut) for cut in plan.cuts]
    slowest = max(range(len(busy)), key=lambda stage: busy[stage])
    moved = []
    if slowest > 0:
        moved.append([*at[: slowest - 1], at[slowest - 1] + 1, *at[slowest:]])
    if slowest < len(at):
        moved.append([*at[:slowest], at[slowest] - 1, *at[slowest + 1 :]])
    fits = (m for m in moved if all(a < b for a, b in pairwise([-1, *m, len(traced.cuts)])))
    return [replace(plan, cuts=tuple(traced.cuts[index] for index in m)) for m in fits]
