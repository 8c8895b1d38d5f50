"""In which order the stages of a pipeline work, and what that costs: pure functions, drawn as tables in their tests.

F and B are the forward and backward pass of one micro-batch on one stage; I and W, where a schedule splits B, are the
gradients of inputs and of weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LIMITS = 8  # of how many micro-batches may be under way, that an order is tried with


class Action(NamedTuple):
    """One piece of work: F, B, I or W of a micro-batch on a stage."""

    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """When a worker (a rank, or a device) did an action, in seconds.

    Within `launching` of them the host still issued the action's kernels, so that a GPU may have waited for the next.
    """

    worker: int
    action: Action
    begin: float
    end: float
    launching: float = 0.0


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al., "GPipe", arXiv:1811.06965)."""
    return [Action(kind, stage, m) for kind in "FB" for m in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B: a stage holds as many micro-batches as stages follow it, and one (Narayanan et al., arXiv:2104.04473)."""
    ahead = min(stages - stage, microbatches)
    actions = [Action("F", stage, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action("B", stage, m))
        if m + ahead < microbatches:
            actions.append(Action("F", stage, m + ahead))
    return actions


def as_ready(holders: Sequence[int], stages: Sequence[tuple[float, float]], microbatches: int) -> list[list[Action]]:
    """Each worker's actions if it always does what is ready: forward passes first, those of its last stage before all.

    List scheduling (Graham 1966) on the stages' seconds, forward and backward; `holders` says which worker holds each.
    Of a few numbers of micro-batches that may be under way at once, the one with the shortest step; where others come
    within 1 %, the least. A stage takes micro-batches in their order, so that sums do not depend on the seconds.
    """
    workers = max(holders) + 1
    least = min(microbatches, workers)
    limits = [*range(least, microbatches, 1 + (microbatches - least) // LIMITS), microbatches]
    listed = [_list_schedule(holders, stages, microbatches, limit) for limit in limits]
    lengths = [max(span.end for span in spans) for spans in listed]
    spans = next(spans for spans, length in zip(listed, lengths, strict=True) if length <= 1.01 * min(lengths))
    return [[span.action for span in spans if span.worker == worker] for worker in range(workers)]


def _list_schedule(
    holders: Sequence[int], stages: Sequence[tuple[float, float]], microbatches: int, limit: int
) -> list[Span]:
    """What each worker does and when, in the order of begins, with at most `limit` micro-batches under way."""
    last = len(holders) - 1
    # What is ready, since when: micro-batches become ready in their order. Forward passes of late stages come first.
    ready = {(kind, stage): deque[tuple[int, float]]() for kind in "FB" for stage in reversed(range(len(holders)))}
    queues = [[key for key in ready if holders[key[1]] == worker] for worker in range(max(holders) + 1)]
    clocks = [0.0] * len(queues)
    spans: list[Span] = []
    ready["F", 0].extend((m, 0.0) for m in range(limit))
    while True:
        begins = [
            (max(clocks[worker], min(ready[key][0][1] for key in some)), worker)
            for worker, keys in enumerate(queues)
            if (some := [key for key in keys if ready[key]])
        ]
        if not begins:
            return spans
        begin, worker = min(begins)
        kind, stage = next(key for key in queues[worker] if ready[key] and ready[key][0][1] <= begin)
        m, _ = ready[kind, stage].popleft()
        end = clocks[worker] = begin + stages[stage]["FB".index(kind)]
        spans.append(Span(worker, Action(kind, stage, m), begin, end))
        if kind == "F":
            ready[("B", last) if stage == last else ("F", stage + 1)].append((m, end))
        elif stage:
            ready["B", stage - 1].append((m, end))
        elif m + limit < microbatches:
            ready["F", 0].append((m + limit, end))


def seconds_of(stages: Sequence[tuple[float, float]]) -> dict[tuple[str, int], float]:
    """Each stage's seconds, forward and backward, as `simulate` wants them."""
    return {(kind, stage): cost for stage, pair in enumerate(stages) for kind, cost in zip("FB", pair, strict=True)}


def simulate(
    orders: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], transfer: float = 0.0
) -> list[Span]:
    """When each worker does its actions if every one starts as soon as it can: spans, ordered by their begin.

    `seconds` are of each (kind, stage), half of B where I and W are not given; `transfer` seconds lie between an action
    and one that waits for it on another worker. Raises ValueError where the orders wait for each other in a circle.
    """
    stages = 1 + max(action.stage for order in orders for action in order)
    done: dict[Action, tuple[float, int]] = {}  # end, worker
    clocks, at, spans = [0.0] * len(orders), [0] * len(orders), []
    left = sum(map(len, orders))
    while left:
        moved = False
        for worker, order in enumerate(orders):
            while at[worker] < len(order):
                action = order[at[worker]]
                needs = _needs(action, stages, done)
                if needs is None:
                    break
                ready = max((end + transfer * (other != worker) for end, other in needs), default=0.0)
                begin = max(clocks[worker], ready)
                cost = seconds.get((action.kind, action.stage), seconds.get(("B", action.stage), 0.0) / 2)
                clocks[worker] = begin + cost
                done[action] = (begin + cost, worker)
                spans.append(Span(worker, action, begin, begin + cost))
                at[worker] += 1
                left -= 1
                moved = True
        if not moved:
            raise ValueError("the stages' orders wait for each other")
    return sorted(spans, key=lambda span: (span.begin, span.worker))


def _needs(action: Action, stages: int, done: Mapping[Action, tuple[float, int]]) -> list[tuple[float, int]] | None:
    """Ends and workers of what an action waits for, or None while one of them is not done."""
    kind, stage, m = action
    if kind == "F":
        wanted = [[Action("F", stage - 1, m)]] if stage else []
    elif kind == "W":
        wanted = [[Action("I", stage, m)]]
    else:
        wanted = [[Action("F", stage, m)]]
        if stage + 1 < stages:
            wanted.append([Action("B", stage + 1, m), Action("I", stage + 1, m)])
    needs = []
    for alternatives in wanted:
        present = [done[each] for each in alternatives if each in done]
        if not present:
            return None
        needs.append(present[0])
    return needs


def issue_order(stages: int, microbatches: int) -> list[Action]:
    """In which order one process issues the work of all its devices: 1F1B on each, merged as they would begin.

    A backward pass is taken as twice a forward pass. What is issued never waits for something issued later, so one
    thread keeps all devices busy with asynchronous work.
    """
    orders = [one_forward_one_backward(stage, stages, microbatches) for stage in range(stages)]
    return [span.action for span in simulate(orders, seconds_of([(1.0, 2.0)] * stages))]


def idle_share(spans: Sequence[Span], workers: int, launching: bool = False) -> float:
    """The bubble: the share of the workers' time between the first begin and the last end in which they do nothing.

    With `launching` it is the most that it may be: nothing was done while the host launched work.
    """
    if not spans:
        return 0.0
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin - launching * span.launching for span in spans)
    return max(0.0, 1 - busy / (workers * length)) if length else 0.0


def ideal_bubble(workers: int, microbatches: int, virtual: int = 1) -> float:
    """(p - 1) / (v m + p - 1): of p equal workers with v stages each, of m micro-batches (arXiv:2104.04473, 2.2)."""
    return (workers - 1) / (virtual * microbatches + workers - 1)
