"""Rows of predictions, written in order, and their folder, which one command holds.

While a rank works its rows are in part-<rank>; at the end rank 0 puts the parts together, complete or not there.
"""

from __future__ import annotations

import csv
import heapq
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from trainer.commands.predict.labelling import Labels
from trainer.commands.predict.sources import Item
from trainer.commands.predict.trained_model import TrainedOn
from trainer.errors import FolderInUseError
from trainer.processes.rank import place
from trainer.processes.terminal import say
from trainer.processes.world import World, lost_peers
from trainer.saving import locks
from trainer.saving.files import csv_text, draft_of, put, remove, set_aside, write_atomically, writing
from trainer.training import wrong_labels
from trainer.training.wrong_labels import Doubt

# label: the class that it is known to have.
COLUMNS = ("path", "class", "probability", "top5", "label", "label_probability", "error")
# Rows in all, unreadable images, rows given up, labelled ones, and those whose class is right.
COUNTS = ("images", "unreadable", "failed", "labelled", "right")
SYNC_SECONDS = 1.0
GAVE_UP = "gave up: "  # begins the error of an item on which workers failed
BLOCK = 2**24  # bytes of a part that travel at once
TOP5 = re.compile(r"(.*?)=([-+.e\d]+)(?:;|$)", re.DOTALL)  # in a cell of a CSV; names may hold both signs
MOST, LEAST = 3, 0.01  # classes of an image that are printed, and the least probability of all but the first


def writing_rows(folder: Path) -> AbstractContextManager[None]:
    """As `writing`, with what to type after a stop."""
    return writing(folder, "the same words label all images anew")


class PartFile:
    """One rank's rows, and what they add up to.

    Attributes:
        seen: images whose class is known and that were trained on; None where that is not known.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        kind: str,
        classes: Sequence[str],
        trained_on: TrainedOn | None = None,
    ) -> None:
        self.path, self.kind, self.classes = folder / f"part-{rank:04}", kind, classes
        self.counts = dict.fromkeys(COUNTS, 0)
        self._trained_on = trained_on
        self.seen = None if trained_on is None else 0
        with writing_rows(folder):
            set_aside(self.path)
            self._file = self.path.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        self._synced = time.monotonic()

    def write(self, item: Item, labels: Labels | None, error: str = "") -> None:
        """The next row; without `labels`, of an item that was given up because of `error`."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"path": item.path, "label": None if item.label is None else self.classes[item.label]}
        if labels is None:
            row["error"] = GAVE_UP + error
        elif labels.error:
            row["error"] = labels.error
        else:
            names = [self.classes[n] for n in labels.classes]
            top5 = [(name, float(f"{p:.6g}")) for name, p in zip(names, labels.probabilities, strict=True)]
            row |= {"class": top5[0][0], "probability": top5[0][1], "top5": top5}
            if labels.label_probability is not None:
                row["label_probability"] = float(f"{labels.label_probability:.6g}")
        self._count(row)
        with writing_rows(self.path.parent):
            self._file.write(self._line(row))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def _line(self, row: Mapping[str, Any]) -> str:
        if self.kind == "jsonl":
            return json.dumps(row, ensure_ascii=True) + "\n"
        top5 = ";".join(f"{name}={probability:g}" for name, probability in row["top5"] or ())
        cells = {**row, "top5": top5 or None}.values()
        # Of one line, whatever a path holds.
        return csv_text([[" ".join(value.splitlines()) if isinstance(value, str) else value for value in cells]])

    def _count(self, row: Mapping[str, Any]) -> None:
        self.counts["images"] += 1
        if row["error"]:
            given_up = row["error"].startswith(GAVE_UP)
            self.counts["failed"] += given_up
            self.counts["unreadable"] += not given_up
        if row["label"] and row["class"]:
            self.counts["labelled"] += 1
            self.counts["right"] += row["label"] == row["class"]
            if self.seen is not None and self._trained_on is not None:
                self.seen += row["path"] in self._trained_on

    def sync(self) -> None:
        """What was written survives whatever happens now."""
        with writing_rows(self.path.parent):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            with writing_rows(self.path.parent), self._file:
                self.sync()


