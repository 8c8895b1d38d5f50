"""The schedules of pipelines, torch's and ours: which worker holds which stage, and in which order it works."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from trainer.modes.pipeline import orders
from trainer.modes.pipeline.orders import Action
from trainer.recipe import IN_TURN, MEASURED, STREAMS, Recipe
from trainer.recipe.checks import V_SHAPED, ranks_per_pipeline, refused_schedules, schedule_of, virtual_stages


class ScheduleMeasured(schedules._PipelineScheduleRuntime):
    """Torch's runtime in an order made from the measured times of the stages."""

    def __init__(
        self,
        stages: Sequence[Any],
        microbatches: int,
        stage_seconds: Sequence[tuple[float, float]] = (),
        **options: Any,
    ) -> None:
        super().__init__(stages, microbatches, **options)  # type: ignore[no-untyped-call]
        kinds = {"F": schedules.FORWARD, "B": schedules.FULL_BACKWARD}
        listed = pipeline_order(MEASURED, stages[0].group_size, len(stages), microbatches, stage_seconds)
        self.pipeline_order = {
            rank: [schedules._Action(action.stage, kinds[action.kind], action.microbatch) for action in actions]
            for rank, actions in enumerate(listed)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


SCHEDULES = {
    name: kind
    for name, kind in {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved1f1b": schedules.ScheduleInterleaved1F1B,
        "loopedbfs": schedules.ScheduleLoopedBFS,
        "interleavedzerobubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
        MEASURED: ScheduleMeasured,
    }.items()
    if name not in refused_schedules()
}
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)  # it prints whole schedules beside what it raises
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def ranks_of_stages(schedule: str, ranks: int, virtual: int) -> list[int]:
    """Which rank of a replica holds each stage: round and round, or down and up again for V-shaped schedules."""
    if schedule in V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return list(range(ranks)) * virtual


def holders(recipe: Recipe, processes: int) -> list[int]:
    """The same for a recipe in so many processes."""
    schedule = schedule_of(recipe, processes)
    return ranks_of_stages(schedule, ranks_per_pipeline(recipe, processes), virtual_stages(recipe, schedule))


def actions_of(actions: Sequence[Any]) -> Iterator[Action]:
    """Torch's actions of one rank as actions; what is neither forward nor backward is left out."""
    for action in actions:
        if action is not None and action.sub_actions:
            yield from actions_of(action.sub_actions)
        elif action is not None and action.computation_type.name in LETTERS:
            yield Action(LETTERS[action.computation_type.name], action.stage_index, action.microbatch_index)


def pipeline_order(
    schedule: str, workers: int, virtual: int, microbatches: int, stages: Sequence[tuple[float, float]] = ()
) -> list[list[Action]]:
    """Each worker's actions, in torch's own order for the schedules that are torch's.

    `stages`: seconds of each, forward and backward, for the schedule that follows them; else all are equal.

    Raises:
        ValueError: torch has no such order for these numbers.
    """
    if schedule == IN_TURN:
        return [[Action("F", worker, 0), Action("B", worker, 0)] for worker in range(workers)]
    if schedule in ("gpipe", "1f1b", STREAMS):
        kind = orders.gpipe if schedule == "gpipe" else orders.one_forward_one_backward
        return [kind(worker, workers, microbatches) for worker in range(workers)]
    if schedule == MEASURED:
        return orders.as_ready(
            ranks_of_stages(schedule, workers, virtual), stages or [(1.0, 2.0)] * (workers * virtual), microbatches
        )
    stands_in: Any = SimpleNamespace(  # what a schedule reads of a stage before it runs
        num_stages=workers * virtual, group_size=workers, group_rank=0, submod=nn.Identity(), has_backward=True
    )
    made: Any = SCHEDULES[schedule]
    listed = made([stands_in] * virtual, microbatches, loss_fn=lambda outputs, targets: outputs).pipeline_order
    return [list(actions_of(listed[rank])) for rank in range(workers)]


def step_and_bubble(
    schedule: str, workers: int, microbatches: int, stages: Sequence[tuple[float, float]], transfer: float = 0.0
) -> tuple[float, float]:
    """Seconds of a step and the share of it in which workers wait, from each stage's seconds, forward and backward.

    `transfer`: seconds between the end of an action and the start of the one that waits for it on another worker.
    """
    order = pipeline_order(schedule, workers, len(stages) // workers, microbatches, stages)
    spans = orders.simulate(order, orders.seconds_of(stages), transfer)
    return max(span.end for span in spans), orders.idle_share(spans, workers)


class as_raised:
    """Torch wraps what a stage raises into a text on its tensors: what was raised says more, as out of memory does."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            raise error.__cause__ from None
