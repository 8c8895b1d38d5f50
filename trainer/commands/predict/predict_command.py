"""`python -m trainer predict`: words -> predictions.csv, a row an image, in order, complete or not there."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.predict import sources
from trainer.commands.predict.labelling import Labeller, LabelModel, Labels
from trainer.commands.predict.sources import Item
from trainer.devices.assignment import numbered, prediction_devices
from trainer.errors import FolderInUseError, PredictionError, RecipeError
from trainer.launch import launching
from trainer.pool import DevicePool, ItemError
from trainer.processes import fork_server
from trainer.processes.interrupts import what_is_done_is_kept
from trainer.processes.rank import place
from trainer.processes.resources import cores, cuda_for
from trainer.processes.terminal import say
from trainer.recipe import LoggingRecipe
from trainer.recipe.recipe_files import split_words
from trainer.saving import locks
from trainer.saving.files import csv_text, put, remove, set_aside, write_atomically, writing
from trainer.saving.run_names import newest_run, run_named
from trainer.saving.tensor_files import sync
from trainer.telemetry.readable import counted, duration

NOT_OURS = {
    "recipe": "checkpoint=RUN has its own",
    "nproc": "devices=[cuda:0,cuda:1] starts a worker on each",
    "compile": "leave it out: batches of one size are replayed as CUDA graphs",
    "model.weights": "it labels with a run's weights, and recipe=finetune trains one from published ones",
}
# label: the class that an image is known to have.
COLUMNS = ("path", "class", "probability", "top5", "label", "error")
# Rows in all, unreadable images, rows given up, labelled ones, and those whose class is right.
COUNTS = ("images", "unreadable", "failed", "labelled", "right")
PART = "predictions.part"  # the rows, until all are there
AGAIN = "the same words label all images anew"
GAVE_UP = "gave up: "  # begins the error of an item on which workers failed
FEW = 10  # images whose classes are printed
MOST, LEAST = 3, 0.01  # classes of an image that are printed, and the least probability of all but the first
MANY = 100  # images: of fewer no speed is told, which the start would spoil
DECODERS = 32  # threads that read for one device, at most
SECONDS = 5.0  # between two lines


def command(words: Sequence[str]) -> int:
    """Label what the words name; 0, or an error's exit code by raising it."""
    options, rest = split_words(words, ("checkpoint", "plugin", *NOT_OURS))
    photos = tuple(word for word in rest if "=" not in word or os.sep in word.partition("=")[0])
    rest = [word for word in rest if word not in photos]
    for key, instead in NOT_OURS.items():
        if key in options:
            raise RecipeError(f"{key}= is not for predict: {instead}")
    if place().size > 1:
        raise RecipeError("predict is one process with a worker for each of devices=: start it without torchrun")
    launching.load_plugin(options.get("plugin"))
    fork_server.context("trainer.pool.worker", "trainer.commands.predict.labelling")  # loads torch meanwhile
    run = run_named(options["checkpoint"]) if "checkpoint" in options else newest_run()
    if "checkpoint" not in options:
        say(f"with {run}, the newest run")
    trained = LabelModel.read(run, rest, photos)
    name = f"predict-{run.absolute().name.removesuffix('.safetensors')}-{time.strftime('%Y%m%d-%H%M%S')}"
    label(trained, Path(trained.recipe.output or Path("runs", name)).expanduser())
    return 0