def answers(final: Path, kind: str, probabilities: bool) -> list[str]:
    """A line for each row of a complete file: the image, and its classes with their `probabilities`, or its values."""
    lines = []
    for row in _whole(final, kind):
        pairs = row["top5"] or []
        if isinstance(pairs, str):
            pairs = [(name, float(number)) for name, number in TOP5.findall(pairs)]
        if probabilities:
            shown = [f"{name} {number:.0%}" for name, number in pairs[:1] + [p for p in pairs[1:] if p[1] >= LEAST]]
        else:
            shown = [f"{name} {number:.4g}" for name, number in pairs]
        lines.append((row["path"], "  ".join(shown[:MOST]) or row["error"]))
    width = max(len(path) for path, _ in lines)
    return [f"{path:{width}}  {shown}" for path, shown in lines]


def _whole(final: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The rows of a complete file."""
    with final.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        yield from map(json.loads, file) if kind == "jsonl" else csv.DictReader(file)


def write_worst(final: Path, kind: str) -> Path | None:
    """worst.csv beside a complete file, of the rows whose label has a probability; None: there are none."""
    known = (
        Doubt(row["path"], row["label"], row["class"], float(row["label_probability"]), float(row["probability"]))
        for row in _whole(final, kind)
        if row["label_probability"] not in (None, "")
    )
    worst = heapq.nsmallest(wrong_labels.ROWS, known, key=lambda row: row.label_probability)
    if not worst:
        return None
    path = final.with_name(wrong_labels.FILE)
    write_atomically(path, wrong_labels.table(worst))
    return path


def header(kind: str) -> str:
    """The first line of a file that puts parts together."""
    return ",".join(COLUMNS) + "\n" if kind == "csv" else ""


def claim(folder: Path) -> None:
    """Make the folder, and hold it as long as this process lives. Raises FolderInUseError, SetupError."""
    locks.hold(folder, "command", f".lock-{place().rank:04}")
    if (folder / "recipe.yaml").exists() or (folder / "result.json").exists():
        raise FolderInUseError(f"{folder} holds a training run; choose another output=")
    if any(os.path.lexists(folder / name) for name in ("predict.json", "predictions.csv", "predictions.jsonl")):
        raise FolderInUseError(f"{folder} holds predictions already; choose another output=")


def begin_anew(folder: Path) -> None:
    """Remove the parts that a killed command has left in a folder."""
    left = [path for path in folder.glob("part-[0-9][0-9][0-9][0-9]") if path.is_file()]
    for part in left:
        remove(part)
    if left:
        say(f"{folder} has parts of a command that was stopped: all images are labelled anew")


def put_together(world: World, folder: Path, final: Path) -> None:
    """Every rank's part in one file on rank 0, in the order of the ranks, complete or not there at all."""
    part = folder / f"part-{world.rank:04}"
    if not world.is_main:
        _send(part)
    else:
        draft = draft_of(final)
        with writing_rows(folder):
            try:
                with draft.open("wb") as whole:
                    whole.write(header(final.suffix[1:]).encode())
                    with part.open("rb") as rows:
                        shutil.copyfileobj(rows, whole)
                    for rank in range(1, world.size):
                        _receive(rank, whole)
                    whole.flush()
                    os.fsync(whole.fileno())
                put(draft, final)
            finally:
                draft.unlink(missing_ok=True)
    world.barrier()
    part.unlink(missing_ok=True)


def _send(part: Path) -> None:
    """Nodes need not share a disk, so parts travel between ranks."""
    import torch.distributed as dist

    size = torch.tensor(part.stat().st_size)
    with part.open("rb") as file, lost_peers():
        dist.send(size, 0)
        while block := file.read(BLOCK):
            dist.send(torch.frombuffer(bytearray(block), dtype=torch.uint8), 0)


def _receive(rank: int, whole: Any) -> None:
    import torch.distributed as dist

    size = torch.tensor(0)
    with lost_peers():
        dist.recv(size, rank)
        for start in range(0, int(size), BLOCK):
            block = torch.empty(min(BLOCK, int(size) - start), dtype=torch.uint8)
            dist.recv(block, rank)
            whole.write(block.numpy())
