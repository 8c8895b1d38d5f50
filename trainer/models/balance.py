"""Measure the cost of each block of a model, and cut the model into equally fast stages."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError
from trainer.memory.measuring import Allocations, count_bytes
from trainer.models.partition import Traced, resolve_cuts
from trainer.models.undisturbed import restore_after

# Durations that differ by at most this factor count as equal, because timings vary by about 1 %.
TIE = 1.01


@dataclass(frozen=True)
class BlockCost:
    """Cost of a micro-batch in the block between two neighboring cuts.

    Attributes:
        forward: Duration of the forward pass in seconds.
        backward: Duration of the backward pass in seconds.
        bytes: Size in bytes of the output that is sent to the next block; 0 for the last block.
        kept: Size in bytes of the tensors that exist because of the forward pass: the output, and
            what is saved for the backward pass. The input, parameters and buffers are not counted.
        weights: Size in bytes of the parameters.
    """

    forward: float
    backward: float
    bytes: int
    kept: int = 0
    weights: int = 0


def choose_cuts(
    traced: Traced,
    wanted: Sequence[str],
    stages: int,
    costs: Sequence[BlockCost],
) -> tuple[str, ...]:
    """Return the cuts that `wanted` names, or the best cuts for `costs` if `wanted` is "auto".

    `wanted` is the value of `pipeline.cuts`.
    """
    if wanted != "auto":
        return resolve_cuts(traced, wanted, stages)
    return tuple(traced.cuts[index] for index in balance(costs, stages))


def group_by_stage(
    traced: Traced,
    cuts: Sequence[str],
    costs: Sequence[BlockCost],
) -> list[Sequence[BlockCost]]:
    """Group the costs of the blocks by stage."""
    bounds = [0, *(traced.cuts.index(cut) + 1 for cut in cuts), len(costs)]
    return [costs[start:end] for start, end in pairwise(bounds)]


def sum_stage_seconds(
    traced: Traced,
    cuts: Sequence[str],
    costs: Sequence[BlockCost],
) -> list[tuple[float, float]]:
    """Return the duration in seconds of the forward and the backward pass of each stage."""
    seconds = []
    for stage in group_by_stage(traced, cuts, costs):
        forward = sum(cost.forward for cost in stage)
        backward = sum(cost.backward for cost in stage)
        seconds.append((forward, backward))
    return seconds


def balance(
    costs: Sequence[BlockCost],
    stages: int,
) -> tuple[int, ...]:
    """Cut a sequence of blocks into stages so that the slowest stage is as fast as possible.

    The dynamic program for the linear partition problem (Skiena, The Algorithm Design Manual,
    section 8.5) runs twice. The first run finds the duration of the slowest stage. The second run
    finds the cuts that send the fewest bytes, among all cuts whose slowest stage takes at most 1 %
    longer.

    Returns:
        Rising indices i of cuts between the blocks i and i + 1.

    Raises:
        RecipeError: There are fewer blocks than stages.
    """
    if stages > len(costs):
        raise RecipeError(
            f"{stages} stages need {stages - 1} cuts and the model has only {len(costs) - 1} "
            f"usable cuts: lower pipeline.stages to at most {len(costs)}"
        )
    ends = list(accumulate(cost.forward + cost.backward for cost in costs))

    # Entry i is the duration of the slowest stage for the best cuts of the first i + 1 blocks.
    slowest = ends
    for _ in range(stages - 1):
        longer = []
        for i, end in enumerate(ends):
            best = float("inf")
            for j in range(i):
                best = min(best, max(slowest[j], end - ends[j]))
            longer.append(best)
        slowest = longer
    limit = slowest[-1] * TIE

    # Entry i describes the best cuts of the first i + 1 blocks, or is None if every choice exceeds
    # the limit. Bytes sent, duration of the slowest stage, and cuts have this order, so that `min`
    # returns the best entry.
    ways: list[tuple[int, float, tuple[int, ...]] | None]
    ways = [(0, end, ()) if end <= limit else None for end in ends]
    for _ in range(stages - 1):
        longer_ways = []
        for i, end in enumerate(ends):
            candidates = []
            for j, way in enumerate(ways[:i]):
                seconds = end - ends[j]
                if way is not None and seconds <= limit:
                    sent, slowest_before, cuts = way
                    sent += costs[j].bytes
                    candidates.append((sent, max(slowest_before, seconds), (*cuts, j)))
            longer_ways.append(min(candidates, default=None))
        ways = longer_ways
    # The first run found cuts within the limit.
    assert ways[-1] is not None
    return ways[-1][2]


def time_blocks(
    traced: Traced,
    inputs: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
    repeats: int = 3,
) -> list[BlockCost]:
    """Measure the forward and backward pass of each block between neighboring cuts.

    The blocks run one after the other in training mode, as in a pipeline: the input of a block is
    the detached output of the block before. Gradients, running statistics, training flags and
    random states do not change. If the model is not on the device of the inputs, each block is
    moved there and back.

    Args:
        traced: The model.
        inputs: A micro-batch (N, C, H, W). Relative costs of blocks depend on its size.
        run: Calls a module, for example under autocast.
        repeats: Number of measurements after a warm-up. Durations are medians over them.
    """
    blocks = traced.stages(traced.cuts)
    rounds = []
    with restore_after(blocks, inputs.device):
        for repeat in range(1 + repeats):
            received = inputs
            costs = []
            for block in blocks:
                tensors = block.state_dict().values()
                device = next((tensor.device for tensor in tensors), inputs.device)
                block.to(inputs.device).train()
                received, cost = _measure(block, received, run, counts_kept=repeat == 0)
                # Move the block back, because the inputs' device may be too small for the whole
                # model.
                block.to(device)
                costs.append(cost)
            rounds.append(costs)
    warm_up, *timed_rounds = rounds
    medians = []
    for index, block in enumerate(blocks):
        costs = [timed[index] for timed in timed_rounds]
        is_last = block is blocks[-1]
        medians.append(
            BlockCost(
                forward=statistics.median(cost.forward for cost in costs),
                backward=statistics.median(cost.backward for cost in costs),
                bytes=0 if is_last else warm_up[index].bytes,
                kept=warm_up[index].kept,
                weights=count_bytes(*block.parameters()),
            )
        )
    return medians


def _measure(
    block: nn.Module,
    received: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor],
    counts_kept: bool,
) -> tuple[Tensor, BlockCost]:
    """Run and time a forward and backward pass of one block.

    Returns:
        (output, cost): `output` is detached, as the input of the next block. `cost.kept` is 0
        unless `counts_kept` is True, and `cost.weights` is always 0.
    """
    parameters = [p for p in block.parameters() if p.requires_grad]
    allocations = None
    if counts_kept:
        allocations = Allocations([*block.parameters(), *block.buffers(), received])
    with torch.enable_grad(), allocations or nullcontext():
        start = _clock(received.device)
        out = run(block, received)
        middle = _clock(received.device)
        kept = allocations.live if allocations else 0
        # The output has no gradient if this block and all blocks before it are frozen.
        if out.requires_grad:
            inputs = [received, *parameters] if received.requires_grad else parameters
            # Call `grad`, because `backward` would change the gradients of the parameters.
            torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
        end = _clock(received.device)
    sent = out.detach()
    cost = BlockCost(middle - start, end - middle, count_bytes(sent), kept)
    return sent.requires_grad_(out.requires_grad), cost


def _clock(device: torch.device) -> float:
    """Synchronize the device and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
