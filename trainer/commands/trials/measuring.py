"""Processes that measure at once, one on each device: each calls one function, and leaves the answer in a folder.

`python -m trainer.commands.trials.measuring FOLDER RANK` is one of them.
"""

from __future__ import annotations

import datetime
import math
import os
import pickle
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.commands.trials.engine import failure_line, log_of
from trainer.devices.precision import set_precision
from trainer.errors import PeerError, in_one_line
from trainer.processes import family
from trainer.processes.interrupts import exit_now
from trainer.processes.peers import lost_peers
from trainer.saving.files import writing
from trainer.telemetry.clocks import synchronise


@dataclass(frozen=True)
class Measurer:
    """This process among those that measure at once, one on each of the devices."""

    folder: Path
    devices: Sequence[str]
    rank: int
    device: torch.device

    @property
    def count(self) -> int:
        return len(self.devices)

    def barrier(self) -> None:
        synchronise([self.device])
        if self.count > 1:
            dist.all_reduce(torch.zeros(1))  # over gloo, on the CPU

    def seconds(self, work: Callable[[], Any], times: int = 1) -> float:
        """What `work` takes so many times; on the CPU without what other programs take meanwhile."""
        cuda = self.device.type == "cuda"
        clock = time.perf_counter if cuda else lambda: time.process_time() / torch.get_num_threads()
        synchronise([self.device])
        begun = clock()
        for _ in range(times):
            work()
        synchronise([self.device])
        return max(clock() - begun, 1e-9)


def answers(
    function: Callable[..., Any], devices: Sequence[str], threads: int | None, folder: Path,
    timeout: float = math.inf, **task: Any,
) -> list[Any]:  # fmt: skip
    """What processes answer that call `function(Measurer, **task)` at the same time, one on each of the devices.

    Args:
        threads: of each process; None: as many as torch takes.
        folder: is emptied first; what they print goes into a .log file beside it.

    Raises:
        PeerError: one of them failed, with its line, or they did not end within `timeout` seconds.
    """
    with writing(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "task").write_bytes(pickle.dumps((function, devices, threads, timeout, task)))
        log = log_of(folder).open("w", encoding="utf-8")
    with log:
        command = [sys.executable, "-m", __name__, str(folder)]
        print(shlex.join(command), file=log, flush=True)
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        commands = [[*command, str(rank)] for rank in range(len(devices))]
        codes = family.at_once(commands, environment, log, timeout)
    if failed := next(filter(None, codes), None):
        raise PeerError(failure_line(log_of(folder), failed))
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(len(devices))]


def main(folder: Path, rank: int) -> None:
    family.die_with_parent()
    code = 0
    try:
        function, devices, threads, timeout, task = pickle.loads((folder / "task").read_bytes())
        here = Measurer(folder, devices, rank, torch.device(devices[rank]))
        if cuda := here.device.type == "cuda":
            torch.cuda.set_device(here.device)
        if threads:
            torch.set_num_threads(threads)
        set_precision("fp32")
        if here.count > 1:
            backend, store = "cpu:gloo,cuda:nccl" if cuda else "gloo", f"file://{folder.absolute()}/store"
            patience = None if math.isinf(timeout) else datetime.timedelta(seconds=timeout / 2)
            with lost_peers():
                dist.init_process_group(backend, store, patience, rank=rank, world_size=here.count)
        (folder / str(rank)).write_bytes(pickle.dumps(function(here, **task)))
    except Exception as error:
        line, code = in_one_line(error)
        print(f"trainer: error: {line}", flush=True)
    exit_now(code)  # gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
