"""One machine and what is done on it: training runs by the command line and measuring processes, all fresh ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.commands.compare.running import Failed, failure_line, finished
from trainer.commands.prove.outcome import Outcome
from trainer.errors import PeerError
from trainer.processes import children
from trainer.saving.files import read_json, writing
from trainer.saving.run_folder import write_atomically

PATIENCE = 300.0  # seconds after which a run or a measurement is ended: it hangs
GRACE = 60.0  # seconds beyond its own patience that a run has to tell why
QUIET = ["logging.progress=false", f"timeout={PATIENCE - GRACE:g}"]


@dataclass(frozen=True)
class Devices:
    """What is proven: cards, or processes on the CPU that stand for them.

    Attributes:
        names: as recipes write them, one each.
        kind: "cuda" or "cpu".
        models: what the cards are called; of the CPU its name.
        threads: of each CPU process; None on cards.
    """

    names: tuple[str, ...]
    kind: str
    models: tuple[str, ...]
    threads: int | None = None

    @property
    def count(self) -> int:
        return len(self.names)

    def called(self, count: int) -> str:
        what = "GPU" if self.kind == "cuda" else "CPU process"
        return f"{count} {what}{'' if count == 1 else 's' if what == 'GPU' else 'es'}"

    def one(self) -> list[str]:
        """Words of a run on the first."""
        return [f"devices=[{self.names[0]}]", *self._threads()]

    def in_ranks(self, count: int) -> list[str]:
        """Words of a run with a process on each of the first `count`."""
        listed = ",".join(self.names[:count]) if self.kind == "cuda" else "cpu"
        return [f"devices=[{listed}]", f"nproc={count}", *self._threads()]

    def in_one_process(self, count: int) -> list[str]:
        """Words of a run in one process that drives `count`; a single device stands for several."""
        listed = [self.names[n % self.count] for n in range(count)]
        return [f"devices=[{','.join(listed)}]", *self._threads()]

    def _threads(self) -> list[str]:
        return [f"threads={self.threads}"] if self.threads else []


@dataclass
class Trip:
    """What the checks share."""

    folder: Path
    devices: Devices
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def figures(self, name: str) -> Mapping[str, Any]:
        """Of an earlier check; empty where it was not done."""
        found = self.outcomes.get(name)
        return found.figures if found is not None else {}

    def train(
        self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None, timed: bool = False
    ) -> dict[str, Any]:
        """result.json of a run with these words, which is started unless it has ended well before, or is `timed`: what
        is measured in turn with something else is measured anew. Its weights are not kept.

        Raises:
            Failed: it ended otherwise; `code` is its exit code.
        """
        path, command = self.path(name), [*QUIET, *words]
        if not timed and (done := finished(path, command)) is not None:
            return done
        with writing(self.folder, "type the same again"):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            write_atomically(path / "words.json", json.dumps(command) + "\n")
        code = self.trainer(name, [*command, f"output={path}"], environment)
        done = finished(path, command)
        if code or done is None:
            raise Failed(failure_line(self.log(name), code), code)
        if timed:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
            for weights in path.glob("*.safetensors"):
                weights.unlink()
        return done

    def trainer(self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """The exit code of `python -m trainer words...`, whose output goes into the log of `name`."""
        with writing(self.folder, "type the same again"):
            self.log(name).parent.mkdir(parents=True, exist_ok=True)
            log = self.log(name).open("w", encoding="utf-8")
        variables = {**os.environ, "NNODES": "1", **(environment or {})}  # whatever cluster this is a part of
        command = [sys.executable, "-m", "trainer", *words]
        with log, children.started(command, None, variables, subprocess.DEVNULL, log, subprocess.STDOUT) as child:
            try:
                code = child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise Failed(f"it did not end within {PATIENCE:.0f} s", PeerError.code) from None
        return code if code >= 0 else 128 - code

    def measure(self, what: str, count: int = 1, **asked: Any) -> list[dict[str, Any]]:
        """What `count` processes answer that measure at once, one on each device: a function of `probe`, by name.

        Raises:
            PeerError: one failed; the line is its own.
        """
        home = self.folder / "measured" / what
        with writing(self.folder, "type the same again"):
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            task = {"devices": self.devices.names[:count], "threads": self.devices.threads, **asked}
            write_atomically(home / "asked.json", json.dumps(task))
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "trainer.commands.prove.prove_probe", what, str(home)]
        log = self.log(f"measured-{what}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file, ExitStack() as all_end:
            started = [
                all_end.enter_context(
                    children.started(
                        [*command, str(rank)], None, environment, subprocess.DEVNULL, file, subprocess.STDOUT
                    )
                )
                for rank in range(count)
            ]
            end = time.monotonic() + PATIENCE
            while any(child.poll() is None for child in started) and not any(child.poll() for child in started):
                if time.monotonic() > end:
                    raise PeerError(f"measuring did not end within {PATIENCE:.0f} s")
                time.sleep(0.02)
        left = [home / f"{rank}.json" for rank in range(count)]
        answers = [read_json(path) for path in left if path.exists()]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors or len(answers) < count:
            raise PeerError(errors[0] if errors else failure_line(log, 1))
        return answers

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name.replace('/', '-')}.log"
