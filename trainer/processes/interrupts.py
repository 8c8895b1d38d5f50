"""Handle signals that ask a run to save and exit.

A signal sets a flag, and the ranks agree on the flag at the end of a step. This does not work if
Python is inside a collective and waits for a peer that is gone, because signal handlers cannot run
then. A watcher thread therefore receives signals through a socket, waits for the end of the step,
and after a timeout writes the stacks of all threads and exits. If the watcher thread cannot run
either, the watchdog process kills the rank.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer.errors import Interrupted, Preempted
from trainer.processes import early, family, silence, stacks
from trainer.processes.rank import read_place
from trainer.processes.terminal import escape_control_characters
from trainer.processes.watchdog_process import WATCHDOG_SIGNAL

ALWAYS = (signal.SIGINT, signal.SIGTERM)
# Signals that are handled only if no other code handles them, and if they are not ignored (nohup
# ignores SIGHUP).
IF_UNUSED = early.SAVE_AND_GO
# Seconds beyond `grace` that the launcher grants its ranks for saving, before it sends SIGKILL.
SAVE_SECONDS = 30.0
# Seconds that a step may still take after a signal if a checkpoint contains all trained steps.
IDLE_GRACE_SECONDS = 2.0
# Seconds after a signal or the last step, whichever is later, until the watcher thread ends this
# process if a peer is gone.
LOST_PEER_SECONDS = 4.0
# Seconds that are reserved for saving before torchrun sends SIGKILL.
SAVE_RESERVE = 5.0
# Signal that `trainer.train` sends to our launcher at the user's second Ctrl-C.
SECOND_CTRL_C = WATCHDOG_SIGNAL
PROGRAM = Path(__file__).with_name("watchdog_process.py")
# Set if this process has abandoned work for which Python's own shutdown would wait, maybe forever.
skips_shutdown = threading.Event()


class Watchdog:
    """Small process that kills this rank if the rank's Python code cannot run.

    The program of the process is `watchdog_process`. It runs between `start` and `stop`, and does
    not kill a rank that has not received a signal or that is saving.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wakeup: socket.socket, signals: Iterable[int], grace: float) -> None:
        """Start the process.

        Args:
            wakeup: socket to which Python writes the numbers of signals.
            signals: signals that ask the rank to exit.
            grace: seconds for which a call may keep the rank's Python from running after a signal,
                while all peers are alive.
        """
        arguments = [wakeup.fileno(), os.getpid(), grace, *map(int, signals)]
        # Python starts in 20 ms with -S, which skips site-packages.
        command = [sys.executable, "-P", "-S", str(PROGRAM), *map(str, arguments)]
        # If the system has reached its limit of processes, the rank trains without a watchdog.
        with suppress(OSError):
            self._process = family.start_companion(command, wakeup.fileno(), signals)

    def send(self, line: str) -> None:
        """Report the state of this rank to the process.

        Args:
            line: one of four reports. The process ids of all ranks on this machine are sent once,
                in the first `Interrupts.beat`. "alive" is sent repeatedly after a signal, as long
                as Python runs. "saving" is sent at the start of a save, and "saved" at its end.
        """
        if self._process is not None and self._process.stdin is not None:
            # Writing fails if the user or the system has killed the process.
            with suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def exit_code(number: int) -> int:
    """Return the exit code of a run that a signal has stopped.

    The code is 130 for Ctrl-C, 131 for SIGQUIT and 143 for all other signals.
    """
    if number not in (signal.SIGINT, signal.SIGQUIT):
        number = signal.SIGTERM
    return 128 + number