def label(trained: LabelModel, folder: Path) -> None:
    """Label all images of a model into a folder. Raises PredictionError, FolderInUseError."""
    recipe = trained.recipe
    if any(folder.resolve() == Path(root).expanduser().resolve() for root in trained.photos):
        raise RecipeError(f"output={folder} is the folder of photos that is read: choose another output=")
    if trained.data is not None:
        inputs = sources.dataset_split(trained.data, recipe.predict.split or "val")
    else:
        inputs = sources.image_files(trained.photos)
    devices = prediction_devices(recipe.devices, cuda_for(recipe.devices), cores())
    if devices == ["cpu"] and recipe.threads is None:  # as where there is no GPU: a worker a core
        devices = prediction_devices("auto", 0, cores())
    _claim(folder)
    for others in inputs.ignored:
        say(f"ignored: {others}")
    rows = Rows(folder, recipe.predict.format, trained.classes, trained.task.reads != "values")
    lines = SpeedLines(inputs.count, recipe.logging, devices)
    arguments = (trained.model, trained.preparation, recipe, trained.task, inputs.source, _decoders(devices))
    begun, waiting = time.perf_counter(), deque[Item]()

    def payloads() -> Iterator[Any]:
        for item in inputs.items:
            waiting.append(item)
            yield item.payload

    with what_is_done_is_kept(AGAIN), rows:
        size, seconds = recipe.predict.batch_size, recipe.predict.timeout
        with DevicePool(
            devices, Labeller, arguments=arguments, batch_size=size, item_timeout=seconds, on_error="skip"
        ) as pool:
            for labels in pool.map(payloads()):
                rows.write(waiting.popleft(), labels)
                lines.note(pool)
        taken = time.perf_counter() - begun
        rows.finish(taken)
    _sum_up(rows, taken)


