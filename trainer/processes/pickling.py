"""What a program made, on its way to another process: objects whose classes no module holds travel by value.

A class of a notebook, of `python -` or of the script itself has no module that another process could import.
cloudpickle sends its code along.
"""

from __future__ import annotations

import sys
from typing import Any

from trainer.errors import RecipeError

arrived = False  # in a process that was sent such objects: its own children cannot import their classes either


STAY = "give a function that makes it, or stay in this process, mode=single data.workers=0"


def packed(value: Any, what: str, instead: str = STAY) -> bytes:
    """Bytes that `pickle.loads` makes the object of, in a process that can import what this one can.

    Raises:
        RecipeError: it cannot travel; `what` names it, and `instead` says what to do.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        content: bytes = cloudpickle.dumps(value)
        return content
    except Exception as error:  # an object may raise anything at all as it is pickled
        reason = " ".join(str(error).split())[:160]
        raise RecipeError(
            f"{what} cannot be sent to another process ({type(error).__name__}: {reason}): {instead}"
        ) from None


def nowhere_to_import() -> bool:
    """Whether `__main__`'s classes cannot be imported by children of this process."""
    forget_stdin()
    typed = hasattr(sys, "ps1")  # an interactive shell, which may have begun with a file
    return arrived or typed or getattr(sys.modules.get("__main__"), "__file__", None) is None


def forget_stdin() -> None:
    """A program that Python reads from stdin has no file of that name, which multiprocessing would look for."""
    main: Any = sys.modules.get("__main__")
    if getattr(main, "__file__", "") == "<stdin>":
        del main.__file__
