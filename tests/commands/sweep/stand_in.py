"""A stand-in for the runs' processes: each look at one is an epoch, and its folder gets what a run writes."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EPOCHS = 4


class Machine:
    """Starts stand-ins, and knows what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []  # folders' names, in the order in which they were started
        self.words: list[dict[str, str]] = []
        self.at_once = self.most = 0
        self.faults: dict[str, Any] = {}  # a part of a folder's name -> an exit code, or an exception of a look at it
        self.score: Callable[[Mapping[str, str]], float] = lambda words: (
            0.9 - abs(math.log10(float(words.get("optimizer.lr", 0.1))) + 1) / 10 + int(words.get("seed", 0)) / 1000
        )

    @contextmanager
    def started(self, command: list[str], *options: Any) -> Iterator[Child]:
        words = dict(word.split("=", 1) for word in command[3:])
        child = Child(self, words)
        self.ran.append(child.path.name)
        self.words.append(words)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        yield child
        self.at_once -= 1


class Child:
    """One run."""

    def __init__(self, machine: Machine, words: Mapping[str, str]) -> None:
        self.machine, self.words, self.path = machine, words, Path(words["output"])
        self.epochs, self.stopped, self.returncode = 0, False, None
        self.path.mkdir(parents=True, exist_ok=True)

    def poll(self) -> int | None:
        if self.returncode is not None:
            return self.returncode
        fault = next((fault for part, fault in self.machine.faults.items() if part in self.path.name), None)
        if isinstance(fault, BaseException):
            raise fault
        if fault:
            self.path.with_name(f"{self.path.name}.log").write_text("trainer: error: it broke\n")
            return self._end("failed", fault)
        if self.stopped:
            return self._end("preempted", 143)
        self.epochs += 1
        return self._end("completed", 0) if self.epochs == EPOCHS else self._write("running", None)

    def wait(self, timeout: float) -> int | None:
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        assert number == signal.SIGTERM
        self.stopped = True

    def _end(self, status: str, code: int) -> int:
        self._write(status, code)
        self.returncode = code
        return code

    def _write(self, status: str, code: int | None) -> None:
        value = self.machine.score(self.words) * (0.5 + 0.5 * self.epochs / EPOCHS)
        result = {"status": status, "exit_code": code, "error": "it broke", "epochs": self.epochs, "seconds": 1.5}
        result |= {"val_top1": value, "best_top1": value if self.epochs else None}
        (self.path / "result.json").write_text(json.dumps(result))
