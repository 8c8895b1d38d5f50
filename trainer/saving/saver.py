"""Saving beside training: what was copied at a step is written by a thread of each rank, while the rank trains on.

Nothing here is collective. A rank that has written its files says so by one more, in the same folder; rank 0 seals the
checkpoint once all have. That a save failed is heard by all ranks when they synchronise next.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.errors import PeerError, SetupError
from trainer.processes import faults
from trainer.processes.silence import AwakeClock
from trainer.saving.checkpoint import OF_RANK, File, State, prune, seal, write_files
from trainer.saving.files import read_json, remove, write_atomically, writing
from trainer.saving.tensor_files import mapped_pieces
from trainer.saving.weights import save_weights

LEAVING = 3.0  # seconds that other ranks' files are waited for once this one ends with an error


@dataclass(frozen=True)
class Save:
    """What a rank writes of one step."""

    folder: Path  # of the run
    draft: Path | None  # where files of a checkpoint go, which rank 0 has made; None where none are needed
    sealed: bool  # whether the draft becomes a checkpoint, and is not only read for files of weights
    state: State  # what this rank has of it, in host memory
    peers: frozenset[int]  # the other ranks that write into the draft
    weights: Mapping[Path, dict[str, str]]  # the files of weights, and each one's metadata
    evaluated: str  # the part of the state that they hold
    keep: int  # checkpoints
    check: Callable[[], None]  # raises where nothing may be saved any more


class Cost(NamedTuple):
    """What a save took: seconds until its files had their names, and for which training stood still."""

    step: int
    seconds: float
    blocked: float


class Saver:
    """Writes one save at a time, in a thread."""

    def __init__(self, rank: int, timeout: float) -> None:
        """`timeout`: seconds that rank 0 waits for the files of the others once it has written its own."""
        self.rank, self.timeout = rank, timeout
        self.error: Exception | None = None  # why the last save failed
        self.committed = 0  # the step of the newest checkpoint, as far as this rank wrote it
        self.costs: list[Cost] = []  # of each save that is done
        self.blocked = 0.0  # seconds for which training stood still for it
        self._took: tuple[int, float]
        self._thread: threading.Thread | None = None
        self._draft: Path | None = None
        self._left: tuple[AwakeClock, float] | None = None  # since the ranks end with an error, and for how long
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def to_host(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """A copy in host memory that stays as it is while training goes on; of a GPU's tensor, once it is synchronised.

        Its memory, pinned for a GPU, is used again by the next save: `wait` for the one before.
        """
        buffer = self._buffers.get((part, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = self._buffers[part, name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def start(self, save: Save, begun: float) -> None:
        """Write `save`; `begun` is `time.perf_counter()` of when it was asked for."""
        assert self._thread is None, "one save at a time"

        def work() -> None:
            try:
                with writing(save.folder):
                    self._write(save)
                self.committed = save.state.position.step if save.sealed else self.committed
                self._took = save.state.position.step, time.perf_counter() - begun
            except Exception as error:  # raised where the ranks synchronise
                self.error = error

        self._draft, self._left = save.draft, None
        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()
        if faults.at_a_step():  # a test is to know what is there when it strikes
            self._thread.join()

    def wait(self) -> Cost | None:
        """Until nothing is being written; what it took, where something was."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self.error is not None:
            return None
        self.costs.append(Cost(*self._took, self.blocked))
        return self.costs[-1]

    def leave(self, patience: float = LEAVING) -> None:
        """As `wait`, where ranks end with an error: what others have not written in so many seconds is given up."""
        self._left = AwakeClock(), patience
        self.wait()

    def remove_draft(self) -> None:
        """On rank 0, once no rank writes into it any more: that of a save that failed."""
        if self._draft is not None and self.rank == 0 and self.error is not None:
            remove(self._draft)

    def _write(self, save: Save) -> None:
        if self.rank:
            assert save.draft is not None
            files = write_files(save.draft, save.state)
            listed = {name: file.model_dump() for name, file in files.items()}
            write_atomically(_list_of(self.rank, save.draft), json.dumps(listed))
        elif save.draft is None:
            _write_weights(save, save.state)
        else:
            self._write_all(save, save.draft)

    def _write_all(self, save: Save, draft: Path) -> None:
        """On rank 0: files of weights come before the seal, so that a finished run which is killed has both or none."""
        files = write_files(draft, save.state) if save.sealed else {}
        for rank in sorted(save.peers):
            files |= self._files_of(rank, draft)
        of_peers = {Path(name).stem: draft / name for name in files if OF_RANK.fullmatch(Path(name).stem)}
        theirs = {stem: mapped_pieces(path) for stem, path in of_peers.items() if stem not in save.state.pieces}
        _write_weights(save, replace(save.state, pieces=theirs | save.state.pieces))
        if save.sealed:
            prune(seal(draft, save.state, files, save.check), save.keep)
        else:
            remove(draft)

    def _files_of(self, rank: int, draft: Path) -> dict[str, File]:
        """What another rank has written, once it has. Raises PeerError where that takes too long, and SetupError where
        this machine sees it otherwise."""
        path, clock = _list_of(rank, draft), AwakeClock()
        while not path.exists():
            limits = [(clock, self.timeout), *([self._left] if self._left else [])]
            if any(clock.seconds() > limit for clock, limit in limits):
                raise PeerError(f"rank {rank} did not write its part of a checkpoint within {self.timeout:g} s")
            time.sleep(0.01)
        files = {name: File.model_validate(entry) for name, entry in read_json(path).items()}
        for name, entry in files.items():
            if (size := (draft / name).stat().st_size) != entry.size:
                raise SetupError(f"{draft / name} has {size} bytes here, and rank {rank} wrote {entry.size}")
        remove(path)
        return files


def _list_of(rank: int, draft: Path) -> Path:
    """The file by which a rank says what it has written."""
    return draft / f"written-{rank:05d}.json"


def _write_weights(save: Save, state: State) -> None:
    for path, metadata in save.weights.items():
        save_weights(path, state.part(save.evaluated), metadata, save.check)