def _decoders(devices: Sequence[str]) -> int:
    """Threads that read images for each device; 0: a CPU worker whose one core both reads and has the model.

    A CPU worker of several cores reads on half of them: its model's threads wait for each other, and for all of them
    when one has to share its core.
    """
    each = cores() // len(devices)
    return min(DECODERS, max(1, each) if any(name != "cpu" for name in devices) else each // 2)


def _claim(folder: Path) -> None:
    """Make the folder, and hold it as long as this process lives. Raises FolderInUseError, SetupError."""
    locks.hold(folder, "command")
    used = ("recipe.yaml", "result.json", "predictions.csv", "predictions.jsonl")
    if any(os.path.lexists(folder / name) for name in used):
        raise FolderInUseError(f"{folder} holds a run or predictions already; choose another output=")
    if (folder / PART).is_file():
        remove(folder / PART)
        say(f"{folder} has rows of a command that was stopped: all images are labelled anew")


class Rows:
    """The rows as they come, in a file that has its name once it is complete, and what they add up to."""

    def __init__(self, folder: Path, kind: str, classes: Sequence[str], probabilities: bool) -> None:
        """`probabilities`: whether the numbers are these, and no values."""
        self.final, self._part = folder / f"predictions.{kind}", folder / PART
        self._json, self.classes, self._probabilities = kind == "jsonl", classes, probabilities
        self.counts = dict.fromkeys(COUNTS, 0)
        self.first: list[tuple[str, str]] = []  # of the first images the path, and what it shows
        with writing(folder, AGAIN):
            set_aside(self._part)
            self._file = self._part.open("w", encoding="utf-8", errors="surrogateescape", newline="")
            self._file.write("" if self._json else ",".join(COLUMNS) + "\n")

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind of what is not complete."""
        with writing(self.final.parent, AGAIN):
            try:
                self._file.close()
            finally:
                self._part.unlink(missing_ok=True)

    def write(self, item: Item, labels: Labels | ItemError) -> None:
        """The next row; an `ItemError` is that of an item that was given up."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"path": item.path, "label": None if item.label is None else self.classes[item.label]}
        if isinstance(labels, ItemError):
            row["error"] = GAVE_UP + labels.message
        elif labels.error:
            row["error"] = labels.error
        else:
            names = [self.classes[n] for n in labels.classes]
            top5 = [(name, float(f"{p:.6g}")) for name, p in zip(names, labels.probabilities, strict=True)]
            row |= {"class": top5[0][0], "probability": top5[0][1], "top5": top5}
        self._count(row)
        with writing(self.final.parent, AGAIN):
            self._file.write(self._line(row))

    def _line(self, row: Mapping[str, Any]) -> str:
        if self._json:
            return json.dumps(row, ensure_ascii=True) + "\n"
        top5 = ";".join(f"{name}={number:g}" for name, number in row["top5"] or ())
        cells = {**row, "top5": top5 or None}.values()
        # Of one line, whatever a path holds.
        return csv_text([[" ".join(value.splitlines()) if isinstance(value, str) else value for value in cells]])

    def _count(self, row: Mapping[str, Any]) -> None:
        self.counts["images"] += 1
        if row["error"]:
            self.counts["failed" if row["error"].startswith(GAVE_UP) else "unreadable"] += 1
        if row["label"] and row["class"]:
            self.counts["labelled"] += 1
            self.counts["right"] += row["label"] == row["class"]
        if len(self.first) < FEW:
            named = row["top5"] or ()
            if self._probabilities:
                named = [pair for rank, pair in enumerate(named) if not rank or pair[1] >= LEAST]
            answers = [f"{name} {p:.0%}" if self._probabilities else f"{name} {p:.4g}" for name, p in named]
            self.first.append((row["path"], "  ".join(answers[:MOST]) or row["error"]))

    def finish(self, seconds: float) -> None:
        """All rows are there, after so many seconds. They get their name last: without it the same is typed again."""
        result = {**self.counts, "top1": self.accuracy, "seconds": seconds}
        with writing(self.final.parent, AGAIN):
            self._file.close()
            sync(self._part)
            write_atomically(self.final.with_name("predict.json"), json.dumps(result, indent=2) + "\n")
            put(self._part, self.final)

    @property
    def accuracy(self) -> float | None:
        """Of images with known classes."""
        return self.counts["right"] / self.counts["labelled"] if self.counts["labelled"] else None


class SpeedLines:
    """About every five seconds a line with each device's speed."""

    def __init__(self, count: int | None, logging: LoggingRecipe, devices: Sequence[str]) -> None:
        """`count` images are to come; None: that is not known."""
        self._names, self._count, self._done, self._shows = list(numbered(devices)), count, 0, logging.progress
        self._spoke = self._begun = time.monotonic()
        what = "images as they come" if count is None else counted(count, "image")
        print(f"predicting {what} on {', '.join(self._names)}", flush=True)

    def note(self, pool: DevicePool) -> None:
        """One more image is labelled."""
        self._done += 1
        now = time.monotonic()
        if not self._shows or now - self._spoke < SECONDS:
            return
        self._spoke, left = now, ""
        figures = zip(self._names, pool.figures(), strict=True)
        speeds = ", ".join(f"{name} {values['items_per_sec']:,.0f}/s" for name, values in figures)
        if self._count is not None:
            seconds = (now - self._begun) / self._done * (self._count - self._done)
            left = f" of {self._count:,}, {duration(seconds)} left"
        print(f"{self._done:,}{left}; {speeds}", flush=True)


def _sum_up(rows: Rows, seconds: float) -> None:
    """Print the result. Raises PredictionError where images were given up."""
    counts, accuracy = rows.counts, rows.accuracy
    if counts["images"] <= FEW:
        width = max((len(path) for path, _ in rows.first), default=0)
        for path, answer in rows.first:
            say(f"{path:{width}}  {answer}")
    labelled = counts["images"] - counts["unreadable"] - counts["failed"]
    speed = f", {counts['images'] / seconds:,.0f} images/s" if counts["images"] >= MANY else ""
    say(f"{counted(labelled, 'image')} labelled{speed}")
    if counts["unreadable"]:
        say(f"  unread   {counts['unreadable']:,}: the error column says why")
    if accuracy is not None:
        say(f"  top-1    {accuracy:.2%} of {counted(counts['labelled'], 'image')} with known classes")
    say(f"  result   {rows.final}")
    if counts["failed"]:
        why = f"the error column of {rows.final} says why"
        raise PredictionError(f"{counts['failed']} of {counts['images']} images have no prediction; {why}")
