"""Signals: a flag that the loop agrees on at a step's boundary, and a watcher for when the loop cannot come.

A handler never runs while Python waits inside a collective for a peer that is gone. The watcher thread learns of the
signal through a socket, gives the loop time to reach a boundary, and otherwise dumps the stacks and leaves. Where that
thread cannot run either, the `watchdog` ends the rank.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trainer.errors import Interrupted, Preempted
from trainer.processes import early, family, silence, stacks
from trainer.processes.rank import place
from trainer.processes.terminal import plain
from trainer.processes.watchdog_process import GIVEN_UP

ALWAYS = (signal.SIGINT, signal.SIGTERM)
IF_UNUSED = early.SAVE_AND_GO  # unless ignored (nohup), or a user's program has a handler of its own
GRACE = 60.0  # seconds, the default of the recipe's `grace`
SAVING = 30.0  # seconds that ranks get beyond the recipe's `grace` for saving, before SIGKILL
PROMPT = 2.0  # seconds that a step may still take where nothing was trained since the last checkpoint
SHORTEST = 4.0  # seconds from a signal, or the last boundary, until the watcher leaves when a peer is gone
LEAVING = 5.0  # seconds that are left for saving when the launcher will kill
PROGRAM = Path(__file__).with_name("watchdog_process.py")
stuck = threading.Event()  # something was given up that Python's own end would wait for, perhaps for ever


class Watchdog:
    """A small process beside the rank that ends it when its Python cannot run (see `watchdog_process`).

    Before `start` and after `stop` it does nothing. It never ends a rank without a signal, nor one that saves.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, wakeup: socket.socket, signals: Iterable[int], grace: float) -> None:
        """`signals`: those that count; `grace`: seconds that a call may last after one while all peers live."""
        words = [wakeup.fileno(), os.getpid(), grace, *map(int, signals)]
        command = [sys.executable, "-P", "-S", str(PROGRAM), *map(str, words)]  # -S: in 20 ms, without site-packages
        with suppress(OSError):  # the system has no process left: the rank trains without
            self._process = family.start_beside(command, wakeup.fileno(), signals)

    def send(self, line: str) -> None:
        """`alive` after a signal, `saving` and `saved`, or the process ids of all ranks here once training begins."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it was ended from outside
                self._process.stdin.write(f"{line}\n".encode())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def exit_code(number: int) -> int:
    """Of a run that a signal ended: 130 for Ctrl-C, 143 for all others that mean save and go."""
    graceful = number in (signal.SIGTERM, GIVEN_UP, *IF_UNUSED)
    return 128 + (signal.SIGTERM if graceful else number)


class Interrupts:
    """Within this block signals raise a flag instead of ending the process; a second Ctrl-C ends it at once.

    Under torchrun a second Ctrl-C arrives as SIGTERM, so SIGTERM after SIGINT ends at once too; a repeated SIGTERM does
    not. Before the first `beat` there is nothing to save and a signal ends the process at once; later on, where a
    checkpoint holds all that was trained, after two seconds without a boundary: a step may be compiled for minutes.
    Outside the main thread (a notebook's worker, say) nothing is installed.
    """

    def __init__(self, own_process: bool = True, grace: float = GRACE) -> None:
        """`own_process`: whether this process may end here; in a user's program a second Ctrl-C raises.
        `grace`: seconds that a step may still take after a signal."""
        self.received: signal.Signals | None = None
        self.own_process = own_process
        self._typed, self.grace = grace, min(grace, seconds_to_sigkill() - LEAVING)
        self._beat = 0.0  # never
        self._peers: set[int] = set()
        self._suspended = self._warned = False
        self.nothing_new: Callable[[], bool] = lambda: False  # whether a checkpoint holds all that was trained
        self.last_words: Callable[[str], None] = lambda cause: None  # called before this process ends here
        self._watchdog = Watchdog()
        self._done = False

    def __enter__(self) -> Interrupts:
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        free = [number for number in IF_UNUSED if early.unused(number)]
        self._handlers = {number: signal.signal(number, self._handle) for number in (*ALWAYS, *free)}
        if self.own_process:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            if place().size > 1:
                self._watchdog.start(self._reader, self._handlers, self.grace)
            self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._thread.start()
            if signal.getsignal(family.STACKS) is signal.SIG_DFL:
                with suppress(AttributeError, ValueError, OSError):  # stderr may be closed
                    faulthandler.register(family.STACKS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._installed:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
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
            exit_now(exit_code(self.received))  # a launcher that leaves takes no result, for which torch would wait

    def beat(self) -> None:
        """The loop is at a boundary: from the first on there is something to save."""
        if not self._beat:
            living = family.living_ranks()
            self._peers = set(living)
            self._watchdog.send(" ".join(str(pid) for pid, _ in living.values()))
        self._beat = time.monotonic()

    def too_slow(self, step_seconds: float, save_seconds: float = 0.0) -> str:
        """What to say, once, when a step takes longer than it may after a signal, or a save before SIGKILL: the save
        that is under way is waited for."""
        sigkill = seconds_to_sigkill()
        given, needed = min(self.grace + SAVING, sigkill), step_seconds + 2 * save_seconds
        if self._warned or (step_seconds <= self.grace and needed <= given):
            return ""
        self._warned = True
        wish = math.ceil(max(2 * step_seconds, needed - SAVING))
        advice = f"type grace={wish}"
        if sigkill < wish + SAVING and not (family.launcher_prints() and sigkill >= self._typed + SAVING):
            advice += f" and set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={wish + SAVING:.0f} for torchrun, which kills after "
            advice += f"{sigkill:g} s"
        return (
            f"  a step takes {step_seconds:.0f} s, of {self.grace:g} s after a signal, and with two saves of "
            f"{save_seconds:.0f} s, one of which may be under way, {needed:.0f} s, of {given:g} s; else the run ends "
            f"without saving: {advice}"
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this block the watcher waits, and the watchdog."""
        self._suspended = True
        self._watchdog.send("saving")
        try:
            yield
        finally:
            self._suspended = False
            self._watchdog.send("saved")
            self.beat()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is signal.SIGINT or (not self._beat and not self.own_process):
            if not self.own_process:
                raise KeyboardInterrupt
            self.last_words(signal.SIGINT.name)
            exit_now(128 + signal.SIGINT)
        if self.received is None:
            self.received = signal.Signals(number)

    def _watch(self) -> None:
        # A byte comes for every signal that has a handler: DataLoader's SIGCHLD, whatever a plugin installs.
        # A signal's own stays where the watchdog sees it.
        while (first := self._reader.recv(1, socket.MSG_PEEK)[0]) not in self._handlers:
            if self._done:
                return
            self._reader.recv(1)
        received_at = time.monotonic()
        while not self._done:
            self._watchdog.send("alive")
            waited = time.monotonic() - max(received_at, self._beat)
            if self._suspended and not silence.is_waiting():  # what this rank writes is written to its end
                pass
            elif self._suspended:
                self._leave_lost_peers(first, waited)
            elif not self._beat or (waited > PROMPT and self.nothing_new()):
                self._leave(signal.Signals(first), "")
            elif waited > self.grace:
                self._leave(signal.Signals(first), f"no step's end within {self.grace:g} s")
            else:
                self._leave_lost_peers(first, waited)
            time.sleep(0.05)

    def _leave_lost_peers(self, number: int, waited: float) -> None:
        """Leave if a peer is gone: no step, and no save that waits for other ranks, can end any more."""
        if waited > SHORTEST and (gone := self._peers - set(family.living_ranks())):
            self._leave(signal.Signals(number), f"rank {min(gone)} is gone")

    def _leave(self, number: signal.Signals, why: str) -> None:
        rank = place().rank
        self.last_words(f"{why} after {number.name}" if why else number.name)
        if why:
            where = stacks.dump(f"{why} after {number.name}")
            line = f"rank {rank}: {why} after {number.name}; leaving without saving{where}"
            print(f"trainer: {plain(line)}", file=sys.stderr)
        elif rank == 0 and not family.launcher_prints():  # which may have sent the signal, since another rank failed
            print(f"trainer: stopped by {number.name} with nothing new to save", file=sys.stderr)
        exit_now(exit_code(number))


def seconds_to_sigkill() -> float:
    """Seconds from torchrun's SIGTERM to its SIGKILL; without one, for ever."""
    if not place().launched:
        return float("inf")
    setting = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(setting) if setting.isdigit() else 30.0


def raise_at_ctrl_c() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, as ever in Python: this command has something to end."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def what_is_done_is_kept(then: str = "what was done is kept, and the same words continue it") -> Iterator[None]:
    """Within this block SIGTERM raises `Preempted`, as Ctrl-C does KeyboardInterrupt: for commands that keep the runs
    that ended, and go on with the same words.

    Raises:
        Interrupted, Preempted: one of the two came, with what to type.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Preempted("stopped by SIGTERM")

    main = threading.current_thread() is threading.main_thread()  # other threads of a program hear no signal
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield
    except (KeyboardInterrupt, Preempted) as error:
        how, kind = ("Ctrl-C", Interrupted) if isinstance(error, KeyboardInterrupt) else ("SIGTERM", Preempted)
        raise kind(f"stopped by {how}; {then}") from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def block_sigint_in_children() -> Iterator[None]:
    """Within this block Ctrl-C does not reach a new process until that asks for it, as `trainer.__main__` does.

    Before that, Python's own start would end in "Fatal Python error" and a traceback. A thread of this process receives
    it all along. The main thread's mask is what children inherit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done = threading.Event()
    threading.Thread(target=done.wait, name="receives Ctrl-C", daemon=True).start()  # with the mask as it was
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        done.set()


def exit_now(code: int) -> None:
    """End this process without the interpreter's shutdown, which aborts when gloo's threads still run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def exit_python(code: int) -> None:
    """End this process as Python does, but for the second that it takes to take torch apart."""
    waited_for = [thread for thread in threading.enumerate() if not thread.daemon]
    if "torch" in sys.modules and waited_for == [threading.main_thread()] and not _watched():
        atexit._run_exitfuncs()
        exit_now(code)
    sys.exit(code)


def _watched() -> bool:
    """Whether a profiler or a measurement of coverage runs, which has its word when this returns."""
    tools: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    seen = tools is not None and any(tools.get_tool(number) for number in range(6))
    return seen or sys.gettrace() is not None or sys.getprofile() is not None
