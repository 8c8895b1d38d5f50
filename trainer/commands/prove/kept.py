"""The proof's folder: held under a lock, bound to one machine, and every outcome in it as soon as there is one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import trainer
from trainer.commands.prove.outcome import Outcome
from trainer.devices import cards
from trainer.errors import FolderInUseError
from trainer.saving import locks
from trainer.saving.files import read, usable_json
from trainer.saving.run_folder import write_atomically

HOME = Path("runs/proof")
KEPT = "kept.json"
DONE = ("right", "measured")  # all else is tried again


def bound_to(machine: Mapping[str, Any], versions: Mapping[str, Any], devices: tuple[str, ...]) -> dict[str, str]:
    """What a proof is of. The machine is told by digests alone: the file may be given away."""
    who = [machine, _read("/etc/machine-id"), _cards()]
    software = [versions, [hashlib.sha256(path.read_bytes()).hexdigest() for path in _sources()]]
    return {"machine": _digest(who), "versions": _digest(software), "devices": ",".join(devices)}


def _sources() -> list[Path]:
    return sorted(Path(trainer.__file__).parent.rglob("*.py"))


def _cards() -> list[str]:
    import torch

    return [str(getattr(torch.cuda.get_device_properties(n), "uuid", n)) for n in range(cards.look().count)]


def _read(path: str) -> str:
    with suppress(OSError):
        return read(path).decode(errors="replace")
    return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


@contextmanager
def claim(output: str | None, bound: Mapping[str, str]) -> Iterator[Kept]:
    """The folder and what was done in it before.

    Raises:
        FolderInUseError: `output` is the proof of something else, or no proof, or another process is at it.
        SetupError: it cannot be written.
    """
    path, number = Path(output).expanduser() if output else HOME, 1
    while not output and _others(path, bound):  # of another machine, or before an update
        number += 1
        path = HOME.with_name(f"{HOME.name}-{number}")
    lock = locks.hold(path, "proof")
    try:
        if (what := _others(path, bound)) is not None:
            raise FolderInUseError(f"{path} holds {what}: choose another output=")
        yield Kept(path, dict(bound))
    finally:
        os.close(lock)


def _others(path: Path, bound: Mapping[str, str]) -> str | None:
    """What else the folder holds; None where it is free, or this very proof."""
    if not (path / KEPT).exists():
        used = path.is_dir() and any(name != ".lock" for name in os.listdir(path))
        return "something else than a proof" if used else None
    was = usable_json(path / KEPT).get("bound")
    was = was if isinstance(was, dict) else {}
    changed = [key for key in bound if was.get(key) != bound[key]]
    return f"the proof of other {' and '.join(changed)}" if changed else None


class Kept:
    """Outcomes by the checks' names, written at once."""

    def __init__(self, folder: Path, bound: dict[str, str]) -> None:
        self.folder, self._bound = folder, bound
        found = usable_json(folder / KEPT).get("checks")
        self.checks: dict[str, dict[str, Any]] = {
            name: row for name, row in (found if isinstance(found, dict) else {}).items() if _is_row(row)
        }
        self._write()

    def outcomes(self, *statuses: str) -> dict[str, Outcome]:
        """Of the checks that were done, with one of these statuses or any."""
        return {
            name: Outcome(row["status"], row["line"], row["todo"], row["figures"])
            for name, row in self.checks.items()
            if not statuses or row["status"] in statuses
        }

    def seconds(self, name: str) -> float:
        return float(self.checks[name]["seconds"]) if name in self.checks else 0.0

    def keep(self, name: str, outcome: Outcome, seconds: float) -> None:
        row = {"status": outcome.status, "line": outcome.line, "todo": outcome.todo, "figures": dict(outcome.figures)}
        self.checks[name] = {**row, "seconds": round(seconds, 1)}
        self._write()

    def start_over(self) -> None:
        """Runs of a proof that found something wrong are not to be held against new ones."""
        for name in ("runs", "measured", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write(self) -> None:
        write_atomically(self.folder / KEPT, json.dumps({"bound": self._bound, "checks": self.checks}, indent=1) + "\n")


def _is_row(row: Any) -> bool:
    kinds = {"status": str, "line": str, "todo": str, "figures": dict, "seconds": int | float}
    return isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in kinds.items())
