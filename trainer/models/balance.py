"""The cost of each block of a model on its device, and the cuts that make the slowest stage fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError
from trainer.models.memory import Allocations, size_of
from trainer.models.partition import Traced, choose
from trainer.models.undisturbed import undisturbed

TIE = 1.01  # stages within one percent of the best count as equally fast: timings vary as much


@dataclass(frozen=True)
class BlockCost:
    """One micro-batch through the block between two neighbouring cuts."""

    forward: float  # seconds
    backward: float  # seconds
    bytes: int  # sent over the cut after this block; 0 for the last
    kept: int = 0  # bytes, from the forward pass to the backward pass, without its inputs
    weights: int = 0  # bytes


def cuts_for(traced: Traced, wanted: Sequence[str], stages: int, costs: Sequence[BlockCost]) -> tuple[str, ...]:
    """The cuts of `pipeline.cuts`, where the model has them, or, where it is auto, the best for these costs."""
    if wanted != "auto":
        return choose(traced, wanted, stages)
    return tuple(traced.cuts[index] for index in balance(costs, stages))


def by_stage(traced: Traced, cuts: Sequence[str], costs: Sequence[BlockCost]) -> list[Sequence[BlockCost]]:
    """The costs of each stage's blocks."""
    bounds = [0, *(traced.cuts.index(cut) + 1 for cut in cuts), len(costs)]
    return [costs[a:b] for a, b in pairwise(bounds)]


def stage_seconds(traced: Traced, cuts: Sequence[str], costs: Sequence[BlockCost]) -> list[tuple[float, float]]:
    """Seconds of each stage, forward and backward."""
    blocks = by_stage(traced, cuts, costs)
    return [(sum(cost.forward for cost in stage), sum(cost.backward for cost in stage)) for stage in blocks]


def balance(costs: Sequence[BlockCost], stages: int) -> tuple[int, ...]:
    """Where to cut a sequence of blocks into `stages` so that the slowest stage is fastest: rising indices i of
    cuts, between the blocks i and i + 1. Raises RecipeError for fewer blocks than stages.

    Two passes of the linear-partition dynamic programme (Skiena, The Algorithm Design Manual, section 8.5): the first
    finds the fastest slowest stage, the second, among all cuts within 1 % of it, those with the fewest bytes sent.
    """
    if stages > len(costs):
        raise RecipeError(
            f"{stages} stages need {stages - 1} cuts and the model has only {len(costs) - 1} usable cuts: "
            f"lower pipeline.stages to at most {len(costs)}"
        )
    upto = [0.0, *accumulate(cost.forward + cost.backward for cost in costs)]
    blocks = range(len(costs))

    # Entry i of a list: the best way to cut the first i + 1 blocks into so many stages.
    slowest = [upto[i + 1] for i in blocks]
    for _ in range(stages - 1):
        slowest = [
            min((max(slowest[j], upto[i + 1] - upto[j + 1]) for j in range(i)), default=float("inf")) for i in blocks
        ]
    limit = slowest[-1] * TIE
    ways: list[tuple[int, float, tuple[int, ...]] | None]  # bytes, slowest stage, cuts
    ways = [(0, upto[i + 1], ()) if upto[i + 1] <= limit else None for i in blocks]
    for _ in range(stages - 1):
        ways = [
            min(
                (
                    (before[0] + costs[j].bytes, max(before[1], upto[i + 1] - upto[j + 1]), (*before[2], j))
                    for j, before in enumerate(ways[:i])
                    if before is not None and upto[i + 1] - upto[j + 1] <= limit
                ),
                default=None,
            )
            for i in blocks
        ]
    assert ways[-1] is not None  # the first pass found one
    return ways[-1][2]


def block_costs(
    traced: Traced,
    inputs: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
    repeats: int = 3,
) -> list[BlockCost]:
    """Time forward and backward of each block between neighbouring cuts, on the device the inputs are on.

    In training mode, one block after the other as in a pipeline: each gets a detached output of the one before. The
    model is not changed: neither gradients, running statistics, training flags nor the random state. It may be on
    another device: each block goes to the inputs' device and back.

    Args:
        inputs: a micro-batch (N, C, H, W). Its size matters: blocks do not scale alike.
        run: calls a module, for example under autocast.
        repeats: the median of so many, after one to warm up.
    """
    blocks = traced.stages(traced.cuts)
    rounds = []
    with undisturbed(blocks, inputs.device):
        for repeat in range(1 + repeats):
            received, costs = inputs, []
            for block in blocks:
                home = next((tensor.device for tensor in block.state_dict().values()), inputs.device)
                received, cost = _time(block.to(inputs.device).train(), received, run, weigh=repeat == 0)
                block.to(home)  # the device may be too small for the whole model
                costs.append(cost)
            rounds.append(costs)
    return [
        BlockCost(
            statistics.median(cost.forward for cost in times),
            statistics.median(cost.backward for cost in times),
            first.bytes if block is not blocks[-1] else 0,
            first.kept,
            size_of(*block.parameters()),
        )
        for block, first, times in zip(blocks, rounds[0], zip(*rounds[1:], strict=True), strict=True)
    ]


def _time(
    block: nn.Module, received: Tensor, run: Callable[[nn.Module, Tensor], Tensor], weigh: bool
) -> tuple[Tensor, BlockCost]:
    """One forward and backward; returns the output as the next block receives it. `weigh` counts saved tensors."""
    parameters = [p for p in block.parameters() if p.requires_grad]
    counting = Allocations([*block.parameters(), *block.buffers(), received]) if weigh else None
    with torch.enable_grad(), counting or nullcontext():
        start = _clock(received.device)
        out = run(block, received)
        middle = _clock(received.device)
        kept = counting.live if counting else 0
        wanted = [received, *parameters] if received.requires_grad else parameters
        if out.requires_grad:  # else this block and all before it are frozen. Changes no .grad
            torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
        end = _clock(received.device)
    sent = out.detach()
    return sent.requires_grad_(out.requires_grad), BlockCost(middle - start, end - middle, size_of(sent), kept)


def _clock(device: torch.device) -> float:
    """Seconds, after the device is synchronised."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
