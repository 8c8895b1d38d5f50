"""A short measurement here: as many processes as would work side by side compute at once, and exchange.

Processes that compute alone would be too fast: ranks of one machine share its memory's bandwidth and its caches.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from trainer import modes, recipe
from trainer.commands.plan import schedules
from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.commands.plan.measured import Timings, ring
from trainer.commands.plan.planned_layout import Layout
from trainer.devices.precision import set_precision
from trainer.errors import PeerError, SetupError
from trainer.launch import launching
from trainer.models.balance import BlockCost, block_costs
from trainer.models.partition import trace
from trainer.modes import Context
from trainer.processes import children, family, world
from trainer.processes.allocation import keep_freed_memory
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.telemetry.clocks import synchronise
from trainer.training.wiring import wire

PASS = 2.0  # seconds that one forward and backward pass may take, about
LATENCY_BYTES, BANDWIDTH_BYTES = 2**10, 2**24


class _Task(TypedDict):
    """What the measuring processes read."""

    recipe: dict[str, Any]
    kind: str  # cpu or cuda
    images: str  # pickled, in hexadecimal digits
    rows: int
    microbatches: list[int]  # images of each; empty without stages
    plugin: str | None
    count: int  # of processes


class _Passes(TypedDict):
    """Seconds of a pass of `rows` images and of the optimizer's part; each block's cost by a micro-batch's images."""

    seconds: float
    rows: int
    optimizer: float
    affordable: int
    blocks: dict[str, list[tuple[float, float, int]]]


class _Link(TypedDict):
    """Bytes a second between two devices, and seconds before the first."""

    bandwidth: float | None
    latency: float


class _Answer(_Passes, _Link):
    """What a measuring process writes."""


class _Failure(TypedDict):
    """What it writes where it cannot measure, in one line."""

    error: str


