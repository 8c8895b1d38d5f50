"""Orders of the work in a pipeline, and their predicted duration. All functions are pure.

F and B are the forward and backward pass of one micro-batch on one stage. Some schedules split B
into I, the gradients of inputs, and W, the gradients of weights.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# `as_ready` tries about this number of different limits on the micro-batches in flight.
LIMITS = 8
# Forward and backward time of each stage in seconds.
StageSeconds = Sequence[tuple[float, float]]


class Action(NamedTuple):
    """The forward or backward pass of a micro-batch on a stage.

    Attributes:
        kind: "F" for the forward pass, "B" for the whole backward pass, "I" for its gradients of
            inputs only, "W" for its gradients of weights only.
        stage: position of the stage in the model, from 0.
        microbatch: index of the micro-batch in its batch, from 0.
    """

    kind: str
    stage: int
    microbatch: int


class Span(NamedTuple):
    """Time in which a worker computes an action.

    Attributes:
        worker: index of the rank within its replica, or of the device in one process.
        action: the action.
        begin: time in seconds at which the action begins.
        end: time in seconds at which the action ends, by the same clock as `begin`.
        launching: seconds between `begin` and `end` in which the host was still launching the
            action's kernels, so that a GPU may have waited for the next kernel.
    """

    worker: int
    action: Action
    begin: float
    end: float
    launching: float = 0.0


def gpipe(
    stage: int,
    stages: int,
    microbatches: int,
) -> list[Action]:
    """Order all forward passes before all backward passes (Huang et al., arXiv:1811.06965)."""
    return [Action(kind, stage, m) for kind in "FB" for m in range(microbatches)]


def one_forward_one_backward(
    stage: int,
    stages: int,
    microbatches: int,
) -> list[Action]:
    """Alternate forward and backward passes, 1F1B (Narayanan et al., arXiv:2104.04473).

    At most `stages - stage` micro-batches are in flight on a stage: one more than the number of
    stages after it.
    """
    ahead = min(stages - stage, microbatches)
    actions = [Action("F", stage, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action("B", stage, m))
        if m + ahead < microbatches:
            actions.append(Action("F", stage, m + ahead))
    return actions


def as_ready(
    holders: Sequence[int],
    stages: StageSeconds,
    microbatches: int,
) -> list[list[Action]]:
    """Order each worker's actions by list scheduling (Graham 1966).

    A free worker starts an action whose dependencies have finished. The worker prefers forward
    passes, and among them those of its last stage. Several limits on the number of micro-batches in
    flight are tried, and the smallest limit within 1 % of the shortest step is used. A stage
    processes micro-batches in ascending order, so that sums of gradients do not depend on the
    measured times.

    Args:
        holders: the worker of each stage.
        stages: forward and backward time of each stage in seconds.
        microbatches: number of micro-batches of a step.

    Returns:
        The actions of each worker in order.
    """
    workers = max(holders) + 1
    least = min(microbatches, workers)
    stride = 1 + (microbatches - least) // LIMITS
    candidates = []
    for limit in [*range(least, microbatches, stride), microbatches]:
        spans = _list_schedule(holders, stages, microbatches, limit)
        candidates.append((measure_length(spans), spans))
    shortest = min(length for length, _ in candidates)
    spans = next(spans for length, spans in candidates if length <= 1.01 * shortest)
    actions: list[list[Action]] = [[] for _ in range(workers)]
    for span in spans:
        actions[span.worker].append(span.action)
    return actions


def _list_schedule(
    holders: Sequence[int],
    stages: StageSeconds,
    microbatches: int,
    limit: int,
) -> list[Span]:
    """Simulate list scheduling with at most `limit` micro-batches in flight.

    Returns:
        The spans of all workers, sorted by begin.
    """
    last = len(holders) - 1
    # Queues contain micro-batches in ascending order, with the time at which each becomes ready. A
    # worker takes the next action from the first of its queues whose first micro-batch is ready.
    # Queues of forward passes come first, and among them those of late stages.
    ready: dict[tuple[str, int], deque[tuple[int, float]]] = {}
    for kind in "FB":
        for stage in reversed(range(len(holders))):
            ready[kind, stage] = deque()
    clocks = [0.0] * (max(holders) + 1)
    spans: list[Span] = []
    ready["F", 0].extend((m, 0.0) for m in range(limit))
    while True:
        begins = []
        for (_, stage), queue in ready.items():
            if queue:
                worker = holders[stage]
                begins.append((max(clocks[worker], queue[0][1]), worker))
        if not begins:
            return spans
        begin, worker = min(begins)
        for key, queue in ready.items():
            if holders[key[1]] == worker and queue and queue[0][1] <= begin:
                break
        kind, stage = key
        m, _ = queue.popleft()
        end = begin + stages[stage]["FB".index(kind)]
        clocks[worker] = end
        spans.append(Span(worker, Action(kind, stage, m), begin, end))
        if kind == "F" and stage < last:
            ready["F", stage + 1].append((m, end))
        elif kind == "F":
            ready["B", last].append((m, end))
        elif stage:
            ready["B", stage - 1].append((m, end))
        elif m + limit < microbatches:
            ready["F", 0].append((m + limit, end))


def simulate(
    orders: Sequence[Sequence[Action]],
    stages: StageSeconds,
    transfer: float = 0.0,
) -> list[Span]:
    """Simulate workers that start every action as soon as possible.

    Args:
        orders: the actions of each worker in order.
        stages: forward and backward time of each stage in seconds. I and W take half of a backward
            time each.
        transfer: seconds between the end of an action and the start of a dependent action on
            another worker.

    Returns:
        The spans of all workers, sorted by begin.

    Raises:
        ValueError: the orders deadlock.
    """
    # End in seconds, and worker, of each finished action.
    finished: dict[Action, tuple[float, int]] = {}
    clocks = [0.0] * len(orders)
    positions = [0] * len(orders)
    spans = []
    left = sum(map(len, orders))
    while left:
        has_moved = False
        for worker, order in enumerate(orders):
            while positions[worker] < len(order):
                action = order[positions[worker]]
                dependencies = _find_dependencies(action, len(stages), finished)
                if dependencies is None:
                    break
                begin = clocks[worker]
                for end, other in dependencies:
                    if other != worker:
                        end += transfer
                    begin = max(begin, end)
                forward, backward = stages[action.stage]
                seconds = {"F": forward, "B": backward}
                end = begin + seconds.get(action.kind, backward / 2)
                clocks[worker] = end
                finished[action] = end, worker
                spans.append(Span(worker, action, begin, end))
                positions[worker] += 1
                left -= 1
                has_moved = True
        if not has_moved:
            raise ValueError("the stages' orders wait for each other")
    return sorted(spans, key=lambda span: (span.begin, span.worker))


def _find_dependencies(
    action: Action,
    stages: int,
    finished: Mapping[Action, tuple[float, int]],
) -> list[tuple[float, int]] | None:
    """Find the actions that must end before `action` starts.

    Returns:
        End and worker of these actions, or None if one of them is unfinished.
    """
    kind, stage, m = action
    # Lists of alternatives; one action of each list must be finished.
    required = []
    if kind == "W":
        required.append([Action("I", stage, m)])
    elif kind != "F":
        required.append([Action("F", stage, m)])
        if stage + 1 < stages:
            required.append([Action("B", stage + 1, m), Action("I", stage + 1, m)])
    elif stage:
        required.append([Action("F", stage - 1, m)])
    dependencies = []
    for alternatives in required:
        for alternative in alternatives:
            if alternative in finished:
                dependencies.append(finished[alternative])
                break
        else:
            return None
    return dependencies


def compute_issue_order(stages: int, microbatches: int) -> list[Action]:
    """Order the work of all devices of one process: 1F1B on each device, merged by start time.

    A backward pass is assumed to last as long as two forward passes. An action never waits for one
    that is issued later, so that one thread can issue asynchronous work for all devices.
    """
    orders = [one_forward_one_backward(stage, stages, microbatches) for stage in range(stages)]
    return [span.action for span in simulate(orders, [(1.0, 2.0)] * stages)]


def measure_length(spans: Sequence[Span]) -> float:
    """Return the time in seconds between the first begin and the last end."""
    begin = min(span.begin for span in spans)
    end = max(span.end for span in spans)
    return end - begin


def compute_idle_share(
    spans: Sequence[Span],
    workers: int,
    launching: bool = False,
) -> float:
    """Compute the bubble: the fraction of the workers' time in which they are idle.

    Args:
        spans: the actions of one step.
        workers: number of workers.
        launching: True to count the time in which a host was still launching an action's kernels as
            idle, which is an upper bound of the bubble; False to count it as busy.
    """
    if not spans:
        return 0.0
    length = measure_length(spans)
    busy = sum(span.end - span.begin - launching * span.launching for span in spans)
    if length:
        return max(0.0, 1 - busy / (workers * length))
    return 0.0


def compute_ideal_bubble(
    workers: int,
    microbatches: int,
    virtual: int,
) -> float:
    """Compute the bubble of equal stages: the fraction (p - 1) / (v m + p - 1) of the whole step.

    Narayanan et al. (arXiv:2104.04473, section 2.2) divide the same idle time by the time of a step
    without a bubble instead, and get (p - 1) / (v m).

    Args:
        workers: number p of workers.
        microbatches: number m of micro-batches.
        virtual: number v of stages per worker.
    """
    return (workers - 1) / (virtual * microbatches + workers - 1)
