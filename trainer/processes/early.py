"""Signal handlers for the time before a run has something to save.

The module imports next to nothing, so that the handlers are installed before slow imports.
"""

import os
import signal
import sys
import time
from types import FrameType

# Signals other than SIGINT and SIGTERM that ask a run to save and exit: a closed terminal (SIGHUP),
# SLURM's --signal=USR1, submitit's SIGUSR2, and the soft limit of CPU time (`ulimit -S -t`, SGE's
# s_cpu). At the hard limit of CPU time, the system sends SIGKILL.
SAVE_AND_GO = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
# A signal that arrives within this number of seconds after a Ctrl-C is a copy of it. A later signal
# is a new Ctrl-C, unless more copies of the first Ctrl-C are expected (see `CtrlC`).
COPY_SECONDS = 1.0


class CtrlC:
    """Counter that distinguishes the user's second Ctrl-C from copies of the first one.

    A Ctrl-C may reach a process more than once, because the terminal signals the whole process
    group, and `timeout`, `srun` or a launcher signals the process again. Counting a copy as a
    second Ctrl-C would end the run without saving.

    Args:
        routes: maps each signal that a Ctrl-C may arrive as to the number of signals that one
            Ctrl-C can cause. Until this number of signals has arrived, every signal after the first
            one is a copy, however late it arrives.
    """

    def __init__(self, routes: dict[int, int]) -> None:
        self.routes = routes
        # First signal that was passed to `is_second`; None before the first call.
        self.first: int | None = None
        self._arrival_count = 0
        self._last_new = 0.0

    def is_new(self, number: int = signal.SIGINT) -> bool:
        """Count a signal, and return whether it is a new Ctrl-C of the user, not a copy.

        Signals that are not in `routes` are not counted, because they are never a Ctrl-C.
        """
        routes = self.routes.get(number)
        if routes is None:
            return False
        now = time.monotonic()
        is_late = now - self._last_new > COPY_SECONDS
        is_new = self._arrival_count == 0 or (is_late and self._arrival_count >= routes)
        self._arrival_count += 1
        if is_new:
            self._last_new = now
        return is_new

    def is_second(self, number: int) -> bool:
        """Count a signal, and return whether it is the user's second Ctrl-C.

        A Ctrl-C after another signal, such as SIGTERM, is not a second one.
        """
        first = self.first
        if first is None:
            self.first = number
        return self.is_new(number) and first == signal.SIGINT


def is_installed_command() -> bool:
    """Return whether the user started this process with the script `trainer` that pip installs.

    The result is False in child processes, because their main module is a different one.
    """
    return (
        sys.argv[0].endswith("/trainer")
        and getattr(sys.modules["__main__"], "__file__", "") == sys.argv[0]
    )


def exit_on_signal(number: int, _: FrameType | None) -> None:
    """Exit with code 130 after Ctrl-C, and with 143 after other signals, as a training run does."""
    os._exit(130 if number == signal.SIGINT else 143)


def install_handlers() -> None:
    """Install handlers that exit without a traceback.

    Without them, Ctrl-C during the imports would print the stack of every process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_signal)
        # launch.sh starts this process with SIGINT blocked until a handler is installed.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Without a handler, the kernel would not deliver these signals to the first process of a
    # container.
    for number in (signal.SIGTERM, *SAVE_AND_GO):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit_on_signal)


def is_unused(number: int) -> bool:
    """Return whether a signal has its default action or the handler of this module.

    Otherwise other code handles the signal, or it is ignored, as SIGHUP is under nohup.
    """
    return signal.getsignal(number) in (signal.SIG_DFL, exit_on_signal)
