"""Version of the package, and features that need a certain version of torch.

Versions of torch are compared only in this file. After raising the lowest version of torch in
pyproject.toml, delete the rows of `SINCE` that this version satisfies, and the calls of `torch_has`
with these rows.
"""

import re
from importlib import metadata
from typing import NamedTuple

# Must equal the version in pyproject.toml.
VERSION = "0.2.0"


class Since(NamedTuple):
    """Version of torch that a feature needs, and what is done without the feature.

    Attributes:
        torch: First version of torch with the feature.
        instead: What happens, or what to use, with older versions.
    """

    torch: tuple[int, int]
    instead: str


SINCE = {
    "forward_sync_buffers": Since((2, 13), "DistributedDataParallel knows it as broadcast_buffers"),
    "stage inputs of any layout": Since(
        (2, 12), "the check that compares the first stage's strides is left out"
    ),
    "gradients through a group of their own": Since(
        (2, 14), "a pipeline's messages of both ways share one"
    ),
    "compile() of torch.nn's own modules": Since(
        (2, 14), "it compiles nothing: a function that calls one is compiled"
    ),
    "random states of each capture": Since(
        (2, 12), "after one that fails the generator gets another state"
    ),
    "an end of captures that fail": Since(
        (2, 14), "the allocator is notified here, and the memory pool released"
    ),
    "backward passes in two parts": Since(
        (2, 14), "use pipeline.schedule=interleaved1f1b, 1f1b, gpipe or loopedbfs"
    ),
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
    return version is None or version >= SINCE[what].torch
