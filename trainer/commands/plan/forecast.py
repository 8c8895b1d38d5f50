"""Traffic between devices in a step, and the predicted duration of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.commands.plan.fake_model import Cut, FakeModel
from trainer.errors import RecipeError
from trainer.memory.needs import count_teacher_bytes
from trainer.models.balance import BlockCost, sum_stage_seconds
from trainer.modes.pipeline import tuning
from trainer.modes.pipeline.torch_schedules import predict_step_and_bubble
from trainer.recipe import STREAMS
from trainer.recipe.checks import count_weight_shards
from trainer.recipe.layout import Layout
from trainer.telemetry.readable import format_duration, format_size

# Assumed share of the backward pass in the time of a forward and backward pass. The two passes are
# measured together, but on a GPU, only the backward pass can hide an all-reduce.
BACKWARD = 2 / 3


class Traffic(NamedTuple):
    """Bytes that devices send.

    Attributes:
        reduced: bytes that each device sends in a step to reduce gradients, gather shards or
            average weights; in a pipeline, those of the worker with the most gradients.
        averaged: bytes that each device sends to average weights once, as at the end of an epoch.
        crossing: bytes that all devices together send in a step: activations between stages and
            their gradients, or copies of the model and their gradients.
    """

    reduced: float = 0.0
    averaged: float = 0.0
    crossing: float = 0.0


def list_candidates(layout: Layout) -> list[int]:
    """Return the numbers of micro-batches among which training would choose by measuring them."""
    stages = layout.workers * layout.virtual
    schedules = ((layout.schedule, stages),)
    return tuning.choose_counts(
        tuning.Pipe(layout.workers, schedules, layout.rows, tuple(layout.microbatches))
    )


def count_ring_sends(ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce, per byte of the tensor.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel and Distributed Computing 69 (2009), p. 117.
    """
    return 2 * (ranks - 1) / ranks


