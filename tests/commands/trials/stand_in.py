"""A stand-in for the processes of trials, in an empty folder: each writes at once the files of a
run with its arguments.
"""

import json
import math
import signal
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from trainer.commands.compare import entries

SPEEDS = {
    "single": 1000.0,
    "dp": 1000.0,
    "ddp": 1600.0,
    "split": 900.0,
    "pipeline": 1010.0,
    "local_sgd": 1700.0,
}


class Machine:
    """Starts stand-ins and records them."""

    def __init__(self):
        # folders, as "ddp/1" or "001-optimizer.lr=0.1", in the order in which they were started
        self.ran = []
        self.words, self.environments = [], []  # Arguments and environment of each run.
        self.at_once = self.most = 0
        # a part of a folder's name -> what happens there once instead: an exit code, a signal or an
        # exception
        self.faults = {}
        self.losses = {}  # mode -> factor
        # The factor where single's sums are in another order.
        self.rounding, self.device = (
            1.0,
            "cpu",
        )
        self.busy = ()  # Folders of runs during which other processes use the machine.
        self.noise = 0.003
        self.timed = True
        self.score = lambda words: (
            0.9
            - abs(math.log10(float(words.get("optimizer.lr", 0.1))) + 1) / 10
            + int(words.get("seed", 0)) / 1000
        )

    @contextmanager
    def started(self, command, environment, **streams):
        words = dict(word.split("=", 1) for word in command[3:])
        child = Child(self, words)
        self.ran.append(child.name)
        self.words.append(words)
        self.environments.append(environment)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        yield child
        self.at_once -= 1


class Child:
    """One simulated run."""

    def __init__(self, machine, words):
        self.machine, self.words, self.path = machine, words, Path(words["output"])
        inside = self.path.name.lstrip("-").isdigit()  # a repeat
        self.name = f"{self.path.parent.name}/{self.path.name}" if inside else self.path.name
        self.stopped = False
        self.code = None

    def poll(self):
        part = next((part for part in self.machine.faults if part in self.name), None)
        if self.code is None and part is not None:
            fault = self.machine.faults.pop(part)
            if isinstance(fault, signal.Signals):
                signal.raise_signal(fault)
            if isinstance(fault, BaseException):
                raise fault
            with self.path.with_name(f"{self.path.name}.log").open("a") as log:
                log.write(f"hello\ntrainer: error: broken {self.words['mode']}\n")
            self.code = self._end("failed", fault)
        elif self.code is None:
            self.code = self._end("preempted", 143) if self.stopped else self._end("completed", 0)
        return self.code

    def wait(self, timeout):
        return self.poll()

    def send_signal(self, number):
        assert number == signal.SIGTERM
        self.stopped = True

    def _end(self, status, code):
        machine = self.machine
        words = self.words
        mode = self.words["mode"]
        self.path.mkdir(parents=True, exist_ok=True)
        rate = SPEEDS.get(mode, 1000.0) * (
            1 + machine.noise * (crc32(f"{mode} {self.path.name}".encode()) % 5)
        )
        steps = int(words.get("max_steps", 8))
        every = int(words.get("logging.every_steps", 4))
        factor = (
            machine.rounding if words.get("accumulate") == "2" else machine.losses.get(mode, 1.0)
        )
        losses = [factor * 2.0 / step for step in range(1, steps + 1)]
        lines = ["step,epoch,seconds,train_loss,lr,samples_per_sec,skipped"]
        lines += [
            f"{n},0,{n / 10},{losses[n - 1]},0.1,{rate},0" for n in range(every, steps + 1, every)
        ]
        (self.path / "steps.csv").write_text("\n".join(lines) + "\n")
        for name in ("last.safetensors", "checkpoints/step-1/model"):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text("big")
        value = machine.score(words)
        result = {
            "status": status,
            "exit_code": code,
            "error": "it broke",
            "seconds": 1.0,
            "steps": steps,
            "batch_size": 32,
            "epochs": 4,
            "train_loss": losses[-1],
            "val_loss": 1.0,
            "val_top1": value,
            "best_top1": value,
            "seconds_in": {"steps": 1.0},
            "data_wait_fraction": 0.0,
            "step_time_s": {"mean": 32 / rate},
            "devices": [f"{machine.device}:{n}" for n in range(1 if mode == "single" else 2)],
            "data": {"train_samples": 1437, "val_samples": 360, "synthetic": False},
            "throughput": {"samples_per_sec": rate} if machine.timed else None,
            "peak_memory_bytes": {"cpu:0": 2**30},
            "versions": {"torch": "2"},
            "shares": [24, 8] if "shares" in words else None,
            "data_parallel": {"pass_through": True} if mode == "dp" else None,
        }
        (self.path / "result.json").write_text(json.dumps(result))
        return code


SMALL = ["model.name=cnn_gn", "devices=[cpu,cpu]", "batch_size=32", "optimizer.lr=0.01"]


def listed(*words, modes=None, **options):
    """Entries on a small model, by name."""
    return {
        entry.name: entry
        for entry in entries.build_entries("digits", [*SMALL, *words], modes, **options)
    }
