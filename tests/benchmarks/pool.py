"""What a DevicePool costs: items/s where the model costs nothing.

    python tests/benchmarks/pool.py tiny       # one item at a time in and out, in order, and a plain queue of items

Every worker has one thread on the CPU, unless OMP_NUM_THREADS says otherwise. The variants alternate after a warm-up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch

from trainer import DevicePool, current_device


class Classifier:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def setup(self, device: torch.device) -> None:
        self.model = self.model.to(device).eval()

    @torch.inference_mode()
    def batch(self, items: list[torch.Tensor]) -> torch.Tensor:
        return self.model(torch.stack(items).to(current_device()))


def seconds(stream: Iterator[Any], count: int) -> float:
    """From the first item in to the last result out."""
    begin = time.perf_counter()
    found = sum(1 for _ in stream)
    assert found == count
    return time.perf_counter() - begin


# --- the plain way ----------------------------------------------------------------------------------------------------


def queue_worker(model: torch.nn.Module, todo: Any, done: Any) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        while (task := todo.get()) is not None:
            done.put((task[0], model(task[1][None])[0]))


class Queues:
    """Two workers between two queues of single items: what people write first."""

    def __init__(self, model: torch.nn.Module) -> None:
        context = multiprocessing.get_context("spawn")
        self.todo, self.done = context.Queue(), context.Queue()
        arguments = (model.eval(), self.todo, self.done)
        self.workers = [context.Process(target=queue_worker, args=arguments, daemon=True) for _ in range(2)]
        for worker in self.workers:
            worker.start()

    def map(self, items: torch.Tensor, window: int = 64) -> Iterator[torch.Tensor]:
        early: dict[int, torch.Tensor] = {}
        sent = 0
        for wanted in range(len(items)):
            while sent < min(wanted + window, len(items)):
                self.todo.put((sent, items[sent]))
                sent += 1
            while wanted not in early:
                index, result = self.done.get()
                early[index] = result
            yield early.pop(wanted)

    def close(self) -> None:
        for _ in self.workers:
            self.todo.put(None)
        for worker in self.workers:
            worker.join()


def tiny(options: argparse.Namespace) -> None:
    model, count, few = torch.nn.Linear(10, 4), options.items or 500_000, 2000
    items = torch.randn(count, 10)
    queues = Queues(model)
    variants: dict[str, tuple[Callable[[], Iterator[Any]], int]] = {}
    with (
        DevicePool(["cpu", "cpu"], Classifier, arguments=(model,)) as growing,
        DevicePool(["cpu", "cpu"], Classifier, arguments=(model,), batch_size=1000) as fixed,
    ):
        variants["pool, growing batches"] = lambda: growing.map(iter(items)), count
        variants["pool, batches of 1000"] = lambda: fixed.map(iter(items)), count
        variants["queue of items"] = lambda: queues.map(items[:few]), few
        rates: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(options.rounds + 1):
            for name, (stream, size) in variants.items():
                rate = size / seconds(stream(), size)
                if turn:  # the first one warms up
                    rates[name].append(rate)
        queues.close()
    for name, found in rates.items():
        print(f"{name:24}{statistics.median(found):12,.0f} items/s  ({min(found):,.0f} to {max(found):,.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tiny"])
    parser.add_argument("--items", type=int, default=0, help="a round; default 500,000")
    parser.add_argument("--batch", type=int, help="heavy: of every batch; default: it grows")
    parser.add_argument("--one", default="cpu", help="heavy: devices")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tiny(options)


if __name__ == "__main__":
    main()
