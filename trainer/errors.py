"""The ways a run can end, each with its exit code.

Every exception here carries one line for the user: what was found, what is allowed, what to type instead.
`__main__` prints it and exits with `code`; the Python API lets it rise. The numbers are part of the interface.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from importlib.util import find_spec

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, in a quota, or below a limit


SECRETS = re.compile(  # user info of an address, and values that are called like a token
    r"""(?<=://)[^/\s'"]+@|(?<=[?&;])([\w.-]*(?:token|secret|passw|key|sig)[\w.-]*=)[^&;\s'"]+""", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """A text as it may be shown and stored: no password and no token in the addresses in it."""
    return SECRETS.sub(lambda match: match[1] or "", text)


class TrainerError(Exception):
    """Base of every error this package raises on purpose."""

    code = 1
    cause = "error"  # in a word or two, for the journal

    def __str__(self) -> str:
        return without_secrets(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the sentence, without our own frames that led to it."""
        return [f"{type(self).__name__}: {self}"]


class RecipeError(TrainerError, ValueError):
    """The recipe or the words on the command line cannot mean anything (exit 2)."""

    code = 2
    cause = "recipe"


class SetupError(TrainerError, OSError):
    """The machine lacks something: data, a device, a writable folder (exit 3)."""

    code = 3
    cause = "environment"


class CheckpointError(TrainerError):
    """No checkpoint that can be used (exit 4)."""

    code = 4
    cause = "checkpoint"


class NotFiniteError(TrainerError, ArithmeticError):
    """A loss or a gradient became NaN or infinite (exit 5)."""

    code = 5
    cause = "not finite"


class DeviceMemoryError(TrainerError, MemoryError):
    """A device or the machine ran out of memory (exit 6)."""

    code = 6
    cause = "out of memory"


class PeerError(TrainerError, RuntimeError):
    """Another rank, a loader worker or a GPU died or stopped answering (exit 7)."""

    code = 7
    cause = "lost rank"


class FolderInUseError(TrainerError):
    """The run folder holds another run (exit 8)."""

    code = 8
    cause = "folder in use"


class PredictionError(TrainerError, RuntimeError):
    """Some items could not be predicted, or the workers that predict ended (exit 9)."""

    code = 9


class DiskFullError(TrainerError, OSError):
    """The disk is full; what was saved before is intact (exit 28)."""

    code = 28
    cause = "disk full"


class Interrupted(TrainerError):
    """Stopped by Ctrl-C after saving (exit 130)."""

    code = 130
    cause = "SIGINT"


class Preempted(TrainerError):
    """Stopped by SIGTERM after saving (exit 143)."""

    code = 143
    cause = "SIGTERM"


KINDS = {kind.code: kind for kind in TrainerError.__subclasses__()}


def explain(error: BaseException) -> tuple[str, int]:
    """What to print for an exception, and the exit code. Only a bug shows a traceback."""
    text = " ".join(text_of(error).split())
    if isinstance(error, TrainerError):
        return text, error.code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", Interrupted.code
    if (fault := installation_fault(error)) is not None:
        return fault, SetupError.code
    for sign, advice in ADVICE.items():
        if sign in text:
            return f"{text[:300]}: {advice}", RecipeError.code
    if is_out_of_memory(error):
        advice = "lower batch_size, or raise accumulate to compute the same batch in smaller pieces; a model too big "
        advice += "for one device: mode=split devices=[cuda:0,cuda:1], or mode=pipeline nproc=2"
        return f"out of memory: {advice} ({text[:200] or type(error).__name__})", DeviceMemoryError.code
    if isinstance(error, OSError) and is_disk_full(error):
        where = f" at {error.filename}" if error.filename else "" if error.errno in FULL else f" ({text})"
        return f"the disk is full{where}: free some space, or choose another output=", DiskFullError.code
    return without_secrets("".join(traceback.format_exception(error)).rstrip()), 1


ADVICE = {  # what torch and Python say of settings that they cannot use, and what to type
    "Expected more than 1 value per channel": (
        "BatchNorm needs more: raise batch_size, or lower accumulate or pipeline.microbatches"
    ),
    "does not have a deterministic implementation": "use deterministic=false, or a model without it",
    "Could not determine home directory": "there is no user of a path that begins with ~: write the whole path",
    "File name too long": "shorten the name of a file or folder",
}
# Files of ours, of installed libraries and of Python itself.
NOT_THE_USERS = rf"^{re.escape(os.path.dirname(os.path.abspath(__file__)))}/|/(site|dist)-packages/|/lib/python\d"


def in_one_line(error: BaseException) -> tuple[str, int]:
    """As `explain`, and of a bug its sentence."""
    line, code = explain(error)
    bug = code == TrainerError.code and not isinstance(error, TrainerError)
    return sentence(error) if bug else line, code


def sentence(error: BaseException) -> str:
    """A bug in one line: its kind, what it says, and where in the user's own code, else in ours, it was raised."""
    text = " ".join(text_of(error).split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    theirs = [frame for frame in frames if not re.search(NOT_THE_USERS, frame.filename)]
    where = [f" ({frame.filename}:{frame.lineno}, in {frame.name})" for frame in (theirs or frames)[-1:]]
    return f"{type(error).__name__}: {text[:500]}{''.join(where)}"


# What pip installs with this package, unless it is told not to: name in Python -> name for pip, where they differ.
LIBRARIES = {
    **{name: name for name in ("matplotlib", "numpy", "omegaconf", "pydantic", "safetensors", "scipy", "tensorboard")},
    **{name: name for name in ("cloudpickle", "torch", "torchvision", "tqdm", "xxhash")},
    **{"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"},
}


def installation_fault(error: BaseException) -> str | None:
    """One line where a library is missing, or torch and torchvision do not fit together; None for other errors."""
    text = " ".join(text_of(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
        missing = [pip for name, pip in LIBRARIES.items() if name == error.name or find_spec(name) is None]
        return f"not installed: {', '.join(missing)}; type pip install {' '.join(missing)}"
    library = isinstance(error, ImportError | OSError) and ".so" in text
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if "torchvision::" in text or (library and any("/torch/" in name or "/torchvision/" in name for name in frames)):
        return f"torch cannot be loaded ({text[:160]}): pip install --force-reinstall torch torchvision"
    return None


def text_of(error: BaseException) -> str:
    """`str(error)` without secrets, also of an exception that cannot say what it is."""
    try:
        return without_secrets(str(error))
    except BaseException as broken:
        return f"its own text raises {type(broken).__name__}"


def is_disk_full(error: OSError) -> bool:
    """Whether there was no room to write; Python's word for it where no temporary file can be written is another."""
    return error.errno in FULL or "No usable temporary directory" in text_of(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine ran out of memory. Torch has a class for one and only messages for others."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("out of memory", "can't allocate memory", "Cannot allocate memory", "ALLOC_FAILED")
    text = text_of(error) if isinstance(error, RuntimeError | OSError) else ""
    return any(sign in text for sign in signs) or (any(sign in text for sign in PERHAPS_MEMORY) and _card_is_full())


# What cuBLAS and cuDNN say where there is no memory for their workspaces, and where they are broken.
PERHAPS_MEMORY = ("unable to find an engine", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
LITTLE = 512 * 2**20  # bytes free of a card that is full: such a workspace takes less


def _card_is_full() -> bool:
    """Whether a card that this process computes on has little memory left."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    try:
        used = (n for n in range(cuda.device_count()) if cuda.memory_reserved(n))
        return any(cuda.mem_get_info(n)[0] < LITTLE for n in used)
    except RuntimeError:  # a card that does not answer any more
        return False
