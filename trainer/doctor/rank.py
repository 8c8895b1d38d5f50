"""One of the short-lived processes of `groups.Group`: python -m trainer.doctor.rank BACKEND RANK SIZE STORE."""

from __future__ import annotations

import datetime
import os
import sys

from trainer.doctor.groups import PATIENCE
from trainer.errors import explain


def take_part(backend: str, rank: int, size: int, store: str) -> None:
    """Be one of the processes."""
    import torch
    import torch.distributed as dist

    from trainer.peers import check_sums, lost_peers

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with lost_peers():
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=PATIENCE / 2),
        )
        check_sums(device, rank, size)
        dist.barrier()


if __name__ == "__main__":
    code = 0
    try:
        take_part(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    except Exception as error:
        line, code = explain(error)
        print(line.splitlines()[-1], flush=True)
    os._exit(code)  # a clean exit may abort while gloo's threads run
