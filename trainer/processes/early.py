"""Signal handlers until a run has something to save. Imports next to nothing, so that it comes first."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# What asks to save and go, beside SIGTERM: a terminal that closes, SLURM's --signal=USR1, submitit's SIGUSR2.
SAVE_AND_GO = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def is_installed_command() -> bool:
    """Whether pip's script `trainer` is this process's main module, which it is in none of its children."""
    return sys.argv[0].endswith("/trainer") and getattr(sys.modules["__main__"], "__file__", "") == sys.argv[0]


def exit_on_signal(number: int, _: FrameType | None) -> None:
    """A signal's handler: end this process with the exit code that the signal has later on too."""
    os._exit(130 if number == signal.SIGINT else 143)


def install_handlers() -> None:
    """Install handlers until others follow; without them Ctrl-C ends the imports with a traceback each."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # launch.sh has it blocked
    for number in SAVE_AND_GO:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit_on_signal)


def unused(number: int) -> bool:
    """Whether no other code has a handler for a signal, or ignores it, as nohup does."""
    return signal.getsignal(number) in (signal.SIG_DFL, exit_on_signal)
