"""In which order the stages of a pipeline work, and what that costs: pure functions, drawn as tables in their tests.

F and B are the forward and backward pass of one micro-batch on one stage; I and W, where a schedule splits B, are the
gradients of inputs and of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """One piece of work: F, B, I or W of a micro-batch on a stage."""

    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """When a worker (a rank, or a device) did a task, in seconds."""

    worker: int
    task: Task
    begin: float
    end: float


def gpipe(stage: int, stages: int, microbatches: int) -> list[Task]:
    """All forward passes, then all backward passes (Huang et al., "GPipe", arXiv:1811.06965)."""
    return [Task(kind, stage, m) for kind in "FB" for m in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Task]:
    """1F1B: a stage holds as many micro-batches as stages follow it, and one (Narayanan et al., arXiv:2104.04473)."""
    ahead = min(stages - stage, microbatches)
    tasks = [Task("F", stage, m) for m in range(ahead)]
    for m in range(microbatches):
        tasks.append(Task("B", stage, m))
        if m + ahead < microbatches:
            tasks.append(Task("F", stage, m + ahead))
    return tasks


def simulate(
    orders: Sequence[Sequence[Task]], seconds: Mapping[tuple[str, int], float], transfer: float = 0.0
) -> list[Span]:
    """When each worker does its tasks if every one starts as soon as it can.

    Args:
        orders: each worker's tasks in its order.
        seconds: of each (kind, stage); half of B where I and W are not given.
        transfer: seconds between the end of a task and the start of the one that waits for it on another worker.

    Returns:
        Spans, ordered by their begin.

    Raises:
        ValueError: the orders wait for each other in a circle.
    """
    stages = 1 + max(task.stage for order in orders for task in order)
    done: dict[Task, tuple[float, int]] = {}  # end, worker
    clocks, at, spans = [0.0] * len(orders), [0] * len(orders), []
    left = sum(map(len, orders))
    while left:
        moved = False
        for worker, order in enumerate(orders):
            while at[worker] < len(order):
                task = order[at[worker]]
                needs = _needs(task, stages, done)
                if needs is None:
                    break
                ready = max((end + transfer * (other != worker) for end, other in needs), default=0.0)
                begin = max(clocks[worker], ready)
                cost = seconds.get((task.kind, task.stage), seconds.get(("B", task.stage), 0.0) / 2)
                clocks[worker] = begin + cost
                done[task] = (begin + cost, worker)
                spans.append(Span(worker, task, begin, begin + cost))
                at[worker] += 1
                left -= 1
                moved = True
        if not moved:
            raise ValueError("the stages' orders wait for each other")
    return sorted(spans, key=lambda span: (span.begin, span.worker))


def _needs(task: Task, stages: int, done: Mapping[Task, tuple[float, int]]) -> list[tuple[float, int]] | None:
    """Ends and workers of what a task waits for, or None while one of them is not done."""
    kind, stage, m = task
    if kind == "F":
        wanted = [[Task("F", stage - 1, m)]] if stage else []
    elif kind == "W":
        wanted = [[Task("I", stage, m)]]
    else:
        wanted = [[Task("F", stage, m)]]
        if stage + 1 < stages:
            wanted.append([Task("B", stage + 1, m), Task("I", stage + 1, m)])
    found = []
    for either in wanted:
        present = [done[one] for one in either if one in done]
        if not present:
            return None
        found.append(present[0])
    return found


def issue_order(stages: int, microbatches: int) -> list[Task]:
    """In which order one process issues the work of all its devices: 1F1B on each, merged as they would begin.

    A backward pass is taken as twice a forward pass. What is issued never waits for something issued later, so one
    thread keeps all devices busy with asynchronous work.
    """
    orders = [one_forward_one_backward(stage, stages, microbatches) for stage in range(stages)]
    seconds = {(kind, stage): cost for stage in range(stages) for kind, cost in (("F", 1.0), ("B", 2.0))}
    return [span.task for span in simulate(orders, seconds)]


def idle_share(spans: Sequence[Span], workers: int) -> float:
    """The bubble: the share of the workers' time between the first begin and the last end in which they do nothing."""
    if not spans:
        return 0.0
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return max(0.0, 1 - busy / (workers * length)) if length else 0.0


def ideal_bubble(workers: int, microbatches: int, virtual: int = 1) -> float:
    """(p - 1) / (v m + p - 1): of p equal workers with v stages each, of m micro-batches (arXiv:2104.04473, 2.2)."""
    return (workers - 1) / (virtual * microbatches + workers - 1)
