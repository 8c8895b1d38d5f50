"""Exceptions in a worker: how they reach the caller's process, and what the caller receives."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass

from trainer.errors import PredictionError, describe, is_out_of_memory

# Maximum number of characters of a message or traceback, and maximum number of bytes of a pickled
# exception. A longer message loses its end and a longer traceback its beginning. A larger exception
# is not sent.
MAX_LENGTH = 20_000


class ItemError(PredictionError):
    """An item that failed in every try.

    The `__cause__` is the exception in the worker; None if the exception cannot be sent (see
    `Failure.pickled`), or if the process died or hung.

    Attributes:
        index: index of the item in the stream, from 0.
        message: type and text of the exception, or how the worker process ended.
        traceback: traceback in the worker as text; empty if the process died or hung.
    """

    def __init__(self, index: int, message: str, traceback: str = "") -> None:
        super().__init__(index, message, traceback)
        self.index = index
        self.message = message
        self.traceback = traceback
        if traceback:
            self.add_note(f"in the worker:\n{traceback}")

    def __str__(self) -> str:
        return f"item {self.index}: {self.message}"

    @classmethod
    def of(cls, index: int, failure: Failure, what: str = "") -> ItemError:
        """Create the error of an item from its failure.

        Args:
            index: index of the item in the stream.
            failure: the failure.
            what: start of the message.
        """
        error = cls(index, what + failure.message, failure.traceback)
        error.__cause__ = failure.original()
        return error


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, sent instead of a result.

    Attributes:
        message: type and text of the exception.
        traceback: traceback as text.
        memory: whether a device or the machine was out of memory.
        whole: whether the batch failed as a whole, perhaps because of one of its items.
        pickled: the pickled exception; empty if it is longer than `MAX_LENGTH` or cannot be
            unpickled.
    """

    message: str
    traceback: str
    memory: bool = False
    whole: bool = False
    pickled: bytes = b""

    @classmethod
    def of(cls, error: BaseException, whole: bool = False) -> Failure:
        """Create the failure that describes an exception."""
        message = describe(error, MAX_LENGTH)
        trace = "".join(traceback.format_exception(error))[-MAX_LENGTH:]
        return cls(message, trace, is_out_of_memory(error), whole, _pickle_exception(error))

    def original(self) -> BaseException | None:
        """Return the exception itself, or None if it cannot be unpickled."""
        try:
            error = pickle.loads(self.pickled)
        except BaseException:
            # Unpickling runs code of the exception's class, which can raise any exception.
            return None
        return error if isinstance(error, BaseException) else None

    def exception(self) -> BaseException:
        """Return the exception to set on a job's Future.

        The result is the exception of the worker, or a `PredictionError` if the exception cannot be
        unpickled. The worker's traceback is added as a note.
        """
        error = self.original() or PredictionError(self.message)
        with suppress(BaseException):
            error.add_note(f"in the worker:\n{self.traceback}")
        return error


def _pickle_exception(error: BaseException) -> bytes:
    """Pickle an exception.

    Return no bytes if the pickle is longer than `MAX_LENGTH` or cannot be unpickled. Many
    exceptions cannot be created from their `args`, so they pickle but do not unpickle.
    """
    with suppress(BaseException):
        data = pickle.dumps(error)
        if len(data) <= MAX_LENGTH and isinstance(pickle.loads(data), BaseException):
            return data
    return b""
