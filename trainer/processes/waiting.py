"""A word for whoever waits: after some seconds of silence it says what for."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from trainer.processes.started import plain

PATIENCE = 5.0  # seconds of silence
SLICE = 0.1  # seconds
Found = TypeVar("Found")


@contextmanager
def telling(what: Callable[[], str], after: float = PATIENCE) -> Iterator[None]:
    """Within this block, one line on stderr after `after` seconds: what `what` then returns, unless it is empty."""

    def tell() -> None:
        text = what()
        if text:
            print(f"trainer: {plain(text)}", file=sys.stderr, flush=True)

    timer = threading.Timer(after, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def within(seconds: float, work: Callable[[], Found]) -> Found:
    """What `work` returns, in a thread of its own: where it hangs in a library, this thread still leaves.

    Raises:
        TimeoutError: it has not returned after so many seconds; those in which this process was stopped do not count.
    """
    results: list[Found] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in range(math.ceil(seconds / SLICE)):
        thread.join(SLICE)
        if not thread.is_alive():
            break
    if raised:
        raise raised[0]
    if not results:
        raise TimeoutError
    return results[0]
