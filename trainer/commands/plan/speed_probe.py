"""Measure for a plan how fast several processes of this machine compute and exchange data.

All processes compute at the same time, because a process that computes alone would be too fast:
ranks of one machine share the memory bandwidth and the caches. So there are as many processes as in
the plan, if the machine has enough cores or GPUs.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.commands.plan.forecast import Timings, count_ring_sends, list_candidates
from trainer.commands.trials.measuring import Measurer, measure_on_all
from trainer.distributed.world import World
from trainer.errors import SetupError
from trainer.launch import launching
from trainer.models.balance import BlockCost, time_blocks
from trainer.models.partition import trace
from trainer.modes import Context
from trainer.processes import resources
from trainer.processes.rank import Place
from trainer.recipe import Recipe
from trainer.recipe.layout import Layout
from trainer.telemetry.clocks import synchronise
from trainer.telemetry.readable import format_count
from trainer.training.setup import place_model, start_process

# Approximate maximum duration in seconds of a measured forward and backward pass. It limits the
# number of images in the pass.
PASS = 2.0
# Sizes in bytes of the messages that measure latency and bandwidth.
LATENCY_BYTES = 2**10
BANDWIDTH_BYTES = 2**24


def measure_here(layout: Layout, images: DatasetFacts, plugin: str | None) -> Timings:
    """Measure on this machine, in a few seconds, how fast the layout computes.

    Args:
        layout: processes and devices of the plan.
        images: size and shape of the data set.
        plugin: the user's own module, or None.

    Raises:
        SetupError: the plan is for GPUs, but this machine has no usable GPU.
        PeerError: a process failed.
    """
    recipe = layout.recipe
    available = max(1, resources.count_cores() // (recipe.threads or 1))
    if layout.kind == "cuda":
        available = resources.count_cuda_devices()
    if not available:
        raise SetupError(
            "measured=here: no CUDA device is here: leave it out, or plan devices=[cpu]"
        )
    # More than `available` processes would share cores or a GPU, and be slower than in the plan.
    count = min(layout.processes, available)
    threads = resources.choose_threads(recipe, count)
    rows = []
    if layout.staged:
        rows = sorted({-(-layout.rows // number) for number in list_candidates(layout)})
    devices = ["cpu"] * count
    if layout.kind == "cuda":
        devices = [f"cuda:{n}" for n in range(count)]
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        timings: list[Timings] = measure_on_all(
            measure,
            devices,
            threads,
            Path(folder) / "measured",
            microbatches=rows,
            recipe=recipe.replace(threads=threads, accumulate=1),
            images=images,
            most=layout.rows,
            plugin=plugin,
        )
    first = timings[0]
    processes = "one process"
    if count > 1:
        processes = f"{count} processes of {format_count(threads, 'thread')} at once"
    name = "this CPU"
    if layout.kind == "cuda":
        name = torch.cuda.get_device_name(0)
    notes = [f"computing as measured here, on {name}, {processes}; images arrive in time"]
    if count < layout.processes:
        notes.append(f"{layout.processes} devices like it, each with its own cores and memory")
    if first.bandwidth:
        notes.append(
            f"devices exchange data as fast as two processes here: {first.bandwidth / 1e9:.2g} GB/s"
        )
    blocks = {size: _average([timing.blocks[size] for timing in timings]) for size in rows}
    return replace(
        first,
        image=mean(timing.image * timing.rows for timing in timings) / first.rows,
        optimizer=mean(timing.optimizer for timing in timings),
        blocks=blocks,
        assumptions=notes,
    )


def _average(ranks: Sequence[Sequence[BlockCost]]) -> list[BlockCost]:
    """Average each block's cost over the ranks that measured it."""
    costs = []
    for same_block in zip(*ranks, strict=True):
        forward = mean(cost.forward for cost in same_block)
        backward = mean(cost.backward for cost in same_block)
        costs.append(BlockCost(forward, backward, same_block[0].bytes))
    return costs


# --- In a measuring process


