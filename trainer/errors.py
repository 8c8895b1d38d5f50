"""Errors that end a run, each with its exit code.

The message of each exception is one line for the user: what is wrong, what is allowed, and what to
type instead. `__main__` prints the message and exits with `code`; the Python API raises the
exception. Scripts depend on the exit codes, so a code never changes.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Error numbers for a full disk, a quota that is used up, and a file over the size limit.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Matches the user info of a URL, and URL parameters whose names suggest a secret. Group 1 is the
# name of a parameter with its "=", which `remove_secrets` keeps.
SECRETS = re.compile(
    r"""(?<=://)[^/\s'"]+@|(?<=[?&;])([\w.-]*(?:token|secret|passw|key|sig)[\w.-]*=)[^&;\s'"]+""",
    re.IGNORECASE,
)


def remove_secrets(text: str) -> str:
    """Return `text` without the passwords and tokens in its URLs."""
    return SECRETS.sub(lambda match: match[1] or "", text)


class TrainerError(Exception):
    """Base class of every error that this package raises on purpose."""

    code = 1
    # The journal of a run stores this short name.
    cause = "error"

    def __str__(self) -> str:
        return remove_secrets(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Let notebooks show the message only, without a traceback of our own frames."""
        return [f"{type(self).__name__}: {self}"]


class RecipeError(TrainerError, ValueError):
    """The recipe or the command line is invalid (exit 2)."""

    code = 2
    cause = "recipe"


class SetupError(TrainerError, OSError):
    """The machine lacks something: data, a device, a writable folder (exit 3)."""

    code = 3
    cause = "environment"


class CheckpointError(TrainerError):
    """There is no usable checkpoint (exit 4)."""

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
    """Another rank, a loader worker or a GPU died or stopped responding (exit 7)."""

    code = 7
    cause = "lost rank"


class FolderInUseError(TrainerError):
    """The output folder holds a run or other files already, or is in use (exit 8)."""

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
    """Stopped by SIGTERM, or another signal that asks a run to stop, after saving (exit 143)."""

    code = 143
    cause = "SIGTERM"


KINDS = {kind.code: kind for kind in TrainerError.__subclasses__()}


def explain(error: BaseException) -> tuple[str, int]:
    """Return (text, exit_code): what to print for an exception, and the exit code.

    The text is one line, except for a bug: a bug has exit code 1, and its text is a traceback.
    """
    text = read_line(error)
    if isinstance(error, TrainerError):
        return text, error.code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", Interrupted.code
    if (fault := describe_installation_fault(error)) is not None:
        return fault, SetupError.code
    for sign, advice in ADVICE.items():
        if sign in text:
            return f"{text[:300]}: {advice}", RecipeError.code
    if is_out_of_memory(error):
        message = (
            "out of memory: lower batch_size, or raise accumulate to compute the same batch in "
            "smaller micro-batches; for a model too big for one device: mode=split "
            "devices=[cuda:0,cuda:1], or mode=pipeline nproc=2 "
            f"({text[:200] or type(error).__name__})"
        )
        return message, DeviceMemoryError.code
    if isinstance(error, OSError) and is_disk_full(error):
        where = ""
        if error.filename:
            where = f" at {error.filename}"
        elif error.errno not in FULL:
            where = f" ({text})"
        message = f"the disk is full{where}: free some space, or choose another output="
        return message, DiskFullError.code
    return remove_secrets("".join(traceback.format_exception(error)).rstrip()), 1


# Parts of error messages of torch and Python that a wrong argument causes, with the advice that
# `explain` adds to each.
ADVICE = {
    "Expected more than 1 value per channel": (
        "BatchNorm needs more: raise batch_size, or lower accumulate or pipeline.microbatches"
    ),
    "does not have a deterministic implementation": (
        "use deterministic=false, or a model without it"
    ),
    "Could not determine home directory": (
        "there is no user of a path that begins with ~: write the whole path"
    ),
    "File name too long": "shorten the name of a file or folder",
}
_PACKAGE = re.escape(os.path.dirname(os.path.abspath(__file__)))
# Matches the paths of this package, of installed libraries and of Python itself.
NOT_THE_USERS = rf"^{_PACKAGE}/|/(site|dist)-packages/|/lib/python\d"


def explain_in_one_line(error: BaseException) -> tuple[str, int]:
    """Explain an exception like `explain`, but describe a bug in one line."""
    line, code = explain(error)
    if code == TrainerError.code and not isinstance(error, TrainerError):
        line = describe_bug(error)
    return line, code


def describe_bug(error: BaseException) -> str:
    """Describe a bug in one line: its type, its message and its location.

    The location is the last frame of the traceback in the user's own code. If no frame is in the
    user's code, the location is the last frame in a file.
    """
    where = ""
    is_users = False
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<"):
            continue
        in_users_code = not re.search(NOT_THE_USERS, frame.filename)
        if in_users_code or not is_users:
            is_users = in_users_code
            where = f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return f"{describe(error, 500)}{where}"


# Required libraries that have the same name in an import and for pip. `LIBRARIES` maps the import
# name of every required library to its name for pip.
SAME_NAME = (
    "cloudpickle matplotlib numpy omegaconf pydantic safetensors scipy tensorboard torch "
    "torchvision tqdm xxhash"
)
LIBRARIES = {name: name for name in SAME_NAME.split()}
LIBRARIES |= {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


def describe_installation_fault(error: BaseException) -> str | None:
    """Describe a missing library, or versions of torch and torchvision that are incompatible.

    Returns:
        A line that says what is wrong and what to type; None for any other error.
    """
    text = read_line(error, 500)
    if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
        missing = [
            pip for name, pip in LIBRARIES.items() if name == error.name or find_spec(name) is None
        ]
        return f"not installed: {', '.join(missing)}; type pip install {' '.join(missing)}"
    does_not_fit = "torchvision::" in text
    if isinstance(error, ImportError | OSError) and ".so" in text:
        for frame in traceback.extract_tb(error.__traceback__):
            if "/torch/" in frame.filename or "/torchvision/" in frame.filename:
                does_not_fit = True
    if not does_not_fit:
        return None
    return f"torch cannot be loaded ({text}): pip install --force-reinstall torch torchvision"


def load_extra(feature: str, *modules: str) -> Any:
    """Import the optional packages that `feature` needs, and return the first one.

    Raises:
        SetupError: a package is missing or cannot be imported; the message says what to type.
    """
    try:
        loaded = [import_module(name) for name in modules]
        for module in loaded:
            # Python also imports a directory of that name in the working directory, such as the one
            # that wandb creates. Such a module has no file and is not the package.
            if getattr(module, "__file__", "") is None:
                raise ModuleNotFoundError(f"{module.__name__} is a folder without code")
    except Exception as error:
        # A package that was built for other versions of its libraries can raise any exception.
        raise build_missing_extra_error(feature, modules, error) from None
    return loaded[0]


def build_missing_extra_error(feature: str, modules: Iterable[str], error: Exception) -> SetupError:
    """Build the error that says which packages to install for `feature`.

    Args:
        feature: What needs the packages, as the start of the message.
        modules: Names of the modules whose import raised `error`.
        error: Exception of the import.
    """
    names = dict.fromkeys(name.partition(".")[0].replace("_", "-") for name in modules)
    reason = read_line(error)
    # A package that is installed but cannot be imported must be installed again, which pip does
    # only with --force-reinstall. With --no-deps pip does not replace torch, on which these
    # packages depend.
    options = "--force-reinstall --no-deps "
    if isinstance(error, ModuleNotFoundError):
        options = ""
    if not names.keys().isdisjoint(("torch", "torchvision", "numpy")):
        return SetupError(
            f"{feature} cannot be used with the torch or numpy that is installed ({reason})"
        )
    return SetupError(
        f"{feature} needs {', '.join(names)} ({reason}): pip install {options}{' '.join(names)}"
    )


def read_text(error: BaseException) -> str:
    """Return `str(error)` without secrets, even if `__str__` itself raises."""
    try:
        return remove_secrets(str(error))
    except BaseException as broken:
        return f"its own text raises {type(broken).__name__}"


def read_line(error: BaseException, limit: int | None = None) -> str:
    """Return the text of an error in one line, cut to `limit` characters if there is a limit."""
    return " ".join(read_text(error).split())[:limit]


def describe(error: BaseException, limit: int = 200) -> str:
    """Return an error in one line: its type, and up to `limit` characters of its text, if any."""
    return f"{type(error).__name__}: {read_line(error, limit)}".removesuffix(": ")


def is_disk_full(error: OSError) -> bool:
    """Return whether the disk is full.

    Python's `tempfile` reports a full disk with the error number of a missing file, so its message
    is checked as well.
    """
    return error.errno in FULL or "No usable temporary directory" in read_text(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the machine ran out of memory.

    Torch has an exception class for some cases, and only messages for others.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("out of memory", "can't allocate memory", "Cannot allocate memory", "ALLOC_FAILED")
    text = ""
    if isinstance(error, RuntimeError | OSError):
        text = read_text(error)
    if any(sign in text for sign in signs):
        return True
    return any(sign in text for sign in PERHAPS_MEMORY) and _is_gpu_full()


# cuBLAS and cuDNN report these errors if memory for their workspaces is lacking, but also if the
# installation is broken. So they count as lack of memory only if a GPU is almost full.
PERHAPS_MEMORY = (
    "unable to find an engine",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
)
# A GPU with fewer free bytes counts as full. A workspace of cuBLAS or cuDNN needs less than this.
LITTLE = 512 * 2**20


def _is_gpu_full() -> bool:
    """Return whether a GPU that this process uses has little memory left."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    try:
        used = (n for n in range(cuda.device_count()) if cuda.memory_reserved(n))
        return any(cuda.mem_get_info(n)[0] < LITTLE for n in used)
    except RuntimeError:
        # The GPU has stopped responding, so lack of memory is not the cause of the error.
        return False
