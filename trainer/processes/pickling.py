"""Send objects of the user's program to other processes, including the code of their classes.

Another process cannot import a class that was defined in a notebook, in `python -` or in the main
script. cloudpickle therefore sends the code of the class with the object.
"""

import sys
from typing import Any

from trainer.errors import RecipeError, read_line

# Whether this process has received objects by value. Children of this process cannot import the
# classes of such objects.
has_received_objects = False

STAY = "give a function that makes it, or stay in this process, mode=single data.workers=0"


def pickle_by_value(value: Any, what: str, instead: str = STAY) -> bytes:
    """Pickle an object for a process that can import the same modules as this one.

    Args:
        value: the object.
        what: name of the object, for the message.
        instead: what the user can do instead, for the message.

    Returns:
        Bytes for `pickle.loads`.

    Raises:
        RecipeError: the object cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        content: bytes = cloudpickle.dumps(value)
        return content
    # Pickling calls methods of the object, which may raise any exception.
    except Exception as error:
        reason = read_line(error, 160)
        raise RecipeError(
            f"{what} cannot be sent to another process ({type(error).__name__}: {reason}): "
            f"{instead}"
        ) from None


def has_unimportable_main() -> bool:
    """Return whether children of this process cannot import the classes of `__main__`."""
    forget_stdin()
    # `python -i script.py` has a file, but the file does not contain classes that are typed later.
    is_interactive = hasattr(sys, "ps1")
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    return has_received_objects or is_interactive or main_file is None


def forget_stdin() -> None:
    """Remove the file name "<stdin>" from `__main__` if Python reads the program from stdin.

    multiprocessing would try to run a file of that name in the child process.
    """
    main: Any = sys.modules.get("__main__")
    if getattr(main, "__file__", "") == "<stdin>":
        del main.__file__
