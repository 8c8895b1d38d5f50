"""A word for whoever waits: after some seconds of silence it says what for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 5.0  # seconds of silence


@contextmanager
def telling(what: Callable[[], str], after: float = PATIENCE) -> Iterator[None]:
    """Within this block, one line on stderr after `after` seconds: what `what` then returns, unless it is empty."""

    def tell() -> None:
        text = what()
        if text:
            print(f"trainer: {text}", file=sys.stderr, flush=True)

    timer = threading.Timer(after, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