def compute_traffic(fake: FakeModel, layout: Layout, cut: Cut | None) -> Traffic:
    """Compute the traffic of the layout; `cut` describes the stages of the model, if any."""
    recipe = layout.recipe
    count = layout.processes
    resident = fake.resident(fake.model)
    if cut:
        sent = sum(stage.sent for stage in cut.stages[:-1])
        crossing = 2.0 * cut.microbatches * recipe.pieces * sent
        return Traffic(count_ring_sends(layout.data_shares) * max(cut.gradients), crossing=crossing)
    match recipe.traits.exchanges:
        case "gradients":
            compression = 2 if recipe.ddp.compress else 1
            return Traffic(count_ring_sends(count) * resident.gradients / compression)
        case "shards":
            parts = count_weight_shards(recipe, count)
            # Weights are gathered for the forward pass and, if they were freed, for the backward
            # pass; gradients are reduced.
            passes = (2 + recipe.fsdp.reshard) * recipe.pieces
            own_teacher = count_teacher_bytes(fake.teacher, resident.parameters, parts)
            teacher = (fake.teacher - own_teacher) * recipe.pieces
            sends = passes * (parts - 1) / parts + count_ring_sends(count // parts) / parts
            return Traffic(resident.parameters * sends + teacher)
        case "weights":
            averaged = count_ring_sends(count) * (resident.gradients + resident.buffers)
            every = recipe.local_sgd.every
            within_epoch = averaged
            if recipe.local_sgd.streams:
                # Buffers are averaged only at the end of an epoch.
                compression = 2 if recipe.local_sgd.compress else 1
                within_epoch = count_ring_sends(count) * resident.gradients / compression
            # At the end of an epoch, weights are averaged in float64.
            return Traffic(within_epoch / every if every else 0.0, 2 * averaged)
        case "copies" if layout.kind == "cuda":
            # The first device sends a copy of the model to each other device, and receives the
            # gradients of each copy.
            each = (resident.parameters + resident.gradients) * recipe.pieces
            return Traffic(crossing=float((len(layout.devices) - 1) * each))
    return Traffic()


@dataclass(frozen=True)
class Timings:
    """Measured speeds of one device.

    Attributes:
        image: seconds of the forward and backward pass per image.
        rows: number of images of the pass in which `image` was measured.
        optimizer: seconds of the optimizer in a step, for the whole model.
        blocks: seconds of each block between two possible cuts, by the number of images of a
            micro-batch; empty for a mode without stages.
        bandwidth: bytes per second between two devices; None if it was not measured.
        latency: seconds before the first byte of a message arrives; 0 if it was not measured.
        assumptions: sentences that say what these numbers assume.
    """

    image: float
    rows: int
    optimizer: float
    blocks: Mapping[int, list[BlockCost]]
    bandwidth: float | None = None
    latency: float = 0.0
    assumptions: Sequence[str] = ()


@dataclass(frozen=True)
class Forecast:
    """A predicted step.

    Attributes:
        compute: seconds of forward and backward passes; in a pipeline, with the waiting of stages
            and the transfers between them.
        communication: seconds of exchanging gradients, shards or weights, without the time that
            overlaps with `compute`.
        optimizer: seconds of the optimizer.
        bubble: fraction of `compute` in which stages wait; None for a mode without stages.
        cut: the stages of the model; None for a mode without stages.
        assumptions: sentences that say what the prediction assumes.
    """

    compute: float
    communication: float
    optimizer: float
    bubble: float | None = None
    cut: Cut | None = None
    assumptions: Sequence[str] = ()

    @property
    def step(self) -> float:
        return self.compute + self.communication + self.optimizer

    def figures(self, batch_size: int) -> dict[str, float | None]:
        """Return the predicted times and speed by their keys in the plan."""
        return {
            "step_seconds": self.step,
            "compute_seconds": self.compute,
            "communication_seconds": self.communication,
            "optimizer_seconds": self.optimizer,
            # Images are assumed to arrive in time, so nothing else takes time.
            "other_seconds": 0.0,
            "bubble": self.bubble,
            "samples_per_sec": batch_size / self.step,
        }


def forecast(
    fake: FakeModel, layout: Layout, measured: Timings, bandwidth: float | None
) -> Forecast:
    """Predict a step of the layout.

    Args:
        fake: the recipe's model.
        layout: processes and devices.
        measured: measured speeds of one device.
        bandwidth: bandwidth between devices in bytes per second, as stated by the user. None: the
            measured bandwidth.

    Raises:
        RecipeError: the mode cannot be predicted.
    """
    recipe = layout.recipe
    if recipe.traits.exchanges == "copies" and layout.kind == "cuda":
        raise RecipeError(
            f"measured= cannot predict mode={recipe.mode}, which copies the model in every pass: "
            "plan mode=ddp"
        )
    if bandwidth is not None:
        notes = (*measured.assumptions, f"devices exchange {format_size(bandwidth)}/s, as stated")
        measured = replace(measured, bandwidth=bandwidth, assumptions=notes)
    if not layout.staged:
        return _predict_replicas(fake, layout, measured)
    # Training measures these numbers of micro-batches and chooses the fastest.
    forecasts = [_predict_cut(fake, layout, measured, count) for count in list_candidates(layout)]
    return min(forecasts, key=lambda forecast: forecast.step)


def _predict_replicas(fake: FakeModel, layout: Layout, measured: Timings) -> Forecast:
    notes = list(measured.assumptions)
    if layout.rows != measured.rows:
        notes.append(
            f"an image takes as long in passes of {layout.rows} as in passes of {measured.rows}"
        )
    compute = measured.image * layout.rows * layout.recipe.pieces
    seconds, note = _predict_exchange(fake, layout, measured)
    if note:
        notes.append(note)
    hidden = 0.0
    if layout.recipe.traits.exchanges == "gradients" and seconds:
        if layout.kind == "cuda":
            # Only the backward pass of the last micro-batch exchanges gradients, so only this pass
            # can hide the all-reduce.
            hidden = min(seconds, BACKWARD * measured.image * layout.rows)
            notes.append(
                f"{format_duration(hidden)} of {format_duration(seconds)} of all-reduce overlap "
                "with the backward pass"
            )
        else:
            notes.append("the all-reduce overlaps with nothing: on CPUs the same cores do both")
    return Forecast(compute, seconds - hidden, measured.optimizer, assumptions=notes)


def _predict_exchange(fake: FakeModel, layout: Layout, measured: Timings) -> tuple[float, str]:
    """Predict the time of exchanging gradients, shards or weights.

    Returns:
        (seconds, note): the seconds per step, without any overlap, and a sentence that says how
        they were computed, or why they are 0.0; (0.0, "") if the mode exchanges nothing.
    """
    count = layout.processes
    exchanges = layout.recipe.traits.exchanges
    if count == 1 or exchanges not in ("gradients", "shards", "weights"):
        return 0.0, ""
    every = layout.recipe.local_sgd.every if exchanges == "weights" else 1
    if every is None:
        return 0.0, "the cost of averaging once an epoch is neglected"
    if measured.bandwidth is None:
        return 0.0, "communication is left out: state it, as in bandwidth=10GB/s"
    sent = compute_traffic(fake, layout, None).reduced
    seconds = sent / measured.bandwidth
    if exchanges == "shards":
        return (
            seconds,
            f"{format_size(sent)} of weights and gradients a step, none of it overlapped",
        )
    seconds += 2 * (count - 1) * measured.latency / every
    return (
        seconds,
        f"a ring all-reduce among {count}, in which each sends {format_size(sent)} a step",
    )


def _predict_cut(fake: FakeModel, layout: Layout, measured: Timings, microbatches: int) -> Forecast:
    recipe = layout.recipe
    rows = -(-layout.rows // microbatches)
    costs = measured.blocks[rows]
    cut = fake.cut(layout, microbatches, costs)
    stages = sum_stage_seconds(fake.traced, cut.names, costs)
    notes = [
        *measured.assumptions,
        f"each block's seconds were measured in micro-batches of {rows}",
    ]
    if recipe.recompute:
        stages = [(forward, backward + forward) for forward, backward in stages]
    # The largest transfer sets the pace of the pipeline.
    crossing = max((stage.sent for stage in cut.stages[:-1]), default=0)
    transfer = 0.0
    exchange = 0.0
    if measured.bandwidth is not None:
        transfer = measured.latency + crossing / measured.bandwidth
        exchange = compute_traffic(fake, layout, cut).reduced / measured.bandwidth
        notes.append(
            f"a micro-batch's {format_size(crossing)} take {format_duration(transfer)} from stage "
            "to stage"
        )
    elif layout.processes > 1:
        notes.append("transfers between stages are left out: state bandwidth=10GB/s")
    # Without CUDA streams, one process computes one stage after the other.
    if recipe.traits.one_stage_at_a_time or (layout.schedule == STREAMS and layout.kind == "cpu"):
        length = cut.microbatches * sum(map(sum, stages))
        bubble = 1 - 1 / layout.workers
        notes.append("one stage works at a time")
    else:
        length, bubble = predict_step_and_bubble(
            layout.schedule, layout.workers, cut.microbatches, stages, transfer
        )
    update = measured.optimizer
    if layout.processes > 1:
        # The rank with the most gradients updates the most weights, and all others wait for it.
        update *= max(cut.gradients) / sum(cut.gradients)
    return Forecast(length * recipe.pieces, exchange, update, bubble, cut, notes)
