"""`python -m trainer predict`: write predictions.csv, which has a row for each image, in order.

With predict.format=jsonl, the rows are JSON in predictions.jsonl. The file exists only if it is
complete.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import tee
from pathlib import Path

import torch

from trainer.commands.predict import sources
from trainer.commands.predict.features import FeatureFiles
from trainer.commands.predict.labelling import Labeller, LabelModel, Labels
from trainer.data.gpu_decoding import load_decoder
from trainer.devices.assignment import number_devices, prediction_devices
from trainer.errors import FolderInUseError, PredictionError, RecipeError
from trainer.launch import launching
from trainer.pool import DevicePool, ItemError
from trainer.processes import fork_server
from trainer.processes.interrupts import stop_between_runs
from trainer.processes.rank import read_place
from trainer.processes.resources import count_cores, count_cuda_devices
from trainer.processes.terminal import say
from trainer.recipe import split_arguments
from trainer.saving import locks
from trainer.saving.files import (
    Json,
    format_csv,
    remove,
    replace_file,
    report_write_errors,
    set_aside,
    write_json,
)
from trainer.saving.run_names import find_run, is_choice, newest_run
from trainer.saving.tensor_files import sync
from trainer.telemetry.readable import escape_control_characters, format_count, format_duration

NOT_OURS = {
    "recipe": "checkpoint=RUN has its own",
    "nproc": "devices=[cuda:0,cuda:1] starts a worker on each",
    "compile": "leave it out: batches of one size are replayed as CUDA graphs",
    "model.weights": (
        "it labels with a run's weights, and recipe=finetune trains one from published ones"
    ),
}
# The column `label` is the known class of an image.
COLUMNS = ("path", "class", "probability", "top5", "label", "error")
# Counts in predict.json, in this order: all images; images that cannot be read; images on which
# workers failed; images that have both a prediction and a known class; those of them whose
# prediction is right.
COUNTS = ("images", "unreadable", "failed", "labelled", "right")
# Name of the file while rows are written, before the complete file is renamed.
PART = "predictions.part"
AGAIN = "the same command labels all images again"
# Start of the error message for an image on which workers failed.
GAVE_UP = "gave up: "
# If there are at most this number of images, their classes are also printed. The classes of more
# images are only in the file of predictions.
FEW = 10
# Maximum number of printed classes of an image. All of them except the first must have at least the
# probability LEAST.
MOST = 3
LEAST = 0.01
# The speed is printed only if there are at least this number of images. For fewer images, most of
# the time is start-up time.
MANY = 100
# Maximum number of threads that read images for one device.
DECODERS = 32
# Minimum number of seconds between two progress lines.
SECONDS = 5.0


def command(words: Sequence[str]) -> int:
    """Label the images that the arguments name, and return exit code 0."""
    options, rest = split_arguments(words, ("checkpoint", "plugin", *NOT_OURS))
    # An argument with "=" is an override. If it has "/" before the "=", it is a path instead.
    photos = tuple(word for word in rest if "=" not in word or os.sep in word.partition("=")[0])
    overrides = [word for word in rest if word not in photos]
    for key, instead in NOT_OURS.items():
        if key in options:
            raise RecipeError(f"{key}= is not for predict: {instead}")
    if read_place().size > 1:
        raise RecipeError(
            "predict is one process with a worker for each of devices=: start it without torchrun"
        )
    launching.load_plugin(options.get("plugin"))
    # The fork server imports torch while this process reads the run.
    fork_server.start_server("trainer.pool.worker", "trainer.commands.predict.labelling")
    name = options.get("checkpoint")
    if name is None or is_choice(name):
        newest = newest_run()
        say(f"with {newest}, the newest run")
        name = f"{newest} {name}" if name else str(newest)
    run = find_run(name)
    trained = LabelModel.read(run, overrides, photos)
    run_name = run.absolute().name.removesuffix(".safetensors")
    default = Path("runs", f"predict-{run_name}-{time.strftime('%Y%m%d-%H%M%S')}")
    label(trained, Path(trained.recipe.output or default).expanduser())
    return 0


def label(trained: LabelModel, folder: Path) -> None:
    """Label all images and write the results into a directory.

    Args:
        trained: Model and the images to label.
        folder: Directory of the results.

    Raises:
        PredictionError: Workers gave up on images.
        RecipeError: `folder` is a directory of images to label, or an argument is wrong.
        FolderInUseError: The directory holds a run or predictions, or another process uses it.
    """
    recipe = trained.recipe
    options = recipe.predict
    photos = [Path(root).expanduser().resolve() for root in trained.photos]
    if folder.resolve() in photos:
        raise RecipeError(
            f"output={folder} is the folder of photos that is read: choose another output="
        )
    if trained.data is not None:
        inputs = sources.open_split(trained.data, options.split or "val")
    else:
        inputs = sources.find_images(trained.photos)
    devices = prediction_devices(recipe.devices, count_cuda_devices(recipe.devices), count_cores())
    # For devices=[cpu], start one worker per core, but at most eight, as on a machine without a
    # GPU.
    if devices == ["cpu"] and recipe.threads is None:
        devices = prediction_devices("auto", 0, count_cores())
    gpu_decoding = recipe.data.decode == "gpu"
    if gpu_decoding and "cpu" in devices:
        # Raise the error of a worker before workers start.
        load_decoder(torch.device("cpu"), trained.preparation.channels)
    size = trained.count_features() if options.features else None
    _claim(folder)
    for description in inputs.ignored:
        say(f"ignored: {description}")
    has_probabilities = trained.task.reads != "values"
    rows = Rows(folder, options.format, trained.classes, has_probabilities, size)
    lines = SpeedLines(inputs.count, recipe.logging.progress, devices)
    arguments = (
        trained.model,
        trained.preparation,
        recipe,
        trained.task,
        inputs.source,
        _count_decoders(devices),
        len(trained.classes),
        gpu_decoding,
    )
    begun = time.perf_counter()
    # The pool takes items ahead of its results, so `tee` keeps each item until its result arrives.
    ahead, items = tee(inputs.items)
    with stop_between_runs(AGAIN), rows:
        with DevicePool(
            devices,
            Labeller,
            arguments=arguments,
            batch_size=options.batch_size,
            item_timeout=options.timeout,
            on_error="skip",
        ) as pool:
            results = pool.map(item.payload for item in ahead)
            for labels, item in zip(results, items, strict=False):
                rows.write(item, labels)
                lines.note(pool)
        seconds = time.perf_counter() - begun
        rows.finish(seconds)
    _sum_up(rows, seconds)


def _count_decoders(devices: Sequence[str]) -> int:
    """Return the number of threads that read images for each device.

    If all devices are CPUs, a worker with several cores reads on half of them. The threads of its
    model wait for each other, so all of them wait if one thread has to share its core. A worker
    with one core gets 0 threads: it reads and computes in turn.

    If any device is a GPU, the cores are divided equally, and every worker gets at least 1 thread.
    """
    cores_per_device = count_cores() // len(devices)
    if all(name == "cpu" for name in devices):
        return min(DECODERS, cores_per_device // 2)
    return min(DECODERS, max(1, cores_per_device))


def _claim(folder: Path) -> None:
    """Create the directory, and lock it until this process exits.

    Raises:
        FolderInUseError: The directory holds a run or predictions, or another process uses it.
        SetupError: The directory cannot be written.
    """
    locks.lock_folder(folder, "command")
    names = ["recipe.yaml", "result.json", "predictions.csv", "predictions.jsonl"]
    names += ["features.npy", "features.csv"]
    if any(os.path.lexists(folder / name) for name in names):
        raise FolderInUseError(
            f"{folder} holds a run or predictions already; choose another output="
        )
    if (folder / PART).is_file():
        remove(folder / PART)
        say(f"{folder} has rows of a command that was stopped: all images are labelled again")


class Rows:
    """Writer of the file of predictions, which also counts its rows.

    The file gets its final name when it is complete.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        classes: Sequence[str],
        probabilities: bool,
        features: int | None = None,
    ) -> None:
        """Open the file.

        Args:
            folder: Directory of the results.
            kind: File format, "csv" or "jsonl".
            classes: Name of each output.
            probabilities: Whether the outputs are probabilities rather than values.
            features: Number of features of an image; None writes no features.
        """
        self.final = folder / f"predictions.{kind}"
        self._part = folder / PART
        self._json = kind == "jsonl"
        self.classes = classes
        self._probabilities = probabilities
        self.counts = dict.fromkeys(COUNTS, 0)
        # Path, and classes or error to print, of each of the first FEW images.
        self.first: list[tuple[str, str]] = []
        with report_write_errors(folder, AGAIN):
            set_aside(self._part)
            self.features = None
            if features is not None:
                self.features = FeatureFiles(folder, features)
            self._file = self._part.open(
                "w", encoding="utf-8", errors="surrogateescape", newline=""
            )
            if not self._json:
                self._file.write(",".join(COLUMNS) + "\n")

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, and remove it unless `finish` has renamed it."""
        with report_write_errors(self.final.parent, AGAIN):
            try:
                if self.features is not None:
                    self.features.close()
                self._file.close()
            finally:
                self._part.unlink(missing_ok=True)

    def write(self, item: sources.Item, labels: Labels | ItemError) -> None:
        """Write the next row; `labels` is an `ItemError` for an image on which workers failed."""
        row = dict.fromkeys(COLUMNS)
        row["path"] = item.path
        if item.label is not None:
            row["label"] = self.classes[item.label]
        if isinstance(labels, ItemError):
            row["error"] = GAVE_UP + labels.message
        elif labels.error:
            row["error"] = labels.error
        else:
            top5 = [
                (self.classes[n], float(f"{probability:.6g}"))
                for n, probability in zip(labels.classes, labels.probabilities, strict=True)
            ]
            row["class"], row["probability"] = top5[0]
            row["top5"] = top5
        self._count(row)
        if self._json:
            line = json.dumps(row, ensure_ascii=True) + "\n"
        else:
            answers = [f"{name}={number:g}" for name, number in row["top5"] or ()]
            cells = {**row, "top5": ";".join(answers)}
            line = format_csv([[*cells.values()]])
        with report_write_errors(self.final.parent, AGAIN):
            self._file.write(line)
            if self.features is not None and isinstance(labels, Labels) and not labels.error:
                assert labels.features is not None
                self.features.write(item.path, labels.features)

    def _count(self, row: Json) -> None:
        self.counts["images"] += 1
        if row["error"]:
            kind = "failed" if row["error"].startswith(GAVE_UP) else "unreadable"
            self.counts[kind] += 1
        if row["label"] and row["class"]:
            self.counts["labelled"] += 1
            self.counts["right"] += row["label"] == row["class"]
        if len(self.first) < FEW:
            answers = []
            for name, number in row["top5"] or ():
                if not self._probabilities:
                    answers.append(f"{name} {number:.4g}")
                elif not answers or number >= LEAST:
                    answers.append(f"{name} {number:.0%}")
            answer = "  ".join(answers[:MOST]) or row["error"]
            self.first.append((escape_control_characters(row["path"]), answer))

    def finish(self, seconds: float) -> None:
        """Complete the results after `seconds` of labeling.

        The file of rows gets its final name last. So a directory without a file of that name holds
        no complete results, and can be used again.
        """
        result = {**self.counts, "top1": self.accuracy, "seconds": seconds}
        with report_write_errors(self.final.parent, AGAIN):
            if self.features is not None:
                self.features.finish()
            self._file.close()
            sync(self._part)
            write_json(self.final.with_name("predict.json"), result)
            replace_file(self._part, self.final)

    @property
    def accuracy(self) -> float | None:
        """Accuracy over labeled images whose class is known; None if there are none."""
        if self.counts["labelled"]:
            return self.counts["right"] / self.counts["labelled"]
        return None


class SpeedLines:
    """Printer of the total progress and the speed of each device, every `SECONDS` seconds."""

    def __init__(self, count: int | None, shows: bool, devices: Sequence[str]) -> None:
        """Print the first line.

        Args:
            count: Number of images; None if unknown.
            shows: Whether to print more lines.
            devices: Device of each worker.
        """
        self._names = list(number_devices(devices))
        self._count = count
        self._done = 0
        self._shows = shows
        images = "images as they come" if count is None else format_count(count, "image")
        say(f"predicting {images} on {', '.join(self._names)}")

    def note(self, pool: DevicePool) -> None:
        """Count one more image, and print a line if it is due.

        Lines are due every `SECONDS` seconds, and never if logging.progress is false.
        """
        now = time.monotonic()
        if self._done == 0:
            # The first image waited for the workers to start, which says nothing about the others.
            self._begun = now
            self._spoke = now
        self._done += 1
        if not self._shows or now - self._spoke < SECONDS:
            return
        self._spoke = now
        left = ""
        figures = zip(self._names, pool.figures(), strict=True)
        speeds = ", ".join(f"{name} {values['items_per_sec']:,.0f}/s" for name, values in figures)
        if self._count is not None:
            seconds = (now - self._begun) / self._done * (self._count - self._done)
            left = f" of {self._count:,}, {format_duration(seconds)} left"
        say(f"{self._done:,}{left}; {speeds}")


def _sum_up(rows: Rows, seconds: float) -> None:
    """Print the counts, the accuracy, the file's path and, for at most FEW images, their classes.

    Raises:
        PredictionError: Workers gave up on images.
    """
    counts = rows.counts
    accuracy = rows.accuracy
    if counts["images"] <= FEW:
        width = max((len(path) for path, _ in rows.first), default=0)
        for path, answer in rows.first:
            say(f"{path:{width}}  {answer}")
    labelled = counts["images"] - counts["unreadable"] - counts["failed"]
    speed = ""
    if counts["images"] >= MANY:
        speed = f", {counts['images'] / seconds:,.0f} images/s"
    say(f"{format_count(labelled, 'image')} labelled{speed}")
    if counts["unreadable"]:
        say(f"  unread   {counts['unreadable']:,}: the error column says why")
    if accuracy is not None:
        say(
            f"  top-1    {accuracy:.2%} of {format_count(counts['labelled'], 'image')} with known "
            "classes"
        )
    say(f"  result   {rows.final}")
    if rows.features is not None:
        count, size = rows.features.shape
        say(f"  features {rows.features.final}, {count:,} x {size:,}; paths in features.csv")
    if counts["failed"]:
        raise PredictionError(
            f"{counts['failed']} of {counts['images']} images have no prediction; the error column "
            f"of {rows.final} says why"
        )