def here(layout: Layout, images: DatasetFacts, plugin: str | None = None) -> Timings:
    """Measure the layout's computing on this machine, in a few seconds.

    Raises:
        SetupError: its devices are not here.
        PeerError: a measuring process failed; the line is its own.
    """
    count, threads = _at_once(layout)
    rows = sorted({-(-layout.rows // m) for m in schedules.candidates(layout)}) if layout.staged else []
    task: _Task = {
        "recipe": layout.recipe.replace(threads=threads, accumulate=1).to_dict(),
        "kind": layout.kind,
        "images": pickle.dumps(images).hex(),
        "rows": layout.rows,
        "microbatches": rows,
        "plugin": plugin,
        "count": count,
    }
    answers = _run(task)
    blocks = {size: _mean([answer["blocks"][str(size)] for answer in answers]) for size in rows}
    first = answers[0]
    beside = f"{count} processes of {threads} thread{'s' * (threads > 1)} at once" if count > 1 else "one process"
    name = torch.cuda.get_device_name(0) if layout.kind == "cuda" else "this CPU"
    notes = [f"computing as measured here, on {name}, {beside}; images arrive in time"]
    if count < layout.processes:
        notes.append(f"{layout.processes} devices like it, each with cores and memory of its own")
    if first["bandwidth"]:
        notes.append(f"devices exchange as two processes here: {first['bandwidth'] / 1e9:.2g} GB/s")
    return Timings(
        statistics.mean(a["seconds"] for a in answers) / first["rows"],
        first["rows"],
        statistics.mean(a["optimizer"] for a in answers),
        blocks=blocks,
        bandwidth=first["bandwidth"],
        latency=first["latency"],
        assumptions=tuple(notes),
    )


def _mean(ranks: Sequence[Sequence[Sequence[float]]]) -> list[BlockCost]:
    """Each block's cost over the ranks that measured it."""
    blocks = zip(*ranks, strict=True)
    means = ([statistics.mean(values) for values in zip(*block, strict=True)] for block in blocks)
    return [BlockCost(forward, backward, round(size)) for forward, backward, size in means]


def _at_once(layout: Layout) -> tuple[int, int]:
    """How many of the planned processes this machine can run as they would run, and the threads of each."""
    if layout.kind == "cuda":
        cards = world.cuda_count()
        if not cards:
            raise SetupError(
                "measured=here: no CUDA device is here; give a run of such a device, measured=runs/x, or devices=[cpu]"
            )
        count = min(layout.processes, cards)
        return count, world.threads_per_process(layout.recipe, count)
    count = min(layout.processes, max(1, world.cores() // (layout.recipe.threads or 1)))
    return count, world.threads_per_process(layout.recipe, count)


def _run(task: _Task) -> list[_Answer]:
    """Start the measuring processes, and wait for their answers."""
    count = task["count"]
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        path = Path(folder)
        (path / "task.json").write_text(json.dumps(task))
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "trainer.commands.plan.speed_probe", folder]
        with ExitStack() as all_end:
            started = [
                all_end.enter_context(
                    children.started([*command, str(rank)], environment=environment, stdin=subprocess.DEVNULL)
                )
                for rank in range(count)
            ]
            while any(child.poll() is None for child in started) and not any(child.poll() for child in started):
                time.sleep(0.02)
        found = [path / f"{rank}.json" for rank in range(count)]
        answers = [json.loads(file.read_text()) for file in found if file.exists()]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors or len(answers) < count:
        raise PeerError(f"measured=here failed: {errors[0] if errors else 'a measuring process died'}")
    return answers


# --- in a measuring process -------------------------------------------------------------------------------------------


def main(folder: Path, rank: int) -> None:
    """Measure, and leave the answer, or the line of what went wrong, where `_run` looks for it."""
    family.die_with_parent()
    answer: _Answer | _Failure
    try:
        answer = _measure(json.loads((folder / "task.json").read_text()), folder, rank)
    except Exception as error:
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    os._exit("error" in answer)  # as any rank: gloo's threads may outlive the interpreter


def _measure(task: _Task, folder: Path, rank: int) -> _Answer:
    launching.load_plugin(task["plugin"])
    keep_freed_memory()
    chosen = recipe.load(task["recipe"]).replace(mode="single", devices="auto", schedule__min_lr=0.0)
    chosen = chosen.replace(optimizer__lr=1e-9)  # the same images again and again would soon make odd numbers
    device = torch.device(f"cuda:{rank}" if task["kind"] == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(chosen.threads or 1)
    set_precision(chosen.precision)
    torch.backends.cudnn.benchmark = not chosen.deterministic  # as training does
    if task["count"] > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=task["count"])
    place = Place(rank, task["count"], rank, task["count"])
    peers = World(place, device, chosen.threads or 1, (str(device),))
    images: DatasetFacts = pickle.loads(bytes.fromhex(task["images"]))
    model = images.model(chosen, starting=False)
    example = images.example(min(task["rows"], 4))
    context = Context(chosen, peers, images.task(chosen), example)
    answer = _whole(context, model, task["rows"])
    strategy = modes.create(context)
    if task["microbatches"]:
        traced = trace(model, chosen.model.name)
        for rows in task["microbatches"]:
            few = min(rows, answer["affordable"])
            peers.barrier()
            inputs = example.random(device, few, chosen.channels_last)
            costs = block_costs(traced, inputs, strategy.in_precision, 3)
            scale = rows / few
            listed = [(c.forward * scale, c.backward * scale, round(c.bytes * scale)) for c in costs]
            answer["blocks"][str(rows)] = listed
    return {**answer, **_exchange(peers, device, reduce=not task["microbatches"])}


def _whole(context: Context, model: torch.nn.Module, rows: int) -> _Passes:
    """Seconds of the whole model's pass, of as many images as take about PASS seconds, and of the optimizer's part."""
    peers, example = context.world, context.example
    device, pilot = peers.device, example.rows
    strategy, optimizer, updater = wire(context, model)
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
            optimizer.zero_grad()
            times.append((compute, update))
            spent += peers.max_(torch.tensor(compute + update)).item()  # all ranks stop together
        return statistics.median(t for t, _ in times[1:]), statistics.median(t for _, t in times[1:])

    alone, _ = passes(pilot, 1, 0.0)
    slowest = peers.max_(torch.tensor(alone)).item()
    affordable = max(1, int(PASS * pilot / slowest))
    images = min(rows, affordable)
    seconds, update = passes(images, 2, 1.0)
    return {"seconds": seconds, "rows": images, "optimizer": update, "affordable": affordable, "blocks": {}}


def _exchange(peers: World, device: torch.device, reduce: bool) -> _Link:
    """Bytes a second, and seconds before the first: from one process to the next and back, or of a ring all-reduce."""
    if peers.size == 1:
        return {"bandwidth": None, "latency": 0.0}
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
        times[size] = statistics.median(rounds[2:])
    latency, seconds = times[LATENCY_BYTES], times[BANDWIDTH_BYTES] - times[LATENCY_BYTES]
    sends, share = (2 * (peers.size - 1), ring(peers.size)) if reduce else (2, 2.0)
    return {"bandwidth": share * BANDWIDTH_BYTES / max(1e-9, seconds), "latency": latency / sends}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
