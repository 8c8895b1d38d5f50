"""Measure on several devices at the same time, with one process for each device.

Each process calls the same function and writes its result to a folder. The processes run this
module as their program: `python -m trainer.commands.trials.measuring FOLDER RANK`.
"""

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

from trainer.commands.trials.engine import find_failure, log_path
from trainer.devices.precision import set_precision
from trainer.distributed.peers import translate_peer_errors
from trainer.errors import PeerError, explain_in_one_line
from trainer.processes import family
from trainer.processes.interrupts import exit_now
from trainer.saving.files import report_write_errors
from trainer.telemetry.clocks import synchronise


def _read_seconds_per_thread() -> float:
    """Return the CPU time of this process, averaged over torch's threads."""
    return time.process_time() / torch.get_num_threads()


@dataclass(frozen=True)
class Measurer:
    """One of several processes that measure at the same time.

    Attributes:
        devices: the device of each process.
        rank: index of this process in `devices`.
        device: device of this process.
    """

    devices: Sequence[str]
    rank: int
    device: torch.device

    @property
    def count(self) -> int:
        return len(self.devices)

    def barrier(self) -> None:
        synchronise([self.device])
        if self.count > 1:
            # The sum of a CPU tensor goes through gloo even if the devices are GPUs, so this waits
            # for all processes without a kernel on the GPUs.
            dist.all_reduce(torch.zeros(1))

    def seconds(self, work: Callable[[], Any], times: int = 1) -> float:
        """Return the seconds that `times` calls of `work` take.

        On the CPU, the result is the CPU time of this process per thread, so that time taken by
        other programs does not count.
        """
        clock = time.perf_counter if self.device.type == "cuda" else _read_seconds_per_thread
        synchronise([self.device])
        begun = clock()
        for _ in range(times):
            work()
        synchronise([self.device])
        return max(clock() - begun, 1e-9)


def measure_on_all(
    function: Callable[..., Any],
    devices: Sequence[str],
    threads: int | None,
    folder: Path,
    timeout: float = math.inf,
    **task: Any,
) -> list[Any]:
    """Call `function(measurer, **task)` in one process per device, and return all results.

    Args:
        function: a function of a module, which the processes import.
        devices: one device per process.
        threads: threads of each process. None: torch's default.
        folder: folder of the results, which is emptied first. The output of the processes goes to
            a .log file next to it.
        timeout: seconds after which all processes are killed.
        task: keyword arguments of `function`.

    Raises:
        PeerError: a process failed, or the timeout passed. The message is the error that the
            process printed, if any.
    """
    with report_write_errors(folder.parent):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        task_file = pickle.dumps((function, devices, threads, timeout, task))
        (folder / "task").write_bytes(task_file)
        log = log_path(folder).open("w", encoding="utf-8")
    with log:
        command = [sys.executable, "-m", __name__, str(folder)]
        print(shlex.join(command), file=log, flush=True)
        # Torchrun's variables, if set, would make the processes ranks of its job, so they are
        # removed.
        environment = dict(os.environ)
        environment.pop("RANK", None)
        environment.pop("WORLD_SIZE", None)
        ranks = range(len(devices))
        commands = [[*command, str(rank)] for rank in ranks]
        codes = family.run_together(commands, environment, log, timeout)
    for code in codes:
        if code:
            raise PeerError(find_failure(log_path(folder), code))
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in ranks]


def main(folder: Path, rank: int) -> None:
    """Run the task in `folder` as process `rank`, write its result there, and exit."""
    family.die_with_parent()
    code = 0
    try:
        function, devices, threads, timeout, task = pickle.loads((folder / "task").read_bytes())
        measurer = Measurer(devices, rank, torch.device(devices[rank]))
        is_cuda = measurer.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(measurer.device)
        if threads:
            torch.set_num_threads(threads)
        set_precision("fp32")
        if measurer.count > 1:
            dist_timeout = None
            if not math.isinf(timeout):
                # Shorter than the timeout, so that a hanging process fails with a message.
                dist_timeout = datetime.timedelta(seconds=timeout / 2)
            with translate_peer_errors():
                dist.init_process_group(
                    backend="cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                    init_method=f"file://{folder.absolute()}/store",
                    timeout=dist_timeout,
                    rank=rank,
                    world_size=measurer.count,
                )
        (folder / str(rank)).write_bytes(pickle.dumps(function(measurer, **task)))
    except Exception as error:
        line, code = explain_in_one_line(error)
        print(f"trainer: error: {line}", flush=True)
    # Skip the interpreter's shutdown, which aborts if threads of gloo still run.
    exit_now(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
