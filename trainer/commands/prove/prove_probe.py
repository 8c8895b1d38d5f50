"""A measuring process: `python -m trainer.commands.prove.prove_probe WHAT FOLDER RANK` leaves its answer in FOLDER."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.devices.precision import set_precision
from trainer.errors import in_one_line
from trainer.processes import family
from trainer.telemetry.clocks import synchronise
from trainer.telemetry.flops import peak_flops

SIZES = (1, 1023, 2**20 + 3)  # elements: one, an odd few, and more than a message's buffer
ROUNDS = 4  # of which the first warms up


@dataclass(frozen=True)
class Measurer:
    """This process among those that measure at once."""

    asked: dict[str, Any]
    folder: Path
    rank: int
    count: int
    device: torch.device

    def alone(self, rank: int) -> bool:
        """Whether it is this process's turn; the others wait until all have met again."""
        self.meet()
        return self.rank == rank

    def meet(self) -> None:
        synchronise([self.device])
        if self.count > 1:
            dist.all_reduce(torch.zeros(1))  # over gloo, on the CPU

    def seconds(self, work: Callable[[], Any]) -> float:
        """What `work` takes; on the CPU without what other programs take meanwhile."""
        clock = (
            time.perf_counter if self.device.type == "cuda" else lambda: time.process_time() / torch.get_num_threads()
        )
        synchronise([self.device])
        begun = clock()
        work()
        synchronise([self.device])
        return max(clock() - begun, 1e-9)


def main(what: str, folder: Path, rank: int) -> None:
    family.die_with_parent()
    try:
        asked = json.loads((folder / "asked.json").read_text())
        answer = _functions()[what](_here(asked, folder, rank))
    except Exception as error:
        answer = {"error": in_one_line(error)[0]}
    draft = folder / f".{rank}.json"
    draft.write_text(json.dumps(answer))
    draft.rename(folder / f"{rank}.json")
    sys.stdout.flush()
    os._exit("error" in answer)  # gloo's threads may outlive the interpreter


def _functions() -> dict[str, Callable[[Measurer], dict[str, Any]]]:
    from trainer.commands.prove import bare_loop, file_speed

    own = {"doctor": doctor, "copies": copies, "sums": sums, "rates": rates, "links": links, "memory": memory}
    own |= {"settings": bare_loop.settings, "bare": bare_loop.rate}
    return own | {"save": file_speed.save, "readers": file_speed.readers}


