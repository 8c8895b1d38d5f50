"""What becomes of workers that compute when the process that starts them has computed before, by start method.

    python tests/benchmarks/fork_hang.py
    python tests/benchmarks/fork_hang.py --methods fork --rounds 20 --workers 4 --limit 5

This process runs matmul, conv2d, einsum and numpy.dot on 2 threads, then starts workers that do the same; printed is in
how many rounds a worker hung. A forked child inherits OpenMP's memory of a team of threads but not the threads, and the
first parallel region waits for them for ever (GNU's OpenMP, as in torch's Linux wheels; others may survive). That is
why `trainer` starts processes with `forkserver` and `spawn` only. Hung workers are ended by an alarm of their own, so
that none outlives the script, however it ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.context import BaseContext

import numpy as np
import torch

THREADS = 2


def compute() -> None:
    """Use every kind of threaded kernel that the training, or a user's data set, may use."""
    torch.set_num_threads(THREADS)
    square, images, filters = torch.ones(512, 512), torch.ones(16, 16, 32, 32), torch.ones(32, 16, 3, 3)
    torch.matmul(square, square)
    torch.conv2d(images, filters)
    torch.einsum("bij,bjk->bik", images[0], images[1])
    np.dot(square.numpy(), square.numpy())


def hung(context: BaseContext, workers: int, limit: int, task: Callable[[], None] = compute) -> int:
    """How many of `workers` processes that do `task` at once did not end within `limit` seconds; those are dead now.

    Raises:
        RuntimeError: a worker failed in another way.
    """
    processes = [context.Process(target=_within, args=(limit, task), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if not {0, -signal.SIGALRM}.issuperset(codes):
        raise RuntimeError(f"workers ended with {codes}")
    return codes.count(-signal.SIGALRM)


def _within(limit: int, task: Callable[[], None]) -> None:
    signal.alarm(limit)  # the kernel ends us, wherever we wait
    task()


def main() -> None:
    known = multiprocessing.get_all_start_methods()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=known, default=known)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=10, help="seconds a worker may take, once it has begun")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {THREADS} threads, {options.workers} workers, {options.limit} s")
    print(f"{'start method':<14}{'rounds':>8}{'hung':>8}")
    for method in options.methods:
        count = 0
        for _ in range(options.rounds):
            compute()
            count += hung(multiprocessing.get_context(method), options.workers, options.limit) > 0
        print(f"{method:<14}{options.rounds:>8}{count:>8}", flush=True)


if __name__ == "__main__":
    main()