def measure(
    process: Measurer,
    recipe: Recipe,
    images: DatasetFacts,
    most: int,
    microbatches: Sequence[int],
    plugin: str | None,
) -> Timings:
    """Measure passes, optimizer, blocks and communication in one of the processes.

    Args:
        process: number and device of this process, and the devices of all processes.
        recipe: recipe to measure.
        images: size and shape of the data set.
        most: maximum number of images of a pass.
        microbatches: sizes, in images, of the micro-batches to measure; empty for a mode without
            stages.
        plugin: the user's own module, or None.
    """
    launching.load_plugin(plugin)
    # The learning rate is tiny: all passes use the same images, and at a usual learning rate the
    # weights would soon overflow.
    recipe = recipe.replace(mode="single", devices="auto", schedule__min_lr=0.0, optimizer__lr=1e-9)
    start_process(recipe)
    place = Place(process.rank, process.count, process.rank, process.count)
    device = process.device
    peers = World(place, device, recipe.threads or 1, (str(device),))
    model = images.model(recipe, starting=False)
    example = images.example(min(most, 4))
    context = Context(recipe, peers, images.task(recipe), example)
    seconds, count, update, affordable = _measure_whole(context, model, most)
    blocks: dict[int, list[BlockCost]] = {}
    for rows in microbatches:
        # A micro-batch that would take too long is measured with fewer images, and the result is
        # scaled up in proportion.
        measured_rows = min(rows, affordable)
        peers.barrier()
        inputs = example.batch(device, measured_rows, recipe.channels_last).inputs
        traced = trace(model, recipe.model.name)
        costs = time_blocks(traced, inputs, context.in_precision, 3)
        scale = rows / measured_rows
        blocks[rows] = []
        for cost in costs:
            sent = round(cost.bytes * scale)
            blocks[rows].append(BlockCost(cost.forward * scale, cost.backward * scale, sent))
    bandwidth, latency = _exchange(peers, device, reduce=not microbatches)
    return Timings(seconds / count, count, update, blocks, bandwidth, latency)


def _measure_whole(
    context: Context, model: torch.nn.Module, rows: int
) -> tuple[float, int, float, int]:
    """Measure passes of the whole model.

    Returns:
        (seconds, images, update, affordable): `seconds` is the duration of a forward and backward
        pass on `images` images, and `update` is the duration of the optimizer's step. `affordable`
        is the number of images whose pass takes about PASS seconds. `images` is the smaller of
        `rows` and `affordable`.
    """
    peers = context.world
    example = context.example
    device = peers.device
    pilot = example.rows
    # Build the same objects as in training, so that the optimizer's time is measured as well.
    strategy, updater = place_model(context, model)
    strategy.train()

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        synchronise([device])
        peers.barrier()
        begun = time.perf_counter()
        result = work()
        synchronise([device])
        return result, time.perf_counter() - begun

    def measure_passes(images: int, least: int, seconds: float) -> tuple[float, float]:
        # Run at least one pass more than `least`, because the first is discarded.
        batch = example.batch(device, images, context.recipe.channels_last)
        computes: list[float] = []
        updates = []
        spent = 0.0

        while len(computes) <= least or spent < seconds:
            loss, compute = timed(partial(strategy.forward_backward, batch, 1 / images))
            _, update = timed(partial(updater.step, loss, strategy, want_norm=False))
            updater.zero_grad()
            computes.append(compute)
            updates.append(update)
            # The time of the slowest rank is used, so that all ranks stop together.
            spent += peers.max_(torch.tensor(compute + update)).item()
        # The first pass warms up.
        return median(computes[1:]), median(updates[1:])

    # A pass of a few images shows how many images fit into PASS seconds.
    alone, _ = measure_passes(pilot, 1, 0.0)
    slowest = peers.max_(torch.tensor(alone)).item()
    affordable = max(1, int(PASS * pilot / slowest))
    images = min(rows, affordable)
    seconds, update = measure_passes(images, 2, 1.0)
    return seconds, images, update, affordable


def _exchange(peers: World, device: torch.device, reduce: bool) -> tuple[float | None, float]:
    """Measure bandwidth in bytes per second, and latency in seconds, between the processes.

    Args:
        peers: the processes.
        device: device of this process.
        reduce: whether to measure a ring all-reduce. Otherwise the first two processes send a
            tensor to each other.

    Returns:
        (bandwidth, latency); (None, 0.0) for a single process.
    """
    if peers.size == 1:
        return None, 0.0
    times = {}
    for size in (LATENCY_BYTES, BANDWIDTH_BYTES):
        tensor = torch.zeros(size // 4, device=device)
        synchronise([device])
        rounds = []
        for _ in range(8):
            peers.barrier()
            begun = time.perf_counter()
            if reduce:
                peers.sum_(tensor)
            elif peers.rank < 2:
                for sender in (0, 1):
                    if peers.rank == sender:
                        dist.send(tensor, 1 - peers.rank)
                    else:
                        dist.recv(tensor, 1 - peers.rank)
            synchronise([device])
            rounds.append(time.perf_counter() - begun)
        # The first two rounds warm up.
        times[size] = median(rounds[2:])
    # A round trip sends a tensor twice.
    sends = 2
    volume = 2.0 * BANDWIDTH_BYTES
    if reduce:
        sends = 2 * (peers.size - 1)
        volume = count_ring_sends(peers.size) * BANDWIDTH_BYTES
    latency = times[LATENCY_BYTES]
    seconds = times[BANDWIDTH_BYTES] - latency
    return volume / max(1e-9, seconds), latency / sends