def _here(asked: dict[str, Any], folder: Path, rank: int) -> Measurer:
    names = asked["devices"]
    device = torch.device(names[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    set_precision("fp32")
    if len(names) > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder.absolute()}/store", rank=rank, world_size=len(names))
    return Measurer(asked, folder, rank, len(names), device)


def doctor(here: Measurer) -> dict[str, Any]:
    """In a process that ends: what it does on the cards holds no memory there afterwards."""
    from trainer.commands.doctor import examine

    return {"problems": examine().problems}


# --- by pattern -------------------------------------------------------------------------------------------------------


def kinds(device: torch.device) -> list[torch.dtype]:
    exact = [torch.uint8, torch.int32, torch.int64, torch.float32]
    return [*exact, torch.float16, torch.bfloat16] if device.type == "cuda" else exact


def pattern(size: int, kind: torch.dtype, rank: int, among: int) -> Tensor:
    """Whole numbers that tell an element from its neighbours, and a rank from the others.

    Sums of as many as there are ranks are exact in every type, so that a lost, doubled or shifted element shows.
    """
    most = {torch.uint8: 256, torch.bfloat16: 256, torch.float16: 2048}.get(kind, 2**22)
    modulus = max(2, most // among - 1)
    return ((torch.arange(size) * (rank + 1) + 17 * rank + 1) % modulus).to(kind)


def compared(found: Tensor, expected: Tensor, what: str, bad: list[str]) -> int:
    """1, for one more that was compared; a sentence in `bad` where it is wrong."""
    found = found.cpu()
    if not torch.equal(found, expected):
        where = int((found != expected).nonzero()[0])
        kind = str(expected.dtype).removeprefix("torch.")
        bad.append(
            f"{what}, {len(expected):,} of {kind}: element {where:,} is {found[where].item():g}, "
            f"not {expected[where].item():g}"
        )
    return 1


def copies(here: Measurer) -> dict[str, Any]:
    """Every pair, both ways, from process to process; cards also directly, within the first process."""
    names, done, bad = here.asked["devices"], 0, list[str]()
    for number, (source, target) in enumerate(permutations(range(here.count), 2)):
        for kind in kinds(here.device):
            for size in SIZES:
                sent = pattern(size, kind, number, 1)
                here.meet()
                if here.rank == source:
                    dist.send(sent.to(here.device), target)
                elif here.rank == target:
                    found = (sent + 1).to(here.device)
                    dist.recv(found, source)
                    done += compared(found, sent, f"{names[source]} to {names[target]}, by message", bad)
                if here.device.type == "cuda" and here.rank == 0:
                    found = (sent + 1).to(names[target])
                    found.copy_(sent.to(names[source]), non_blocking=True)
                    done += compared(found, sent, f"{names[source]} to {names[target]}", bad)
    return {"done": done, "wrong": bad}


def sums(here: Measurer) -> dict[str, Any]:
    done, bad = 0, list[str]()
    for kind in kinds(here.device):
        for size in SIZES:
            mine = [pattern(size, kind, rank, here.count) for rank in range(here.count)]
            total = mine[here.rank].clone().to(here.device)
            dist.all_reduce(total)
            expected = sum(part.double() for part in mine)
            assert isinstance(expected, Tensor)
            done += compared(total, expected.to(kind), f"on {here.asked['devices'][here.rank]}", bad)
    return {"done": done, "wrong": bad}


# --- rates ------------------------------------------------------------------------------------------------------------


def rates(here: Measurer) -> dict[str, Any]:
    """FLOP/s of matrix products and bytes/s of copies within the device, each device alone, in turn, several times."""
    cuda = here.device.type == "cuda"
    bf16 = cuda and torch.cuda.is_bf16_supported(False)
    kind = torch.bfloat16 if bf16 else torch.float16 if cuda else torch.float32
    side, block, seconds = (8192, 2**29, 0.6) if cuda else (512, 2**26, 0.15)
    one = torch.randn(side, side, device=here.device).to(kind)
    out = torch.empty_like(one)
    source = torch.zeros(block, dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    works = {
        "product": (lambda: torch.mm(one, one, out=out), 2.0 * side**3),
        "memory": (lambda: target.copy_(source), 2.0 * block),
    }
    found: dict[str, Any] = {name: [] for name in works}
    for turn in range(ROUNDS):
        for rank in range(here.count):
            if here.alone(rank):
                for name, (work, amount) in works.items():
                    times = max(1, round(seconds / here.seconds(work)))
                    took = here.seconds(lambda: _again(work, times))  # noqa: B023
                    found[name] += [amount * times / took] * (turn > 0)
    here.meet()
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(kind, "fp32")
    return {**found, "precision": precision, "product_limit": peak_flops(here.device, precision)}


def _again(work: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        work()


def links(here: Measurer) -> dict[str, Any]:
    """Bytes/s of each way between two devices, as its receiver sees it, and of an all-reduce, as its busiest wire."""
    size = 2**27 if here.device.type == "cuda" else 2**23
    block = torch.zeros(size // 4, device=here.device)
    ways: dict[str, list[float]] = {}
    together: list[float] = []
    for turn in range(2 * ROUNDS):
        for source, target in permutations(range(here.count), 2):
            here.meet()
            begun = time.perf_counter()
            if here.rank == source:
                dist.send(block, target)
            elif here.rank == target:
                dist.recv(block, source)
                synchronise([here.device])
                took = time.perf_counter() - begun
                ways.setdefault(f"{source} to {target}", []).extend([size / took] * (turn > 0))
        here.meet()
        begun = time.perf_counter()
        dist.all_reduce(block)
        synchronise([here.device])
        wire = 2 * (here.count - 1) / here.count * size
        together += [wire / (time.perf_counter() - begun)] * (turn > 0)
    return {"ways": ways, "all_reduce": together}


# --- memory -----------------------------------------------------------------------------------------------------------

RUNS, SETTLING = 5, 2  # in one program; the first make what is made once


def memory(here: Measurer) -> dict[str, Any]:
    """Bytes of this process and of its device after each run in it, once it has settled."""
    import trainer

    found: dict[str, list[int]] = {"host": [], "device": []}
    for number in range(RUNS):
        trainer.train(here.asked["recipe"], *here.asked["words"], output=str(here.folder / f"run-{number}"))
        gc.collect()
        found["host"].append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        found["device"].append(torch.cuda.memory_allocated(here.device) if here.device.type == "cuda" else 0)
    kinds = ("host", "device") if here.device.type == "cuda" else ("host",)
    return {kind: found[kind][SETTLING:] for kind in kinds}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
