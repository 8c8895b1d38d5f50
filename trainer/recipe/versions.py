"""This version; which feature needs which torch, and what is done below it. No other file compares versions.

To raise the lowest torch in pyproject.toml: delete the rows it has reached, and the `torch_has` that ask for them.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import NamedTuple

VERSION = "0.1.0"  # as in pyproject.toml


class Since(NamedTuple):
    """Since which torch something is there, and what is done where an older one is installed."""

    torch: tuple[int, int]
    instead: str


SINCE = {
    "forward_sync_buffers": Since((2, 13), "DistributedDataParallel knows it as broadcast_buffers"),
    "stage inputs of any layout": Since((2, 12), "the check that compares the first stage's strides is left out"),
    "gradients through a group of their own": Since((2, 14), "a pipeline's messages of both ways share one"),
    "compile() of torch.nn's own modules": Since((2, 14), "it compiles nothing: a function that calls one is compiled"),
    "random states of each capture": Since((2, 12), "after one that fails the generator gets another state"),
    "an end of captures that fail": Since((2, 14), "the allocator is told, and the pool given back"),
    "backward passes in two parts": Since((2, 14), "use pipeline.schedule=interleaved1f1b, 1f1b, gpipe or loopedbfs"),
}


def installed(name: str) -> str:
    """A package's version, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def release(version: str) -> tuple[int, int] | None:
    """The finished release that a version has all of: of 2.13.0+cu130 it is 2.13, and of 2.14.0a0+git it is 2.13, too.

    Vendors' containers and nightly builds carry such a version at any time between the two.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)*[._-]?(a|b|rc|dev)?", version)
    return (int(match[1]), int(match[2]) - bool(match[3])) if match else None


def torch_has(what: str) -> bool:
    """Whether the installed torch has what a row names; one whose version cannot be read counts as the newest."""
    version = release(installed("torch"))
    return version is None or version >= SINCE[what].torch
