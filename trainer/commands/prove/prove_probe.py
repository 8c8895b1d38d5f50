"""What each of the processes that measure at once does; and a plugin of the runs that count each held-out image."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.commands.trials.measuring import Measurer
from trainer.data import register_dataset
from trainer.devices.precision import AUTOCAST
from trainer.models.zoo import build, register_model
from trainer.recipe import DataRecipe
from trainer.recipe.image_sizes import ImageSize, sides
from trainer.recipe.schema import ModelRecipe
from trainer.telemetry.clocks import synchronise
from trainer.telemetry.flops import peak_flops

SIZES = (1, 1023, 2**20 + 3)  # elements: one, an odd few, and more than a message's buffer
ROUNDS = 4  # of which the first warms up
RUNS, SETTLING = 5, 2  # in one program; the first allocate what is allocated once
WARM, WINDOWS, SECONDS = 4, 5, 2.0  # steps of the bare loop before timing; timed parts, and what they take, about
NAME, COUNT, TRAINING = "numbered", 83, 4096  # of held-out images a prime: no number of shards divides it
MOST = {torch.uint8: 256, torch.bfloat16: 256, torch.float16: 2048}  # up to which whole numbers are exact
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def doctor(here: Measurer) -> dict[str, Any]:
    """In a process that ends: what it does on the cards holds no memory there afterwards."""
    from trainer.commands.doctor import examine

    return {"problems": examine().problems}


def types(device: torch.device) -> list[torch.dtype]:
    exact = [torch.uint8, torch.int32, torch.int64, torch.float32]
    return [*exact, torch.float16, torch.bfloat16] if device.type == "cuda" else exact


def pattern(size: int, dtype: torch.dtype, rank: int, ranks: int) -> Tensor:
    """Whole numbers that tell an element from its neighbours, and a rank from the others.

    Sums over `ranks` of them are exact in every type, so that a lost, doubled or shifted element shows.
    """
    modulus = max(2, MOST.get(dtype, 2**22) // ranks - 1)
    return ((torch.arange(size) * (rank + 1) + 17 * rank + 1) % modulus).to(dtype)


def compare(actual: Tensor, expected: Tensor, what: str, bad: list[str]) -> int:
    """1, for one more that was compared; a sentence in `bad` where it is wrong."""
    actual = actual.cpu()
    if not torch.equal(actual, expected):
        n, dtype = int((actual != expected).nonzero()[0]), str(expected.dtype).removeprefix("torch.")
        values = f"element {n:,} is {actual[n].item():g}, not {expected[n].item():g}"
        bad.append(f"{what}, {len(expected):,} of {dtype}: {values}")
    return 1


def copies(here: Measurer) -> dict[str, Any]:
    """Every pair, both ways, from process to process; cards also directly, within the first process."""
    names, done, bad = here.devices, 0, list[str]()
    for number, (source, target) in enumerate(permutations(range(here.count), 2)):
        for dtype in types(here.device):
            for size in SIZES:
                sent = pattern(size, dtype, number, 1)
                here.barrier()
                if here.rank == source:
                    dist.send(sent.to(here.device), target)
                elif here.rank == target:
                    received = (sent + 1).to(here.device)
                    dist.recv(received, source)
                    done += compare(received, sent, f"{names[source]} to {names[target]}, by message", bad)
                if here.device.type == "cuda" and here.rank == 0:
                    received = (sent + 1).to(names[target])
                    received.copy_(sent.to(names[source]), non_blocking=True)
                    done += compare(received, sent, f"{names[source]} to {names[target]}", bad)
    return {"done": done, "wrong": bad}


def sums(here: Measurer) -> dict[str, Any]:
    done, bad = 0, list[str]()
    for dtype in types(here.device):
        for size in SIZES:
            parts = [pattern(size, dtype, rank, here.count) for rank in range(here.count)]
            total = parts[here.rank].clone().to(here.device)
            dist.all_reduce(total)
            expected = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
            done += compare(total, expected, f"on {here.devices[here.rank]}", bad)
    return {"done": done, "wrong": bad}


def rates(here: Measurer) -> dict[str, Any]:
    """FLOP/s of matrix products and bytes/s of copies within the device, each device alone, in turn, several times."""
    cuda = here.device.type == "cuda"
    bf16 = cuda and torch.cuda.is_bf16_supported(False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if cuda else torch.float32
    side, block, seconds = (8192, 2**29, 0.6) if cuda else (512, 2**26, 0.15)
    matrix = torch.randn(side, side, device=here.device).to(dtype)
    out = torch.empty_like(matrix)
    source = torch.zeros(block, dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    works: dict[str, tuple[Callable[[], Any], float]] = {
        "product": (lambda: torch.mm(matrix, matrix, out=out), 2.0 * side**3),
        "memory": (lambda: target.copy_(source), 2.0 * block),
    }
    measured: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS):
        for rank in range(here.count):
            here.barrier()
            if here.rank != rank:
                continue
            for name, (work, amount) in works.items():
                times = max(1, round(seconds / here.seconds(work)))
                measured[name] += [amount * times / here.seconds(work, times)] * (turn > 0)
    here.barrier()
    precision = PRECISIONS[dtype]
    return {**measured, "precision": precision, "product_limit": peak_flops(here.device, precision)}


def links(here: Measurer) -> dict[str, Any]:
    """Bytes/s of each way between two devices, as its receiver sees it, and of an all-reduce, as its busiest wire."""
    size = 2**27 if here.device.type == "cuda" else 2**23
    block = torch.zeros(size // 4, device=here.device)
    ways: dict[str, list[float]] = {}
    together: list[float] = []
    for turn in range(2 * ROUNDS):
        for source, target in permutations(range(here.count), 2):
            here.barrier()
            begun = time.perf_counter()
            if here.rank == source:
                dist.send(block, target)
            elif here.rank == target:
                dist.recv(block, source)
                synchronise([here.device])
                rate = size / (time.perf_counter() - begun)
                ways.setdefault(f"{source} to {target}", []).extend([rate] * (turn > 0))
        here.barrier()
        begun = time.perf_counter()
        dist.all_reduce(block)
        synchronise([here.device])
        wire = 2 * (here.count - 1) / here.count * size
        together += [wire / (time.perf_counter() - begun)] * (turn > 0)
    return {"ways": ways, "all_reduce": together}


def memory(here: Measurer, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """Bytes of this process and of its device after each run in it, but for the first."""
    from trainer.training.api import train

    cuda, sizes = here.device.type == "cuda", list[dict[str, int]]()
    for number in range(RUNS):
        train(recipe, *words, output=str(here.folder / f"run-{number}"))
        gc.collect()
        host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        sizes.append({"host": host, **({"device": torch.cuda.memory_allocated(here.device)} if cuda else {})})
    return {kind: [row[kind] for row in sizes[SETTLING:]] for kind in sizes[0]}


# --- a plain PyTorch loop, which our speed is compared with -----------------------------------------------------------


def step_of(here: Measurer, batch: int, model: str, size: int, classes: int, precision: str) -> Callable[[bool], Any]:
    """A training step on images that are on this device, which exchanges gradients with the others or does not.

    Network, batch, precision and memory order are those of our own run.
    """
    torch.manual_seed(0)
    layout, cast = torch.channels_last, AUTOCAST.get(precision)
    built = build(ModelRecipe(name=model), classes, 3, size)
    net: nn.Module = built.to(here.device, memory_format=layout)  # type: ignore[call-overload]
    if here.count > 1:
        net = DistributedDataParallel(net, device_ids=[here.device.index] if here.device.type == "cuda" else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, size, size, device=here.device).to(memory_format=layout)
    labels = torch.randint(0, classes, (batch,), device=here.device)
    criterion = nn.CrossEntropyLoss()

    def step(exchanges: bool = True) -> None:
        optimizer.zero_grad()
        with nullcontext() if exchanges or not isinstance(net, DistributedDataParallel) else net.no_sync():
            with torch.autocast(here.device.type, cast, enabled=cast is not None):
                loss = criterion(net(images), labels)
            loss.backward()
        optimizer.step()

    return step


def bare(here: Measurer, batch: int, **network: Any) -> dict[str, Any]:
    """Images/s of one of the devices that work at once in each timed part, and "alone" in parts between them in which
    nothing is exchanged."""
    torch.backends.cudnn.benchmark = True
    step = step_of(here, batch, **network)
    for number in range(WARM):
        step(number != 1)
    here.barrier()
    begun = time.perf_counter()
    step(True)
    here.barrier()
    once = torch.tensor(time.perf_counter() - begun, device=here.device)
    if here.count > 1:
        dist.broadcast(once, 0)
    steps = max(1, round(SECONDS / WINDOWS / once.item()))
    rates: dict[bool, list[float]] = {True: [], False: []}
    for exchanges in [True, False] * WINDOWS if here.count > 1 else [True] * WINDOWS:
        here.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            step(exchanges)
        synchronise([here.device])
        rates[exchanges].append(batch * steps / (time.perf_counter() - begun))
    return {"speeds": rates[True], "alone": rates[False]}


# --- whether every held-out image is counted once: image n has the target n -------------------------------------------
# The model answers 0, so that the mean error is the mean of the numbers, and the squares show which were missed and
# counted twice instead.


@register_dataset(NAME)
def numbered(data: DataRecipe) -> Any:
    """(train, val, names)."""

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 1, 4, 4, dtype=torch.uint8), torch.arange(1.0, count + 1)[:, None]

    return part(TRAINING), part(COUNT), ["number"]


@register_model("zeros")
def zeros(num_classes: int, channels: int, image_size: ImageSize) -> nn.Module:
    """Layers enough to be cut in two, the last of which gives zeros."""
    last = nn.Linear(4, num_classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    first = nn.Linear(channels * math.prod(sides(image_size)), 4)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), last)
