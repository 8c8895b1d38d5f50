"""A plain PyTorch loop, which our speed is compared with and which tries settings.

The same network, precision and memory order, on images that are on the device already.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.devices import precision
from trainer.errors import is_out_of_memory
from trainer.models.zoo import build
from trainer.recipe.schema import ModelRecipe
from trainer.telemetry.clocks import synchronise

if TYPE_CHECKING:
    from trainer.commands.prove.prove_probe import Measurer

WARM, WINDOWS, SECONDS = 4, 5, 2.0  # steps before timing; timed parts, and what they take together, about
GAIN = 1.04  # times as many images/s that a batch twice as large has to give


def step_of(here: Measurer, batch: int, kind: str, compiled: bool) -> Callable[[bool], Any]:
    """A training step of `batch` images on this device, which exchanges gradients with the others or does not."""
    torch.manual_seed(0)
    layout, size, classes = torch.channels_last, here.task["size"], here.task["classes"]
    built = build(ModelRecipe(name=here.task["model"]), classes, 3, size)
    model: nn.Module = built.to(here.device, memory_format=layout)  # type: ignore[call-overload]
    if compiled:
        model.compile()
    if here.count > 1:
        model = DistributedDataParallel(model, device_ids=[here.device.index] if here.device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, size, size, device=here.device).to(memory_format=layout)
    labels = torch.randint(0, classes, (batch,), device=here.device)
    criterion = nn.CrossEntropyLoss()
    cast = precision.AUTOCAST.get(kind)

    def step(exchanges: bool = True) -> None:
        optimizer.zero_grad()
        with nullcontext() if exchanges or not isinstance(model, DistributedDataParallel) else model.no_sync():
            with torch.autocast(here.device.type, cast, enabled=cast is not None):
                loss = criterion(model(images), labels)
            loss.backward()
        optimizer.step()

    return step


def speeds(
    here: Measurer, batch: int, kind: str, compiled: bool, seconds: float = SECONDS
) -> tuple[list[float], list[float]]:
    """Images/s of one device in each timed part; and in parts between them in which nothing is exchanged, if ever."""
    torch.backends.cudnn.benchmark = True
    step = step_of(here, batch, kind, compiled)
    for number in range(WARM):
        step(number != 1)
    here.barrier()
    begun = time.perf_counter()
    step(True)
    here.barrier()
    once = torch.tensor(time.perf_counter() - begun, device=here.device)
    if here.count > 1:
        torch.distributed.broadcast(once, 0)
    steps = max(1, round(seconds / WINDOWS / once.item()))
    rates: dict[bool, list[float]] = {True: [], False: []}
    for exchanges in [True, False] * WINDOWS if here.count > 1 else [True] * WINDOWS:
        here.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            step(exchanges)
        synchronise([here.device])
        rates[exchanges].append(batch * steps / (time.perf_counter() - begun))
    return rates[True], rates[False]


def rate(here: Measurer) -> dict[str, Any]:
    """Images/s of one of the devices that work at once."""
    together, alone = speeds(here, here.task["batch"], here.task["precision"], here.task["compile"])
    return {"speeds": together, "alone": alone}


def settings(here: Measurer) -> dict[str, Any]:
    """The fastest precision, batch and compilation of those that are worth a try, and what was tried."""
    tried: list[dict[str, Any]] = []

    def attempt(batch: int, kind: str, compiled: bool) -> float:
        try:
            rate = statistics.median(speeds(here, batch, kind, compiled, SECONDS / 2)[0])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            rate = 0.0
        if cuda:
            torch.cuda.empty_cache()
        tried.append({"batch": batch, "precision": kind, "compile": compiled, "images_per_sec": rate})
        return rate

    cuda = here.device.type == "cuda"
    fast = cuda and torch.cuda.is_bf16_supported(False)
    kind = "bf16" if fast else "fp16" if cuda else "fp32"
    batch, most = (64, 1024) if cuda else (32, 128)
    best = attempt(batch, kind, False)
    while 2 * batch <= most and (more := attempt(2 * batch, kind, False)) >= GAIN * best:
        batch, best = 2 * batch, more
    compiled = here.task["may_compile"] and attempt(batch, kind, True) >= GAIN * best
    return {"batch": batch, "precision": kind, "compile": compiled, "tried": tried}
