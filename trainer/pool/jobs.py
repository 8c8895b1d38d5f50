"""Jobs, as `submit` is given them, and what becomes of their Futures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.pool.failures import raisable
from trainer.pool.handles import Answer


class JobFuture(Future[Any]):
    """A Future whose callbacks cannot end the pool's thread, which calls them."""

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        super().add_done_callback(partial(_call_back, fn))


def _call_back(function: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        function(future)
    except Exception:
        raise  # logged by concurrent.futures, which goes on with the next one
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__} in a callback of a DevicePool ends nothing") from error


@dataclass(eq=False)
class Job:
    """A call that `submit` was given."""

    future: Future[Any]
    call: Any
    lane: int
    tries: int = 0
    running: bool = False


def finish(future: Future[Any], answer: Answer) -> None:
    """Give a job's Future what its worker answered."""
    try:
        result = answer.open()
    except BaseException as error:
        resolve(future, error=raisable(error))
        return
    if answer.failures:
        resolve(future, error=result.exception())
    else:
        resolve(future, result)


def resolve(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Give a Future its result or its error, unless it was cancelled."""
    with suppress(InvalidStateError):
        future.set_exception(error) if error else future.set_result(result)