class Interrupts:
    """Context manager that lets signals set a flag instead of ending the process.

    A second Ctrl-C ends the process immediately. Other repeated signals are ignored, because
    schedulers and launchers repeat them. Before the first `beat`, there is nothing to save, so any
    signal ends the process immediately. If a checkpoint contains all trained steps, a signal ends
    the process unless a step ends within two seconds. The process does not wait longer in this
    case, because the step may need minutes to compile.

    If `own_process` is False, the process is never ended: a second Ctrl-C, or any signal before the
    first `beat`, raises KeyboardInterrupt. Outside the main thread, such as in a thread of a
    notebook, nothing is installed.

    Attributes:
        received: first signal that was received; None before a signal.
        own_process: whether this process belongs to the run, so that it may exit.
        grace: seconds that a step may still take after a signal.
        nothing_new: function that returns whether a checkpoint contains all trained steps.
        last_words: function that is called with the cause before this process exits.
    """

    def __init__(self, own_process: bool, grace: float) -> None:
        """Prepare the context manager, which handles signals within its block only.

        Args:
            own_process: whether this process may exit. In the user's program, a second Ctrl-C
                raises KeyboardInterrupt instead.
            grace: seconds that a step may still take after a signal. If torchrun would kill this
                process earlier, the attribute `grace` is smaller.
        """
        self.received: signal.Signals | None = None
        self.own_process = own_process
        self._requested_grace = grace
        self.grace = min(grace, seconds_to_sigkill() - SAVE_RESERVE)
        # Time of the last `beat`. 0 means that there was none.
        self._beat = 0.0
        self._peers: set[int] = set()
        self._suspended = False
        self._has_warned = False
        self.nothing_new: Callable[[], bool] = lambda: False
        self.last_words: Callable[[str], None] = lambda cause: None
        self._watchdog = Watchdog()
        self._done = False
        self._ctrl_c = early.CtrlC(ctrl_c_routes())
        self._parent = os.getppid()

    def __enter__(self) -> Interrupts:
        self._handlers = {number: signal.signal(number, self._handle) for number in stop_signals()}
        if not self._handlers:
            return self
        if self.own_process:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            if read_place().size > 1:
                self._watchdog.start(self._reader, self._handlers, self.grace)
            # torchrun dies if it receives a signal that it does not handle (SIGUSR1 and SIGUSR2
            # unless it was started with --signals-to-handle), or three signals that it handles. Ask
            # the kernel for a SIGTERM at that time, so that this rank still saves.
            if read_place().launched and not family.launcher_prints():
                family.die_with_parent(number=signal.SIGTERM)
            self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._thread.start()
            if signal.getsignal(family.STACKS) is signal.SIG_DFL:
                # Without stderr, which a daemon may have closed, stacks cannot be written.
                with suppress(AttributeError, ValueError, OSError):
                    faulthandler.register(family.STACKS)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._handlers:
            return
        # A late copy of the signal must not end the process while it writes its results.
        is_ending = self.own_process and self.received is not None
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if is_ending else handler)
        if is_ending and read_place().launched:
            # The kernel reports the death of torchrun as SIGTERM, which is ignored now. The alarm
            # ends a rank that hangs and would outlive torchrun.
            signal.alarm(math.ceil(seconds_to_sigkill()))
        if not self.own_process:
            return
        faulthandler.unregister(family.STACKS)
        signal.set_wakeup_fd(self._wakeup)
        self._done = True
        os.write(self._writer.fileno(), b"\0")
        self._thread.join()
        self._watchdog.stop()
        self._reader.close()
        self._writer.close()
        if kind is None and self.received is not None and family.launcher_prints():
            # torch would wait until the launcher has read a result, but the launcher is exiting.
            exit_now(exit_code(self.received))

    def beat(self) -> None:
        """Record the end of a step. After the first call, a run has something to save."""
        if not self._beat:
            living = family.living_ranks()
            self._peers = set(living)
            self._watchdog.send(" ".join(str(pid) for pid, _ in living.values()))
        self._beat = time.monotonic()

    def too_slow(self, step_seconds: float, save_seconds: float = 0.0) -> str:
        """Return a warning, once, if the time after a signal is too short for a step and a save.

        A save that is in progress when the signal arrives is completed first, so two saves count.

        Args:
            step_seconds: duration of a step in seconds.
            save_seconds: duration of a save in seconds.

        Returns:
            The warning, or an empty string if the time is long enough or a warning was returned
            before.
        """
        sigkill = seconds_to_sigkill()
        available = min(self.grace + SAVE_SECONDS, sigkill)
        needed = step_seconds + 2 * save_seconds
        if self._has_warned or (step_seconds <= self.grace and needed <= available):
            return ""
        self._has_warned = True
        grace = math.ceil(max(2 * step_seconds, needed - SAVE_SECONDS))
        advice = f"type grace={grace}"
        # Our launcher derives its timeout from `grace`, but the user's torchrun needs a variable.
        is_from_grace = family.launcher_prints() and sigkill >= self._requested_grace + SAVE_SECONDS
        if sigkill < grace + SAVE_SECONDS and not is_from_grace:
            advice += (
                f" and set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={grace + SAVE_SECONDS:.0f} for torchrun, "
                f"which kills after {sigkill:g} s"
            )
        return (
            f"  a step takes {step_seconds:.0f} s (limit after a signal: {self.grace:g} s), and "
            f"with two saves of {save_seconds:.0f} s, one of which may be in progress, "
            f"{needed:.0f} s (limit: {available:g} s). Above a limit the run ends without saving: "
            f"{advice}"
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Suspend the time limits after a signal during this block, which saves.

        If the save waits for a rank that is gone, the watcher thread still ends this process.
        """
        self._suspended = True
        self._watchdog.send("saving")
        try:
            yield
        finally:
            self._suspended = False
            self._watchdog.send("saved")
            self.beat()

    def _handle(self, number: int, _: FrameType | None) -> None:
        first = self.received
        if first is None:
            self.received = signal.Signals(number)
        # If this process belongs to the run, the watcher thread counts the signals. The thread sees
        # each signal immediately, whereas a long call delays this handler.
        if self.own_process:
            return
        ends_early = first is None and not self._beat
        if self._is_second_ctrl_c(number) or ends_early:
            raise KeyboardInterrupt

    def _is_second_ctrl_c(self, number: int) -> bool:
        # The kernel reports the death of torchrun as SIGTERM (see `__enter__`), so SIGTERM is no
        # longer a copy of a Ctrl-C.
        if os.getppid() != self._parent:
            self._ctrl_c.routes.pop(signal.SIGTERM, None)
        return self._ctrl_c.is_second(number)

    def _watch(self) -> None:
        first = None
        received_at = 0.0
        while not self._done:
            poll_seconds = None if first is None else 0.05
            readable, _, _ = select.select([self._reader], [], [], poll_seconds)
            if readable:
                # The socket receives a byte for every signal with a handler, including SIGCHLD of
                # DataLoader and signals of plugins. The first `recv` leaves the bytes in the
                # socket, where the watchdog sees them too. They are removed only after this `recv`
                # has returned, which needs Python's lock (GIL) and so proves that Python can run.
                waiting = self._reader.recv(1 << 12, socket.MSG_PEEK)
                arrived = [number for number in waiting if number in self._handlers]
                if arrived:
                    self._watchdog.send("alive")
                self._reader.recv(len(waiting))
                for number in arrived:
                    if self._is_second_ctrl_c(number):
                        self.last_words(signal.SIGINT.name)
                        exit_now(exit_code(signal.SIGINT))
                    if first is None:
                        first = number
                        received_at = time.monotonic()
            if first is None:
                continue
            self._watchdog.send("alive")
            waited = time.monotonic() - max(received_at, self._beat)
            stopped_by = signal.Signals(first)
            if not self._suspended:
                if not self._beat or (waited > IDLE_GRACE_SECONDS and self.nothing_new()):
                    self._leave(stopped_by, "")
                if waited > self.grace:
                    self._leave(stopped_by, f"no step's end within {self.grace:g} s")
            # A rank that is saving and does not wait for other ranks completes its files.
            elif not silence.is_waiting():
                continue
            if waited <= LOST_PEER_SECONDS:
                continue
            # Neither a step nor a save that waits for other ranks can complete if a peer is gone.
            lost_ranks = self._peers - set(family.living_ranks())
            if lost_ranks:
                self._leave(stopped_by, f"rank {min(lost_ranks)} is gone")

    def _leave(self, number: signal.Signals, why: str) -> NoReturn:
        rank = read_place().rank
        cause = f"{why} after {number.name}" if why else number.name
        self.last_words(cause)
        if why:
            where = stacks.dump(cause)
            line = f"rank {rank}: {cause}; leaving without saving{where}"
            print(f"trainer: {escape_control_characters(line)}", file=sys.stderr)
        # Our launcher prints this itself, unless it sent the signal because another rank failed.
        elif rank == 0 and not family.launcher_prints():
            print(f"trainer: stopped by {number.name} with nothing new to save", file=sys.stderr)
        exit_now(exit_code(number))


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run.

    The list is empty outside the main thread, because only that thread can install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [*ALWAYS, *(number for number in IF_UNUSED if early.is_unused(number))]


def ctrl_c_routes() -> dict[int, int]:
    """Return the argument `routes` of `early.CtrlC` for this process.

    A rank may receive a Ctrl-C from outside (`srun`, a terminal) and from its launcher. The second
    copy may arrive seconds later on a busy machine, so time alone cannot identify a second Ctrl-C.
    torchrun forwards the first SIGINT as SIGINT and the second one as SIGTERM. If a process of
    `trainer` started this process, the result is empty, because the parent counts instead: our
    launcher kills its ranks at the second Ctrl-C, and `trainer.train(nproc=)` sends `SECOND_CTRL_C`
    to the launcher.
    """
    if family.PARENT in os.environ:
        return {}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return {signal.SIGINT: 2, signal.SIGTERM: 1}
    return {signal.SIGINT: 2 if read_place().launched else 1}


def seconds_to_sigkill() -> float:
    """Return the number of seconds from torchrun's SIGTERM to its SIGKILL.

    The result is infinity if no launcher started this process.
    """
    if not read_place().launched:
        return float("inf")
    setting = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(setting) if setting.isdigit() else 30.0


def raise_at_ctrl_c() -> None:
    """Install a SIGINT handler that raises KeyboardInterrupt, but ignores copies of a Ctrl-C.

    Nothing is installed outside the main thread, or if SIGINT is ignored.
    """
    ctrl_c = early.CtrlC({signal.SIGINT: 1})

    def interrupt(number: int, frame: FrameType | None) -> None:
        if ctrl_c.is_new():
            raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def install_handler(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle `numbers` with `handler` during this block, then restore the previous handlers."""
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextmanager
def stop_between_runs(then: str) -> Iterator[None]:
    """Interrupt this block at a signal, and raise an error that says how to continue.

    Inside the block, each signal of `stop_signals` raises KeyboardInterrupt, as Ctrl-C does. The
    block is a command that keeps the results of completed runs. When the user types the same
    command again, it continues with the runs that are missing.

    Args:
        then: end of the error's message, which follows the name of the signal.

    Raises:
        Interrupted: the user pressed Ctrl-C.
        Preempted: another of these signals arrived.
    """
    numbers = [number for number in stop_signals() if number != signal.SIGINT]
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # Schedulers repeat a signal. The copies must not interrupt runs that are saving now.
        if not received:
            received.append(number)
            # Do not raise Preempted here: an `except Exception` in the interrupted code would catch
            # it, and the command would continue.
            raise KeyboardInterrupt

    try:
        with install_handler(numbers, stop):
            yield
    except KeyboardInterrupt:
        if received:
            raise Preempted(f"stopped by {signal.Signals(received[0]).name}; {then}") from None
        raise Interrupted(f"stopped by Ctrl-C; {then}") from None


def exit_now(code: int) -> NoReturn:
    """Exit without the shutdown of the interpreter, which aborts if threads of gloo still run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def exit_python(code: int) -> None:
    """Exit as `sys.exit` does, but skip the shutdown of torch, which takes a second.

    The shutdown is not skipped if another non-daemon thread runs, or if a profiler or a coverage
    tool reports during the shutdown.
    """
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    is_alone = threads == [threading.main_thread()]
    if "torch" in sys.modules and is_alone and not _is_profiled():
        atexit._run_exitfuncs()
        exit_now(code)
    sys.exit(code)


def _is_profiled() -> bool:
    """Return whether a profiler or a coverage tool is active."""
    # Python 3.11 does not have `sys.monitoring`, so only the older hooks are checked there.
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None and any(monitoring.get_tool(number) for number in range(6)):
        return True
    return sys.gettrace() is not None or sys.getprofile() is not None
