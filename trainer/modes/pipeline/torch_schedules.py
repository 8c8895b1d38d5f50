"""Schedules of pipelines, torch's and ours.

A schedule assigns stages to workers and orders the work of each worker.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from trainer.modes.pipeline import orders
from trainer.modes.pipeline.orders import Action, StageSeconds
from trainer.recipe import IN_TURN, MEASURED, STREAMS, Recipe
from trainer.recipe.checks import (
    V_SHAPED,
    list_refused_schedules,
    ranks_per_pipeline,
    resolve_schedule,
    virtual_stages,
)


class ScheduleMeasured(schedules._PipelineScheduleRuntime):
    """Torch's runtime with an order that is computed from the measured times of the stages."""

    def __init__(
        self,
        stages: Sequence[Any],
        microbatches: int,
        stage_seconds: StageSeconds,
        **options: Any,
    ) -> None:
        super().__init__(stages, microbatches, **options)  # type: ignore[no-untyped-call]
        order = list_actions(
            MEASURED,
            stages[0].group_size,
            len(stages),
            microbatches,
            stage_seconds,
        )
        self.pipeline_order = {}
        for rank, actions in enumerate(order):
            self.pipeline_order[rank] = [
                schedules._Action.from_str(f"{action.stage}{action.kind}{action.microbatch}")
                for action in actions
            ]
        self._prepare_schedule_with_comms(self.pipeline_order)


SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved1f1b": schedules.ScheduleInterleaved1F1B,
    "loopedbfs": schedules.ScheduleLoopedBFS,
    "interleavedzerobubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
    MEASURED: ScheduleMeasured,
}
for name in list_refused_schedules():
    SCHEDULES.pop(name, None)
# Silence torch's logger: besides raising an error, torch would also log whole schedules.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def assign_ranks(
    schedule: str,
    ranks: int,
    virtual: int,
) -> list[int]:
    """Return the rank, within a replica, of each stage.

    Stages are assigned round-robin, `virtual` times. In V-shaped schedules the second round is in
    reverse.
    """
    if schedule in V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return list(range(ranks)) * virtual


def assign_recipe_ranks(recipe: Recipe, processes: int) -> list[int]:
    """Return the rank, within a replica, of each stage of a recipe.

    Args:
        recipe: a recipe with mode=pipeline.
        processes: number of processes of the run.
    """
    schedule = resolve_schedule(recipe, processes)
    return assign_ranks(
        schedule,
        ranks_per_pipeline(recipe, processes),
        virtual_stages(recipe, schedule),
    )


def convert_actions(actions: Sequence[Any]) -> Iterator[Action]:
    """Convert torch's actions of one rank. Only forward and backward passes are kept."""
    for action in actions:
        if action is None:
            continue
        name = action.computation_type.name
        if action.sub_actions:
            yield from convert_actions(action.sub_actions)
        elif name in LETTERS:
            yield Action(LETTERS[name], action.stage_index, action.microbatch_index)


def list_actions(
    schedule: str,
    workers: int,
    virtual: int,
    microbatches: int,
    stages: StageSeconds = (),
) -> list[list[Action]]:
    """Return the actions of each worker in order.

    Args:
        schedule: name of the schedule: a key of `SCHEDULES`, STREAMS (1F1B in one process), or
            IN_TURN (one stage at a time, as in mode `split`).
        workers: number of ranks, or of devices in one process.
        virtual: number of stages per worker.
        microbatches: number of micro-batches of a step.
        stages: forward and backward time of each stage in seconds, for the measured schedule; by
            default all stages are equal.

    Raises:
        ValueError: torch does not support these numbers for this schedule.
    """
    if schedule == IN_TURN:
        return [[Action("F", worker, 0), Action("B", worker, 0)] for worker in range(workers)]
    if schedule in ("gpipe", "1f1b", STREAMS):
        if schedule == "gpipe":
            kind = orders.gpipe
        else:
            kind = orders.one_forward_one_backward
        return [kind(worker, workers, microbatches) for worker in range(workers)]
    if schedule == MEASURED:
        return orders.as_ready(
            assign_ranks(schedule, workers, virtual),
            stages or [(1.0, 2.0)] * (workers * virtual),
            microbatches,
        )
    # A placeholder replaces the stages, because the constructor of a schedule reads only these
    # attributes of a stage.
    placeholder = SimpleNamespace(
        num_stages=workers * virtual,
        group_size=workers,
        group_rank=0,
        submod=nn.Identity(),
        has_backward=True,
    )
    schedule_class = SCHEDULES[schedule]
    torch_schedule = schedule_class(
        [placeholder] * virtual,
        microbatches,
        loss_fn=lambda outputs, targets: outputs,
    )
    return [list(convert_actions(torch_schedule.pipeline_order[rank])) for rank in range(workers)]


def predict_step_and_bubble(
    schedule: str,
    workers: int,
    microbatches: int,
    stages: StageSeconds,
    transfer: float = 0.0,
) -> tuple[float, float]:
    """Predict the duration of a step and its bubble.

    Args:
        schedule: name of the schedule, as for `list_actions`.
        workers: number of ranks, or of devices in one process.
        microbatches: number of micro-batches of a step.
        stages: forward and backward time of each stage in seconds.
        transfer: seconds between the end of an action and the start of a dependent action on
            another worker.

    Returns:
        (seconds, bubble): duration of the step in seconds, and fraction of the workers' time in
        which they wait.
    """
    order = list_actions(schedule, workers, len(stages) // workers, microbatches, stages)
    spans = orders.simulate(order, stages, transfer)
    return orders.measure_length(spans), orders.compute_idle_share(spans, workers)


@contextmanager
def unwrap_stage_errors() -> Iterator[None]:
    """Return a context that raises a stage's original error instead of torch's error about it.

    Torch's error describes tensors. The original has the reason, for example that a device is out
    of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise
