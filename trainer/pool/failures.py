"""What went wrong in a worker, as it travels and as the caller sees it."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from trainer.errors import PredictionError, is_out_of_memory, text_of

LONGEST = 20_000  # characters of a traceback that travel: its end


class ItemError(PredictionError):
    """An item that no worker could do, however often it was tried.

    Attributes:
        index: its place in what was given to `map`, from 0.
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


@dataclass(frozen=True)
class Failure:
    """An exception in a worker. It stands in the result's place."""

    message: str
    traceback: str
    memory: bool = False
    whole: bool = False  # the batch failed, and one of its items may be the reason
    pickled: bytes = b""  # the exception itself, where it can travel

    @classmethod
    def of(cls, error: BaseException, whole: bool = False) -> Failure:
        """Describe an exception that was just caught."""
        text = " ".join(text_of(error).split())
        message = f"{type(error).__name__}: {text}" if text else type(error).__name__
        trace = "".join(traceback.format_exception(error))[-LONGEST:]
        return cls(message[:LONGEST], trace, is_out_of_memory(error), whole, _pickled(error))

    def exception(self) -> BaseException:
        """The exception for a job's Future: the worker's own where it can be had, with the worker's traceback."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = PredictionError(self.message)
        error.add_note(f"in the worker:\n{self.traceback}")
        return error


def _pickled(error: BaseException) -> bytes:
    """Empty where it would not come back: many exceptions cannot be made anew from their arguments."""
    try:
        data = pickle.dumps(error)
        return data if len(data) <= LONGEST and isinstance(pickle.loads(data), BaseException) else b""
    except Exception:
        return b""
