"""The proof's folder: held under a lock, bound to one machine, and every outcome in it as soon as there is one."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.commands.prove.check_runner import Outcome
from trainer.devices import cards
from trainer.errors import FolderInUseError
from trainer.saving import locks
from trainer.saving.files import read, usable_json, write_atomically

HOME = Path("runs/proof")
KEPT = "kept.json"
DONE = ("right", "measured")  # all else is tried again
ROW = TypeAdapter(Outcome)


def bound_to(machine: Mapping[str, Any], versions: Mapping[str, Any], devices: tuple[str, ...]) -> dict[str, str]:
    """What a proof belongs to. The machine is written as digests alone: the file may be given away."""
    import torch

    identity = b""
    with suppress(OSError):
        identity = read("/etc/machine-id")
    uuids = [str(getattr(torch.cuda.get_device_properties(n), "uuid", n)) for n in range(cards.detect().count)]
    sources = sorted(Path(str(importlib.resources.files("trainer"))).rglob("*.py"))
    software = [versions, [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources]]
    return {
        "machine": _digest([machine, identity.decode(errors="replace"), uuids]),
        "versions": _digest(software),
        "devices": ",".join(devices),
    }


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
    while not output and _in_use(path, bound):  # of another machine, or before an update
        number += 1
        path = HOME.with_name(f"{HOME.name}-{number}")
    lock = locks.hold(path, "proof")
    try:
        if (what := _in_use(path, bound)) is not None:
            raise FolderInUseError(f"{path} holds {what}: choose another output=")
        yield Kept(path, bound)
    finally:
        os.close(lock)


def _in_use(path: Path, bound: Mapping[str, str]) -> str | None:
    """What else the folder holds; None where it is free, or this very proof."""
    if not (path / KEPT).exists():
        used = path.is_dir() and any(name != ".lock" for name in os.listdir(path))
        return "something else than a proof" if used else None
    before = usable_json(path / KEPT).get("bound")
    before = before if isinstance(before, dict) else {}
    changed = [key for key in bound if before.get(key) != bound[key]]
    return f"the proof of other {' and '.join(changed)}" if changed else None


class Kept:
    """Outcomes by the checks' names, written at once."""

    def __init__(self, folder: Path, bound: Mapping[str, str]) -> None:
        self.folder, self._bound = folder, bound
        self.outcomes: dict[str, Outcome] = {}
        rows = usable_json(folder / KEPT).get("checks")
        for name, row in (rows if isinstance(rows, dict) else {}).items():
            with suppress(ValidationError):
                self.outcomes[name] = ROW.validate_python(row)
        self._write()

    def done(self) -> dict[str, Outcome]:
        """Those that are not tried again."""
        return {name: outcome for name, outcome in self.outcomes.items() if outcome.status in DONE}

    def keep(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        self._write()

    def start_over(self) -> None:
        """Remove the runs of a proof that found something wrong: new ones must not be compared with them."""
        for name in ("runs", "measured", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _write(self) -> None:
        rows = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        write_atomically(self.folder / KEPT, json.dumps({"bound": self._bound, "checks": rows}, indent=1) + "\n")
