"""Ranks of our own launcher: forked, in milliseconds, from a server that has imported torch and all of this once.

A rank that torchrun restarts does not import anything again, and sixteen ranks of a node import once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module, reload
from pathlib import Path
from typing import Any

from trainer.processes import early, family, faults, fork_server
from trainer.processes.rank import LAUNCHER

MAIN = "trainer.__main__"


def start_server() -> None:
    """Start the server, which imports beside this process. Its libraries see the environment as it is now."""
    fork_server.context(MAIN, "trainer.training.loop", "torch.utils.tensorboard")


def run_rank(environment: Mapping[str, str], restarts: int, *words: str) -> None:
    """Be a rank, as `python -u -m trainer words...` is. Where that fails this process ends with its exit code.

    Args:
        environment: the launcher's, to which torch's launcher has added what makes this a rank.
        restarts: how often our launcher has started these ranks again.
    """
    early.install_handlers()
    for name in environment.keys() - os.environ.keys():
        os.environ[name] = environment[name]
    os.environ[LAUNCHER] = environment[family.PARENT]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    reload(faults)  # which looks at the environment once
    fork_server.begin_rank()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"{family.RANK_NAME}{os.environ['RANK']}")
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(write_through=True)
    sys.argv[1:] = words
    import_module(MAIN).main()
