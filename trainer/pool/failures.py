"""Exceptions in a worker: how they are sent, and what the caller gets."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass

from trainer.errors import PredictionError, is_out_of_memory, text_of

LONGEST = 20_000  # characters of a traceback that are sent: its end


class ItemError(PredictionError):
    """An item that failed every time it was tried; the worker's exception is the `__cause__`, where it pickles.

    Attributes:
        index: of the item in the stream, from 0.
        message: the exception's type and text, or how the worker ended.
        traceback: the worker's, as text; empty where the worker died or hung.
    """

    def __init__(self, index: int, message: str, traceback: str = "") -> None:
        super().__init__(index, message, traceback)
        self.index, self.message, self.traceback = index, message, traceback
        if traceback:
            self.add_note(f"in the worker:\n{traceback}")

    def __str__(self) -> str:
        return f"item {self.index}: {self.message}"

    @classmethod
    def of(cls, index: int, failure: Failure) -> ItemError:
        """The error of an item that failed in a worker."""
        error = cls(index, failure.message, failure.traceback)
        error.__cause__ = failure.original()
        return error


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, in place of a result."""

    message: str
    traceback: str
    memory: bool = False
    whole: bool = False  # the batch failed, perhaps because of one of its items
    pickled: bytes = b""  # the exception itself, where it pickles

    @classmethod
    def of(cls, error: BaseException, whole: bool = False) -> Failure:
        text = " ".join(text_of(error).split())
        message = f"{type(error).__name__}: {text}" if text else type(error).__name__
        trace = "".join(traceback.format_exception(error))[-LONGEST:]
        return cls(message[:LONGEST], trace, is_out_of_memory(error), whole, _pickled(error))

    def original(self) -> BaseException | None:
        """The worker's exception, where it unpickles."""
        try:
            error = pickle.loads(self.pickled)
        except BaseException:  # unpickling runs its code, which may raise anything
            return None
        return error if isinstance(error, BaseException) else None

    def exception(self) -> BaseException:
        """The exception for a job's Future: the worker's own where it unpickles, with the worker's traceback."""
        error = self.original() or PredictionError(self.message)
        with suppress(BaseException):
            error.add_note(f"in the worker:\n{self.traceback}")
        return error


def _pickled(error: BaseException) -> bytes:
    """Empty where it does not unpickle: many exceptions cannot be made from their `args`."""
    try:
        data = pickle.dumps(error)
        return data if len(data) <= LONGEST and isinstance(pickle.loads(data), BaseException) else b""
    except BaseException:
        return b""
