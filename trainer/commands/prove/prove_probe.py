"""Functions that `prove` runs in several processes at the same time, one on each device."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.commands.trials.measuring import Measurer
from trainer.devices.precision import AUTOCAST, autocast
from trainer.models.zoo import build
from trainer.recipe import ModelRecipe
from trainer.saving.files import Json
from trainer.telemetry.clocks import synchronise
from trainer.telemetry.flops import look_up_peak_flops

# Numbers of elements of a pattern: one, an odd number, and more than the buffer of a message.
SIZES = (1, 1023, 2**20 + 3)
# Number of rounds of `rates`; `links` has twice as many. The first round warms up and is discarded.
ROUNDS = 4
# Number of steps of the bare loop before timing, number of timed windows, and approximate seconds
# of all windows together.
WARM = 4
WINDOWS = 5
SECONDS = 2.0
# Exclusive upper bound, by dtype, of the sum of the patterns of all ranks. The dtype represents all
# integers below it exactly, so the sums are exact. `make_pattern` uses 2**22 for other dtypes.
MOST = {torch.uint8: 256, torch.bfloat16: 256, torch.float16: 2048}


def doctor(measurer: Measurer) -> Json:
    """Run `doctor` in this process. The end of the process frees the GPU memory that it uses."""
    from trainer.commands.doctor import examine

    return {"problems": examine().problems}


def list_types(device: torch.device) -> list[torch.dtype]:
    exact = [torch.uint8, torch.int32, torch.int64, torch.float32]
    if device.type == "cuda":
        return [*exact, torch.float16, torch.bfloat16]
    return exact


def make_pattern(size: int, dtype: torch.dtype, rank: int, ranks: int) -> Tensor:
    """Return whole numbers that differ between adjacent elements and between ranks.

    Sums of these patterns over `ranks` ranks are exact in every type, so a comparison detects a
    lost, doubled or shifted element.
    """
    modulus = max(2, MOST.get(dtype, 2**22) // ranks - 1)
    numbers = torch.arange(size) * (rank + 1) + 17 * rank + 1
    return (numbers % modulus).to(dtype)


def compare(actual: Tensor, expected: Tensor, what: str, errors: list[str]) -> int:
    """Compare two tensors, and append a sentence to `errors` if they differ.

    Returns:
        1, the number of comparisons, for the caller to sum.
    """
    actual = actual.cpu()
    if not torch.equal(actual, expected):
        index = int((actual != expected).nonzero()[0])
        errors.append(
            f"{what}, {len(expected):,} of {str(expected.dtype).removeprefix('torch.')}: element "
            f"{index:,} is {actual[index].item():g}, not {expected[index].item():g}"
        )
    return 1


def copies(measurer: Measurer) -> Json:
    """Send patterns between every pair of processes in both directions, and check what arrives.

    Copies between GPUs within one process are checked by `doctor`.

    Returns:
        "done": number of comparisons in this process; "wrong": a sentence for each that failed.
    """
    names = measurer.devices
    count = 0
    errors = list[str]()
    for number, (source, target) in enumerate(permutations(range(measurer.count), 2)):
        what = f"{names[source]} to {names[target]}, by message"
        for dtype in list_types(measurer.device):
            for size in SIZES:
                expected = make_pattern(size, dtype, number, 1)
                measurer.barrier()
                if measurer.rank == source:
                    dist.send(expected.to(measurer.device), target)
                elif measurer.rank == target:
                    # The buffer starts with wrong values, so a missing element is detected.
                    received = (expected + 1).to(measurer.device)
                    dist.recv(received, source)
                    count += compare(received, expected, what, errors)
    return {"done": count, "wrong": errors}


def sums(measurer: Measurer) -> Json:
    """Sum patterns over all processes with an all-reduce, and check the sums.

    Returns:
        "done": number of comparisons in this process; "wrong": a sentence for each that failed.
    """
    count = 0
    errors = list[str]()
    what = f"on {measurer.devices[measurer.rank]}"
    for dtype in list_types(measurer.device):
        for size in SIZES:
            patterns = [
                make_pattern(size, dtype, rank, measurer.count) for rank in range(measurer.count)
            ]
            total = patterns[measurer.rank].clone().to(measurer.device)
            dist.all_reduce(total)
            expected = torch.stack(patterns).double().sum(0).to(dtype)
            count += compare(total, expected, what, errors)
    return {"done": count, "wrong": errors}


def rates(measurer: Measurer) -> Json:
    """Measure FLOP/s of matrix products and bytes/s of copies within the device.

    The devices take turns, so that each is measured alone, several times.

    Returns:
        "product" and "memory": successive rates; "precision" of the matrix products;
        "product_limit": published FLOP/s of this device, or None.
    """
    device = measurer.device
    precision = "fp32"
    side = 512
    block = 2**26
    seconds = 0.15
    if device.type == "cuda":
        precision = "bf16" if torch.cuda.is_bf16_supported(False) else "fp16"
        side = 8192
        block = 2**29
        seconds = 0.6
    matrix = torch.randn(side, side, device=device).to(AUTOCAST.get(precision, torch.float32))
    out = torch.empty_like(matrix)
    source = torch.zeros(block, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # An amount is a number of floating-point operations, or of bytes read and written.
    works = {
        "product": (lambda: torch.mm(matrix, matrix, out=out), 2.0 * side**3),
        "memory": (lambda: target.copy_(source), 2.0 * block),
    }
    measured: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS):
        for rank in range(measurer.count):
            measurer.barrier()
            if measurer.rank != rank:
                continue
            for name, (work, amount) in works.items():
                times = max(1, round(seconds / measurer.seconds(work)))
                rate = amount * times / measurer.seconds(work, times)
                if turn > 0:
                    measured[name].append(rate)
    measurer.barrier()
    return {
        **measured,
        "precision": precision,
        "product_limit": look_up_peak_flops(device, precision),
    }


def links(measurer: Measurer) -> Json:
    """Measure the bytes/s of messages between all pairs of devices, and of an all-reduce.

    The rate of an all-reduce counts the bytes that each device sends in a ring.

    Returns:
        "ways": successive rates of the messages to this process, by the ranks of the sender and the
        receiver, as in "0 to 1"; "all_reduce": successive rates of the all-reduce.
    """
    size = 2**27 if measurer.device.type == "cuda" else 2**23
    block = torch.zeros(size // 4, device=measurer.device)
    ways: dict[str, list[float]] = {}
    all_reduce = []
    for turn in range(2 * ROUNDS):
        for source, target in permutations(range(measurer.count), 2):
            measurer.barrier()
            begun = time.perf_counter()
            if measurer.rank == source:
                dist.send(block, target)
            elif measurer.rank == target:
                dist.recv(block, source)
                synchronise([measurer.device])
                rate = size / (time.perf_counter() - begun)
                if turn > 0:
                    ways.setdefault(f"{source} to {target}", []).append(rate)
        measurer.barrier()
        begun = time.perf_counter()
        dist.all_reduce(block)
        synchronise([measurer.device])
        # Each device of a ring sends this number of bytes.
        wire = 2 * (measurer.count - 1) / measurer.count * size
        if turn > 0:
            all_reduce.append(wire / (time.perf_counter() - begun))
    return {"ways": ways, "all_reduce": all_reduce}


# --- A bare PyTorch loop, which is the reference for the speed of a run


def step_of(
    measurer: Measurer, batch: int, model: str, size: int, classes: int, precision: str
) -> Callable[[bool], Any]:
    """Return a function that trains one step on a fixed batch of images on this device.

    Network, batch, precision and memory format are those of the run that is compared with the bare
    loop. The argument of the returned function says whether the step exchanges gradients with the
    other processes.
    """
    torch.manual_seed(0)
    device = measurer.device
    layout = torch.channels_last
    built = build(ModelRecipe(name=model), classes, 3, size)
    net = built.to(device, memory_format=layout)  # type: ignore[call-overload]
    if measurer.count > 1:
        device_ids = None
        if device.type == "cuda":
            device_ids = [device.index]
        net = DistributedDataParallel(net, device_ids=device_ids)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=layout)
    labels = torch.randint(0, classes, (batch,), device=device)
    criterion = nn.CrossEntropyLoss()

    def step(exchanges: bool) -> None:
        optimizer.zero_grad()
        context: AbstractContextManager[None] = nullcontext()
        if not exchanges and isinstance(net, DistributedDataParallel):
            context = net.no_sync()
        with context:
            with autocast(device, precision):
                loss = criterion(net(images), labels)
            loss.backward()
        optimizer.step()

    return step


def bare(measurer: Measurer, batch: int, **network: Any) -> Json:
    """Measure the images/s of this device in the bare loop.

    Returns:
        "speeds": images/s of each window whose steps exchange gradients. With one process, no step
        exchanges gradients, and this is every window.
        "alone": images/s of each window whose steps do not exchange gradients. With one process,
        it is empty.
    """
    torch.backends.cudnn.benchmark = True
    step = step_of(measurer, batch, **network)
    for number in range(WARM):
        # The step without an exchange is warmed up as well.
        step(number != 1)
    measurer.barrier()
    begun = time.perf_counter()
    step(True)
    measurer.barrier()
    once = torch.tensor(time.perf_counter() - begun, device=measurer.device)
    # Rank 0's time determines the number of steps of all processes: if the numbers differed, an
    # exchange would hang.
    if measurer.count > 1:
        dist.broadcast(once, 0)
    steps = max(1, round(SECONDS / WINDOWS / once.item()))
    rates: dict[bool, list[float]] = {True: [], False: []}
    kinds = [True, False] if measurer.count > 1 else [True]
    for exchanges in kinds * WINDOWS:
        measurer.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            step(exchanges)
        synchronise([measurer.device])
        rates[exchanges].append(batch * steps / (time.perf_counter() - begun))
    return {"speeds": rates[True], "alone": rates[False]}
