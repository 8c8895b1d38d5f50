"""A process group of real processes, small and short: do they find each other, and do their sums come out right?"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from multiprocessing.connection import Connection
from types import TracebackType

from trainer.errors import SetupError, explain
from trainer.processes import fork_server

TIMEOUT = 60.0  # seconds


class Group:
    """`size` processes that sum a pattern, from the moment this block is entered; they end with it.

    They come from the fork server, which loads torch while this process does.
    """

    def __init__(self, backend: str, size: int) -> None:
        self.backend, self.size = backend, size

    def __enter__(self) -> Group:
        self.begun = time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="trainer-")
        context = fork_server.context()
        self.children, self.answers = [], []
        for rank in range(self.size):
            answer, mine = context.Pipe(duplex=False)
            where = os.path.join(self.folder.name, "store")
            child = context.Process(target=_rank, args=(self.backend, rank, self.size, where, mine), daemon=True)
            child.start()
            mine.close()
            self.children.append(child)
            self.answers.append(answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child, answer in zip(self.children, self.answers, strict=True):
            child.kill()
            child.join()
            answer.close()
        self.folder.cleanup()

    def outcome(self) -> str:
        """That it works.

        Raises:
            SetupError: it does not, with the reason of the process that failed by itself.
        """
        reasons = [reason for rank in range(self.size) if (reason := self._answer(rank))]
        if reasons:
            reasons.sort(key=lambda reason: "lost another rank" in reason)  # a rank that failed by itself comes first
            raise SetupError(f"{self.backend} does not work between {self.size} processes here: {reasons[0]}")
        return "sums come out right"

    def _answer(self, rank: int) -> str:
        if not self.answers[rank].poll(max(1.0, self.begun + TIMEOUT - time.monotonic())):
            return f"process {rank} was silent for {TIMEOUT:.0f} s"
        try:
            return str(self.answers[rank].recv())
        except EOFError:
            self.children[rank].join(1)
            return f"process {rank} ended with exit code {self.children[rank].exitcode}"


def _rank(backend: str, rank: int, size: int, store: str, answer: Connection) -> None:
    """Be one of the processes, and answer with what went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries' own words; the answer says it all
    reason = ""
    try:
        _take_part(backend, rank, size, store)
    except Exception as error:
        reason = explain(error)[0].splitlines()[-1]
    answer.send(reason)
    answer.close()
    os._exit(0)  # a clean exit may abort while gloo's threads run


def _take_part(backend: str, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from trainer.processes.peers import check_sums, lost_peers

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with lost_peers():
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT / 2),
        )
        check_sums(device, rank, size)
        dist.barrier()
