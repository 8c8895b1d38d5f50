"""A plugin that writes every call to a communicator to a file, when it is made:
`plugin=tests.simulated.call_recorder`.

What a rank asks of a group goes through torch's hooks, DDP's own calls from C++ among them, into
one file a rank of the folder TRAINER_TEST_CALLS, line by line: what a rank did before it ended is
there. Ranks must agree: `tests.simulated.nccl_order.stuck` plays the files. TRAINER_TEST_STOP=1:60
sends rank 1 a SIGTERM at its 60th call.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import torch.distributed as dist

from tests.simulated.nccl_order import Call, Queue


def install() -> None:
    folder = Path(os.environ["TRAINER_TEST_CALLS"])
    rank = os.environ["RANK"]
    folder.mkdir(exist_ok=True)
    who, _, when = os.environ.get("TRAINER_TEST_STOP", ":").partition(":")
    numbers = itertools.count(1)
    batches = itertools.count(1)
    batch = 0
    inner = dist.distributed_c10d
    file = (folder / f"{rank}.jsonl").open("a", buffering=1)

    def follow(group):
        ranks = dist.get_process_group_ranks(group)

        def note(call):
            tensors = [*call.input_tensors, *call.output_tensors][:1]
            what = [[tensor.numel(), str(tensor.dtype)] for tensor in tensors]
            name = call.name.name
            root = call.root
            peer = ranks[root] if name in ("SEND", "RECV") else -1
            if next(numbers) == int(when or 0) and rank == who:
                os.kill(os.getpid(), signal.SIGTERM)
            what = what if peer >= 0 else [what, root]
            file.write(json.dumps([name, peer, ranks, what, group.group_name, batch]) + "\n")

        group.register_pre_hook(7, note)

    def followed(make, find):
        def made(*arguments, **options):
            group = make(*arguments, **options)
            if isinstance(actual := find(group), dist.ProcessGroup):
                follow(actual)
            return group

        return made

    together = inner.batch_isend_irecv

    def batched(calls):
        """Send one call of NCCL, which gloo does in parts."""
        nonlocal batch
        batch = next(batches)
        try:
            return together(calls)
        finally:
            batch = 0

    dist.batch_isend_irecv = inner.batch_isend_irecv = batched
    init = followed(inner.init_process_group, lambda _: inner._get_default_group())
    new = followed(inner.new_group, lambda group: group)
    dist.init_process_group = inner.init_process_group = init
    dist.new_group = inner.new_group = new


def read(folder: Path, size: int) -> list[Queue]:
    """Read the calls of each rank; those of a batch are one entry."""
    queues: list[Queue] = []
    for rank in range(size):
        lines = map(json.loads, (folder / f"{rank}.jsonl").read_text().splitlines())
        kinds = {"SEND": "send", "RECV": "recv"}
        queue = []
        last = 0
        for kind, peer, ranks, what, group, batch in lines:
            if not batch or batch != last:
                queue.append([])
            queue[-1].append(
                Call(
                    kinds.get(kind, kind),
                    peer,
                    tuple(ranks),
                    str(what),
                    group,
                )
            )
            last = batch
        queues.append(queue)
    return queues


if "TRAINER_TEST_CALLS" in os.environ and "RANK" in os.environ:
    install()
