"""The ways a run can end, each with its exit code.

Every exception here carries one line for the user: what was found, what is allowed, what to type instead.
`__main__` prints it and exits with `code`; the Python API lets it rise. The numbers are part of the interface.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error this package raises on purpose."""

    code = 1


class RecipeError(TrainerError, ValueError):
    """The recipe or the words on the command line cannot mean anything (exit 2)."""

    code = 2


class SetupError(TrainerError, OSError):
    """The machine lacks something: data, a device, a writable folder (exit 3)."""

    code = 3


class CheckpointError(TrainerError):
    """No checkpoint that can be used (exit 4)."""

    code = 4


class NotFiniteError(TrainerError, ArithmeticError):
    """A loss or a gradient became NaN or infinite (exit 5)."""

    code = 5


class DeviceMemoryError(TrainerError, MemoryError):
    """A device or the machine ran out of memory (exit 6)."""

    code = 6


class PeerError(TrainerError, RuntimeError):
    """Another rank or a loader worker died or stopped answering (exit 7)."""

    code = 7


class FolderInUseError(TrainerError):
    """The run folder holds another run (exit 8)."""

    code = 8


class DiskFullError(TrainerError, OSError):
    """The disk is full; what was saved before is intact (exit 28)."""

    code = 28


class Interrupted(TrainerError):
    """Stopped by Ctrl-C after saving (exit 130)."""

    code = 130


class Preempted(TrainerError):
    """Stopped by SIGTERM after saving (exit 143)."""

    code = 143
