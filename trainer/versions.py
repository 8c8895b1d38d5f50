"""Version of the package, and features that need a certain version of torch.

Versions of torch are compared only in this file. After raising the lowest version of torch in
pyproject.toml, delete the rows of `SINCE` that this version satisfies, and the calls of `torch_has`
with these rows.
"""

import re
from importlib import metadata

# Must equal the version in pyproject.toml.
VERSION = "0.2.0"


# Feature -> first version of torch with it. The comment above a row says what is done without it.
SINCE = {
    # DistributedDataParallel has the argument broadcast_buffers instead.
    "forward_sync_buffers": (2, 13),
    # Torch's own check of a stage's inputs is left out.
    "stage inputs of any layout": (2, 12),
    # The messages of a pipeline in both directions share a group.
    "gradients through a group of their own": (2, 14),
    # A function that calls the module is compiled instead.
    "compile() of torch.nn's own modules": (2, 14),
    # The generator gets another state after a capture that fails.
    "random states of each capture": (2, 12),
    # The allocator is notified here, and the memory pool released.
    "an end of captures that fail": (2, 14),
    # `trainer.recipe.checks` refuses the schedules that need them.
    "backward passes in two parts": (2, 14),
}


def read_version(name: str) -> str:
    """Return the version of a package without importing it, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def parse_release(version: str) -> tuple[int, int] | None:
    """Return the newest release that a version certainly contains; None if it cannot be parsed.

    The result is (2, 13) for 2.13.0+cu130, and also for 2.14.0a0+git: vendors' containers and
    nightly builds have this version at any time between the releases 2.13 and 2.14.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)*[._-]?(a|b|rc|dev)?", version)
    if match is None:
        return None
    is_unfinished = match[3] is not None
    return (int(match[1]), int(match[2]) - is_unfinished)


def torch_has(what: str) -> bool:
    """Return whether the installed torch has the feature `what` of `SINCE`.

    A version that cannot be parsed counts as the newest version.
    """
    version = parse_release(read_version("torch"))
    return version is None or version >= SINCE[what]
