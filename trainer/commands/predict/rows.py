"""Rows of predictions, written in order and continued after a stop: while a rank works they are in part-<rank>."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypedDict

from trainer.commands.predict.labelling import Labels
from trainer.commands.predict.sources import Item, without_line_ends
from trainer.commands.predict.trained_on import TrainedOn
from trainer.errors import FolderInUseError
from trainer.saving.files import read_json, remove, writing
from trainer.saving.run_folder import write_atomically

LabelledImage = TypedDict(  # a row
    "LabelledImage",
    {
        "path": str,
        "class": str | None,
        "probability": float | None,
        "top5": list[tuple[str, float]] | None,  # classes and their probabilities
        "label": str | None,  # the class that it is known to have
        "error": str | None,
    },
)


class Counts(TypedDict):
    """Rows in all, unreadable images, rows given up, labelled ones, and those whose class is right."""

    images: int
    unreadable: int
    failed: int
    labelled: int
    right: int


PredictionSettings = TypedDict(  # what an earlier command in the folder must have had too
    "PredictionSettings",
    {
        "weights": str,
        "images": str,
        "data.root": str | None,
        "number": int | None,
        "image_size": int,
        "normalisation": list[list[float]],
        "pixel_range": list[float] | None,
        "ranks": int,
        "format": str,
        "batch_size": int | None,
        "precision": str,
    },
)
COLUMNS, COUNTS = tuple(LabelledImage.__annotations__), tuple(Counts.__annotations__)
LONGEST = 2**20  # bytes of a row
SYNC_SECONDS = 1.0
GAVE_UP = "gave up: "  # begins the error of an item on which workers failed


class PartFile:
    """One rank's rows, and what they add up to.

    Attributes:
        done: rows that an earlier, stopped command has written.
        seen: images whose class is known and that were trained on; None where nothing tells which were.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        kind: str,
        classes: Sequence[str],
        settings: PredictionSettings,
        trained_on: TrainedOn | None = None,
    ) -> None:
        """Begin, or continue what the same settings have begun.

        Raises:
            FolderInUseError: the folder holds predictions of other settings.
        """
        self.path, self.kind, self.classes = folder / f"part-{rank:04}", kind, classes
        self.counts: Counts = {"images": 0, "unreadable": 0, "failed": 0, "labelled": 0, "right": 0}
        self._trained_on = trained_on
        self.seen = None if trained_on is None else 0
        note = folder / f"part-{rank:04}.json"
        with self._writing():
            try:
                check_settings(folder, read_json(note), settings)
            except (OSError, ValueError):  # none, or damaged: rows of nobody knows what begin anew
                remove(self.path)
                write_atomically(note, json.dumps(dict(settings)) + "\n")
            self._keep_whole_rows(settings.get("batch_size") or 1)
            self.done = self.counts["images"]
            self._file = self.path.open("a", encoding="utf-8", errors="surrogateescape", newline="")
        self._synced = time.monotonic()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path.parent, f"the same words with output={self.path.parent} go on from here")

    def _keep_whole_rows(self, multiple: int) -> None:
        """Cut off what a stop has torn or something has damaged, and rows of a batch that was not complete: batches
        stay the same ones."""
        if not self.path.is_file():
            remove(self.path)
            return
        with self.path.open("rb+") as file:
            ends = [0]
            while (line := file.readline(LONGEST)).endswith(b"\n") and self._row(line) is not None:
                ends.append(ends[-1] + len(line))
            rows = (len(ends) - 1) // multiple * multiple
            file.truncate(ends[rows])
        for row in self.read():
            self._count(row)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """A line of the file; None where it is none."""
        text = line.decode("utf-8", errors="surrogateescape")
        try:
            found = json.loads(text) if self.kind == "jsonl" else next(csv.DictReader([text], COLUMNS))
        except (ValueError, RecursionError, csv.Error, StopIteration):
            return None
        whole = isinstance(found, dict) and found.keys() == set(COLUMNS) and isinstance(found["path"], str)
        kind = str if self.kind == "csv" else str | None
        return found if whole and all(isinstance(found[key], kind) for key in ("class", "label", "error")) else None

    def read(self) -> Iterator[dict[str, Any]]:
        """The rows that are there."""
        with self.path.open("rb") as file:
            yield from filter(None, map(self._row, file))

    def write(self, item: Item, found: Labels | None, error: str = "") -> None:
        """The next row; without `found`, of an item that was given up because of `error`."""
        row: LabelledImage = {
            "path": item.path,
            "class": None,
            "probability": None,
            "top5": None,
            "label": None if item.label is None else self.classes[item.label],
            "error": None,
        }
        if found is None:
            row["error"] = GAVE_UP + error
        elif found.error:
            row["error"] = found.error
        else:
            best = [
                (self.classes[n], float(f"{p:.6g}")) for n, p in zip(found.classes, found.probabilities, strict=True)
            ]
            row["class"], row["probability"], row["top5"] = *best[0], best
        self._count(row)
        with self._writing():
            self._file.write(self._line(row))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def _line(self, row: LabelledImage) -> str:
        if self.kind == "jsonl":
            return json.dumps(row, ensure_ascii=True) + "\n"
        cells: dict[str, object] = dict(row)
        if row["top5"]:
            cells["top5"] = ";".join(f"{name}={probability:g}" for name, probability in row["top5"])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(
            # A row is a line, whatever a path holds.
            [without_line_ends(value) if isinstance(value, str) else value for value in cells.values()]
        )
        return text.getvalue()

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
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            with self._writing(), self._file:
                self.sync()


def header(kind: str) -> str:
    """The first line of a file that puts parts together."""
    return ",".join(COLUMNS) + "\n" if kind == "csv" else ""


def check_settings(folder: Path, before: Mapping[str, Any], settings: PredictionSettings) -> None:
    """Hold settings against those of an earlier command in the folder.

    Raises:
        FolderInUseError: they differ.
    """
    for key, value in settings.items():
        if before.get(key) != value:
            raise FolderInUseError(
                f"{folder} holds predictions with {key}={before.get(key)}, now it is {value}: "
                "put it back or choose another output="
            )
