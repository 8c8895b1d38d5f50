"""Save checkpoints in a thread while training continues.

Training copies its state to host memory, and a thread of each rank writes the copy. The threads use
no collectives, because these would mix with the collectives of training. Instead, each rank writes
a list of its files into the checkpoint's folder, and rank 0 seals the checkpoint when the lists of
all ranks exist. All ranks learn of a failed save at their next synchronization.
"""

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
from trainer.saving.checkpoint import OF_RANK, File, Rank, State, prune, seal, write_files
from trainer.saving.files import read_json, remove, report_write_errors, write_json
from trainer.saving.tensor_files import map_shards
from trainer.saving.weights import save_weights

# Maximum number of seconds that rank 0 waits for the files of other ranks if the run ends with an
# error. The other ranks may have failed before they wrote their files.
LEAVING = 3.0


@dataclass(frozen=True)
class Save:
    """Files that one rank writes at one step.

    Attributes:
        folder: run folder.
        draft: folder for the files of a checkpoint, which rank 0 has created. None if this save
            writes weights files only and no rank has shards.
        sealed: whether the draft becomes a checkpoint. If not, the draft, if any, is removed after
            the weights files have been assembled from it.
        state: tensors and shards that this rank writes, in host memory.
        peers: numbers of the other ranks that write into the draft.
        weights: metadata of each weights file by its path.
        evaluated: part of the state that the weights files contain: "model" or "ema".
        keep: number of newest checkpoints to keep.
        check: raises if nothing may be saved anymore.
        top_k: number of best checkpoints to keep besides.
        rank: see `prune`.
    """

    folder: Path
    draft: Path | None
    sealed: bool
    state: State
    peers: frozenset[int]
    weights: Mapping[Path, dict[str, str]]
    evaluated: str
    keep: int
    check: Callable[[], None]
    top_k: int
    rank: Rank


class Cost(NamedTuple):
    """Duration of a save.

    Attributes:
        step: optimizer step of the save.
        seconds: seconds from the request until the thread of this rank has completed the save.
        blocked: seconds during which training stood still.
    """

    step: int
    seconds: float
    blocked: float


class Saver:
    """Writer of checkpoints and weights files, in a thread that writes one save at a time.

    Attributes:
        rank: rank of this process.
        timeout: seconds that rank 0 waits for the files of other ranks after writing its own.
        error: exception of the save that failed; None if none has failed.
        committed: step of the newest checkpoint that this rank has written its files for, or has
            resumed from; 0 without either.
        costs: durations of the completed saves.
        blocked: seconds for which training stood still for the current save.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.error: Exception | None = None
        self.committed = 0
        self.costs: list[Cost] = []
        self.blocked = 0.0
        # Step and seconds of the save that the thread has completed.
        self._result: tuple[int, float]
        self._thread: threading.Thread | None = None
        self._draft: Path | None = None
        # Set when the run ends with an error: a clock that starts then, and the maximum number of
        # seconds to wait.
        self._leaving: tuple[AwakeClock, float] | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def to_host(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, so that training may change it during the save.

        The copy from a GPU is asynchronous, and its values are valid after a synchronization. The
        next save reuses the memory of the copy, so call `wait` before the next copy.

        Args:
            part: part of the state.
            name: name of the tensor in this part.
            tensor: tensor on any device.
        """
        buffer = self._buffers.get((part, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Only copies to pinned memory are asynchronous.
            is_pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
            self._buffers[part, name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def start(self, save: Save, begun: float) -> None:
        """Start writing a save.

        Args:
            save: what to write.
            begun: value of `time.perf_counter()` when the save was requested.
        """
        assert self._thread is None, "one save at a time"

        def work() -> None:
            try:
                with report_write_errors(save.folder):
                    self._write(save)
                step = save.state.position.step
                if save.sealed:
                    self.committed = step
                self._result = step, time.perf_counter() - begun
            # The error is stored, and all ranks raise it together at their next synchronization.
            except Exception as error:
                self.error = error

        self._draft = save.draft
        self._leaving = None
        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()
        # If a test injects a fault at a step, finish the save first, so that the test knows which
        # files exist when the fault occurs.
        if faults.is_at_step():
            self._thread.join()

    def wait(self) -> Cost | None:
        """Wait until the current save has ended.

        Returns:
            The durations of the save, or None if there was no save or a save has failed.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self.error:
            return None
        cost = Cost(*self._result, self.blocked)
        self.costs.append(cost)
        return cost

    def leave(self, patience: float = LEAVING) -> None:
        """Wait for the current save when the run ends with an error.

        Args:
            patience: seconds after which rank 0 gives up a checkpoint for which other ranks have
                not written their files.
        """
        self._leaving = AwakeClock(), patience
        self.wait()

    def remove_draft(self) -> None:
        """Remove the draft of a failed save on rank 0.

        Call it only after all ranks have stopped writing into the draft.
        """
        if self._draft is not None and self.rank == 0 and self.error is not None:
            remove(self._draft)

    def _write(self, save: Save) -> None:
        """Write the files of this rank. Rank 0 completes the save when all others have written.

        Without a draft, only the weights files are written. With a draft, rank 0 completes the save
        by writing the weights files. If `save.sealed` is true, it then seals the draft and removes
        older checkpoints. Otherwise, it removes the draft.
        """
        draft = save.draft
        if draft is None:
            _write_weights(save, save.state)
            return
        files = write_files(draft, save.state) if save.sealed or self.rank else {}
        if self.rank:
            entries = {name: file.model_dump() for name, file in files.items()}
            write_json(_list_path(self.rank, draft), entries)
            return
        for rank in sorted(save.peers):
            files |= self._collect_files(rank, draft)
        shards = {}
        for name in files:
            stem = Path(name).stem
            if OF_RANK.fullmatch(stem) and stem not in save.state.shards:
                shards[stem] = map_shards(draft / name)
        # Weights come before the seal, so that a kill at the end of a run leaves both a checkpoint
        # and its weights, or neither.
        _write_weights(save, replace(save.state, shards=shards | save.state.shards))
        if save.sealed:
            fresh = seal(draft, save.state, files, save.check)
            prune(fresh, save.keep, save.top_k, save.rank)
        else:
            remove(draft)

    def _collect_files(self, rank: int, draft: Path) -> dict[str, File]:
        """Wait for the files of another rank, and return their sizes and hashes by name.

        Raises:
            PeerError: the rank did not write its files in time.
            SetupError: this machine sees other sizes than those that the rank wrote.
        """
        path = _list_path(rank, draft)
        clock = AwakeClock()
        while not path.exists():
            is_late = clock.seconds() > self.timeout
            if self._leaving:
                leave_clock, patience = self._leaving
                is_late = is_late or leave_clock.seconds() > patience
            if is_late:
                raise PeerError(
                    f"rank {rank} did not write its part of a checkpoint within {self.timeout:g} s"
                )
            time.sleep(0.01)
        files = {name: File.model_validate(entry) for name, entry in read_json(path).items()}
        for name, entry in files.items():
            # A network file system may show this machine an older state of the folder, so compare
            # the sizes of the files.
            size = (draft / name).stat().st_size
            if size != entry.size:
                raise SetupError(
                    f"{draft / name} has {size} bytes here, and rank {rank} wrote {entry.size}"
                )
        remove(path)
        return files


def _list_path(rank: int, draft: Path) -> Path:
    """Return the path of the file in which a rank lists the files that it has written."""
    return draft / f"written-{rank:05d}.json"


def _write_weights(save: Save, state: State) -> None:
    for path, metadata in save.weights.items():
        save_weights(path, state.part(save.evaluated), metadata, save.check)
