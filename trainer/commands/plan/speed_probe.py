"""A short measurement here: as many processes as would work side by side compute at once, and exchange.

Processes that compute alone would be too fast: ranks of one machine share its memory's bandwidth and its caches.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from trainer import modes
from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.commands.plan.forecast import Timings, candidates, ring
from trainer.commands.plan.planned_layout import Layout
from trainer.commands.trials.measuring import Measurer, answers
from trainer.errors import SetupError
from trainer.launch import launching
from trainer.models.balance import BlockCost, block_costs
from trainer.models.partition import trace
from trainer.modes import Context
from trainer.processes import resources
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.telemetry.clocks import synchronise
from trainer.training.setup import start_process, wire

PASS = 2.0  # seconds that one forward and backward pass may take, about
LATENCY_BYTES, BANDWIDTH_BYTES = 2**10, 2**24


def here(layout: Layout, images: DatasetFacts, plugin: str | None = None) -> Timings:
    """Measure the layout's computing on this machine, in a few seconds. Raises SetupError, PeerError."""
    most = max(1, resources.cores() // (layout.recipe.threads or 1))
    most = resources.cuda_count() if layout.kind == "cuda" else most
    if not most:
        raise SetupError("measured=here: no CUDA device is here: leave it out, or plan devices=[cpu]")
    count = min(layout.processes, most)
    threads = resources.threads_per_process(layout.recipe, count)
    rows = sorted({-(-layout.rows // m) for m in candidates(layout)}) if layout.staged else []
    chosen = layout.recipe.replace(threads=threads, accumulate=1)
    task: dict[str, Any] = {"recipe": chosen, "images": images, "most": layout.rows, "plugin": plugin}
    devices = [f"cuda:{n}" for n in range(count)] if layout.kind == "cuda" else ["cpu"] * count
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        home = Path(folder) / "measured"
        found: list[Timings] = answers(measure, devices, threads, home, microbatches=rows, **task)
    first = found[0]
    beside = f"{count} processes of {threads} thread{'s' * (threads > 1)} at once" if count > 1 else "one process"
    name = torch.cuda.get_device_name(0) if layout.kind == "cuda" else "this CPU"
    notes = [f"computing as measured here, on {name}, {beside}; images arrive in time"]
    if count < layout.processes:
        notes.append(f"{layout.processes} devices like it, each with its own cores and memory")
    if first.bandwidth:
        notes.append(f"devices exchange data as fast as two processes here: {first.bandwidth / 1e9:.2g} GB/s")
    return replace(
        first,
        image=mean(answer.image * answer.rows for answer in found) / first.rows,
        optimizer=mean(answer.optimizer for answer in found),
        blocks={size: _mean([answer.blocks[size] for answer in found]) for size in rows},
        assumptions=tuple(notes),
    )


def _mean(ranks: Sequence[Sequence[BlockCost]]) -> list[BlockCost]:
    """Each block's cost over the ranks that measured it."""
    return [
        BlockCost(mean(c.forward for c in same), mean(c.backward for c in same), same[0].bytes)
        for same in zip(*ranks, strict=True)
    ]


# --- in a measuring process -------------------------------------------------------------------------------------------


def measure(
    process: Measurer, recipe: Recipe, images: DatasetFacts, most: int, microbatches: Sequence[int], plugin: str | None
) -> Timings:
    """What one of the processes measures, in passes of `most` images and in micro-batches, none without stages."""
    launching.load_plugin(plugin)
    chosen = recipe.replace(mode="single", devices="auto", schedule__min_lr=0.0)
    chosen = chosen.replace(optimizer__lr=1e-9)  # the same images again and again would soon make odd numbers
    start_process(chosen)
    place, device = Place(process.rank, process.count, process.rank, process.count), process.device
    peers = World(place, device, chosen.threads or 1, (str(device),))
    model = images.model(chosen, starting=False)
    example = images.example(min(most, 4))
    context = Context(chosen, peers, images.task(chosen), example)
    seconds, count, update, affordable = _whole(context, model, most)
    blocks: dict[int, list[BlockCost]] = {}
    for rows in microbatches:
        few = min(rows, affordable)
        peers.barrier()
        inputs = example.random(device, few, chosen.channels_last)
        costs = block_costs(trace(model, chosen.model.name), inputs, modes.create(context).in_precision, 3)
        scale = rows / few
        blocks[rows] = [BlockCost(c.forward * scale, c.backward * scale, round(c.bytes * scale)) for c in costs]
    bandwidth, latency = _exchange(peers, device, reduce=not microbatches)
    return Timings(seconds / count, count, update, 0.0, blocks, bandwidth, latency)


def _whole(context: Context, model: torch.nn.Module, rows: int) -> tuple[float, int, float, int]:
    """Seconds of the whole model's pass, its images, as many as take about PASS seconds, seconds of the optimizer's
    part, and how many images would take PASS seconds."""
    peers, example = context.world, context.example
    device, pilot = peers.device, example.rows
    strategy, updater = wire(context, model)
    strategy.train()

    def timed(work: Callable[[], Any]) -> float:
        synchronise([device])
        peers.barrier()
        begun = time.perf_counter()
        work()
        synchronise([device])
        return time.perf_counter() - begun

    def passes(images: int, least: int, seconds: float) -> tuple[float, float]:
        inputs = example.random(device, images, context.recipe.channels_last)
        batch = replace(example.zeros(device, images), inputs=inputs)
        times: list[tuple[float, float]] = []
        spent = 0.0
        while len(times) <= least or spent < seconds:
            losses: list[torch.Tensor] = []
            compute = timed(lambda: losses.append(strategy.forward_backward(batch, 1 / images)))  # noqa: B023
            update = timed(lambda: updater.step(losses[0], strategy, want_norm=False))  # noqa: B023
            updater.optimizer.zero_grad()
            times.append((compute, update))
            spent += peers.max_(torch.tensor(compute + update)).item()  # all ranks stop together
        return median(t for t, _ in times[1:]), median(t for _, t in times[1:])

    alone, _ = passes(pilot, 1, 0.0)
    slowest = peers.max_(torch.tensor(alone)).item()
    affordable = max(1, int(PASS * pilot / slowest))
    images = min(rows, affordable)
    seconds, update = passes(images, 2, 1.0)
    return seconds, images, update, affordable


def _exchange(peers: World, device: torch.device, reduce: bool) -> tuple[float | None, float]:
    """Bytes a second, and seconds before the first: from one process to the next and back, or of a ring all-reduce."""
    if peers.size == 1:
        return None, 0.0
    times = {}
    for size in (LATENCY_BYTES, BANDWIDTH_BYTES):
        sent = torch.zeros(size // 4, device=device)
        synchronise([device])
        rounds = []
        for _ in range(8):
            peers.barrier()
            begun = time.perf_counter()
            if reduce:
                peers.sum_(sent)
            elif peers.rank < 2:
                for turn in (0, 1):
                    (dist.send if peers.rank == turn else dist.recv)(sent, 1 - peers.rank)
            synchronise([device])
            rounds.append(time.perf_counter() - begun)
        times[size] = median(rounds[2:])
    latency, seconds = times[LATENCY_BYTES], times[BANDWIDTH_BYTES] - times[LATENCY_BYTES]
    sends, times_sent = (2 * (peers.size - 1), ring(peers.size)) if reduce else (2, 2.0)
    return times_sent * BANDWIDTH_BYTES / max(1e-9, seconds), latency / sends
