"""Worker processes as the parent sees them: a process, a pipe to it, and shared memory."""

import os
import signal
from collections import deque
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

from trainer.pool.transport import Message, Packed, fetch, new_slot, store
from trainer.pool.worker import Definition, Kind, main
from trainer.processes import family, fork_server

# Maximum number of tasks that a worker has: one that it computes, and the next one.
DEPTH = 2


class ProcessHandle:
    """A worker process.

    All methods must be called by the thread that starts the process. A process that is spawned dies
    with this thread, and a process that is forked dies with the fork server.

    Attributes:
        connection: the parent's end of the pipe.
        slots: shared memory for tasks and answers.
        free: indices of unused slots.
        lost: whether the process has closed its end of the pipe.
        waits_on: two objects for a selector; one becomes readable when the process answers or ends.
    """

    def __init__(
        self, context: Any, definition: Definition, device: str, threads: int, name: str
    ) -> None:
        """Start the process.

        Args:
            context: a context of multiprocessing.
            definition: the user's worker and its arguments.
            device: name of the device.
            threads: number of threads for torch.
            name: name of the process.
        """
        self.connection, theirs = context.Pipe()
        self.slots = [new_slot() for _ in range(DEPTH)]
        self.free = deque(range(DEPTH))
        self.lost = False
        arguments = (theirs, self.slots, definition, device, threads, dict(os.environ))
        self.process = context.Process(target=main, args=arguments, name=name)
        # Start the resource tracker before SIGINT is blocked, because starting it unblocks SIGINT.
        resource_tracker.ensure_running()
        # The child inherits the mask, so Ctrl-C cannot end it before it ignores SIGINT itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            fork_server.start_process(self.process)
        finally:
            theirs.close()
        self.waits_on = self.connection, self.process.sentinel

    def send(self, kind: Kind, packed: Packed) -> None:
        """Send a task to the process. A slot must be free."""
        number = self.free[0]
        extent = store(packed, self.slots[number])
        # The slot stays free if `store` fails.
        self.free.popleft()
        # An error means that the process has died, which `ended` reports.
        with suppress(OSError):
            self.connection.send(Message(extent, kind, number))

    def receive(self) -> list[tuple[Message, Packed]]:
        """Return all answers that have arrived, even if the process has ended in the meantime."""
        answers = []
        try:
            while self.connection.poll():
                message: Message = self.connection.recv()
                memory = self.slots[message.slot].reach(message.extent.end)
                packed = fetch(memory, message.extent, copy=True)
                if message.kind in (Kind.BATCH, Kind.JOB):
                    self.free.append(message.slot)
                answers.append((message, packed))
        except (EOFError, OSError):
            self.lost = True
        return answers

    def ended(self) -> str:
        """Return how the process ended, or that it closed its pipe.

        The string is empty while the process runs.
        """
        if self.lost:
            self.process.join(0.5)
        code = self.process.exitcode
        if code is None:
            return "it closed its pipe and still runs" if self.lost else ""
        return f"it {family.describe_exit(code)}"

    def kill(self, grace: float = 0.0) -> None:
        """Close the pipe, kill the process after `grace` seconds, and free its shared memory."""
        self.connection.close()
        self.process.join(grace)
        self.process.kill()
        self.process.join(2)
        # `close` raises if the killed process still runs, in a system call that cannot be
        # interrupted.
        with suppress(ValueError):
            self.process.close()
        self.slots.clear()
