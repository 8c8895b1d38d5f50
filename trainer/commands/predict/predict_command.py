"""`python -m trainer predict`: words -> predictions.csv."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.commands.predict import rows, sources
from trainer.commands.predict.labelling import Labeller
from trainer.commands.predict.rows import COUNTS, PartFile
from trainer.commands.predict.sources import Inputs, Item
from trainer.commands.predict.trained_model import LabelModel, from_checkpoint, published
from trainer.commands.predict.watching import Watch
from trainer.data.photos.pixel_range import wanted_of
from trainer.devices.assignment import prediction_devices
from trainer.errors import PredictionError, RecipeError
from trainer.launch import launching
from trainer.pool import DevicePool, ItemError
from trainer.processes import fork_server
from trainer.processes.interrupts import what_is_done_is_kept
from trainer.processes.rank import Place, place
from trainer.processes.resources import cores, cuda_for
from trainer.processes.terminal import say
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.recipe.recipe_files import split_words
from trainer.saving.files import write_atomically
from trainer.saving.run_names import newest_run, run_named
from trainer.telemetry.readable import counted

TIMEOUT = datetime.timedelta(days=7).total_seconds()  # a rank that is done waits for the others
PUBLISHED = ("model.name=", "model.weights=")  # words that ask for a model which is no run's
FEW = 10  # images whose classes are printed
MANY = 100  # images: of fewer no speed is told, which the start would spoil
DECODERS = 32  # threads that read for one device, at most


def command(words: Sequence[str]) -> int:
    """Label what the words name; 0, or an error's exit code by raising it."""
    options, rest = split_words(words, ("checkpoint", "plugin", "recipe", "nproc"))
    photos = tuple(word for word in rest if "=" not in word or os.sep in word.partition("=")[0])
    rest = [word for word in rest if word not in photos]
    for key, instead in (("recipe", "checkpoint=RUN has its own"), ("nproc", "start several ranks with torchrun")):
        if key in options:
            raise RecipeError(f"{key}= is not for predict: {instead}")
    launching.load_plugin(options.get("plugin"))
    fork_server.context("trainer.pool.worker", "trainer.commands.predict.labelling")  # loads torch meanwhile
    checkpoint, rank = options.get("checkpoint"), place()
    if checkpoint is None and any(word.startswith(PUBLISHED) for word in rest):
        trained = published(rest, photos)
    else:
        run = newest_run() if checkpoint is None else run_named(checkpoint)
        if checkpoint is None and rank.is_main:
            say(f"with {run}, the newest run")
        checkpoint = str(run)
        trained = from_checkpoint(run, rest, photos)
    label_part(trained, output_folder(trained.recipe, checkpoint), rank)
    return 0


def output_folder(recipe: Recipe, checkpoint: str | None) -> Path:
    """The folder that `output=` names, or runs/predict-<run or model>-<time>."""
    if recipe.output:
        return Path(recipe.output).expanduser()
    name = Path(checkpoint).absolute().name.removesuffix(".safetensors") if checkpoint else recipe.model.name
    return Path("runs") / f"predict-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def label_part(trained: LabelModel, folder: Path, rank: Place) -> None:
    """Label this rank's part; rank 0 puts all parts together."""
    recipe, inputs = trained.recipe, _inputs(trained, rank)
    devices = prediction_devices(recipe.devices, cuda_for(recipe.devices), cores(), rank.local_rank, rank.local_size)
    if devices == ["cpu"] and recipe.threads is None:  # as where there is no GPU: a worker a core
        devices = prediction_devices("auto", 0, cores(), rank.local_rank, rank.local_size)
    world = World(rank, torch.device("cpu"), 1, ())
    world.connect(TIMEOUT)
    folder = Path(world.broadcast_object(str(folder)))  # its name may hold the time
    final = folder / f"predictions.{recipe.predict.format}"
    rows.claim(folder)
    if rank.is_main:
        rows.begin_anew(folder)
    world.barrier()
    if inputs.ignored and rank.is_main:
        say(f"ignored: {inputs.ignored}")
    if inputs.unlabelled and rank.is_main:
        say(f"labels: {inputs.unlabelled}")
    if inputs.doubt:
        say(f"pixels: {inputs.doubt}")
    written = PartFile(folder, rank.rank, recipe.predict.format, trained.classes, trained.seen)
    watch = Watch(folder, inputs.count, recipe.logging, devices, rank.is_main)
    begun, probabilities = time.perf_counter(), trained.task.reads != "values"
    with what_is_done_is_kept("the same words label all images anew"):
        _label_on(devices, _decoders(devices, rank), trained, inputs, written, watch)
        sum_up(world, folder, final, written, time.perf_counter() - begun, probabilities)


def _decoders(devices: Sequence[str], rank: Place) -> int:
    """Threads that read images for each device; 0: a CPU worker whose one core both reads and has the model.

    A CPU worker of several cores reads on half of them: its model's threads wait for each other, and for all of them
    when one has to share its core.
    """
    each = cores() // (len(devices) * rank.local_size)
    gpus = any(name != "cpu" for name in devices)
    return max(1, min(DECODERS, each)) if gpus else min(DECODERS, each // 2)


def _label_on(
    devices: Sequence[str], threads: int, trained: LabelModel, inputs: Inputs, written: PartFile, watch: Watch
) -> None:
    """Start the workers, and label with them until all is done."""
    recipe = trained.recipe
    try:
        with DevicePool(
            devices,
            Labeller,
            arguments=(trained.model, trained.preparation, recipe, trained.task, inputs.source, threads),
            batch_size=recipe.predict.batch_size,
            item_timeout=recipe.predict.timeout,
            on_error="skip",
        ) as pool:
            label(pool, inputs, written, watch)
    finally:
        written.close()
        watch.close()


def _report_failures(counts: Mapping[str, int], final: Path) -> None:
    if counts["failed"]:
        raise PredictionError(
            f"{counts['failed']} of {counts['images']} images have no prediction; the error column of {final} says why"
        )


def _inputs(trained: LabelModel, rank: Place) -> Inputs:
    recipe = trained.recipe
    if trained.data is not None:
        return sources.dataset_split(trained.data, recipe.predict.split or "val", rank.rank, rank.size)
    # A folder may be named like the one class of its images; several classes and values stand in tables.
    classes = trained.classes if trained.task.reads == "class" else ()
    return sources.image_files(trained.photos, classes, rank.rank, rank.size, wanted_of(recipe.data))


def label(pool: DevicePool, inputs: Inputs, written: PartFile, watch: Watch) -> None:
    """Every image through the pool, its row written, in order."""
    waiting: deque[Item] = deque()

    def payloads() -> Iterator[Any]:
        for item in inputs.items:
            waiting.append(item)
            yield item.payload if item.label is None else (item.payload, item.label)

    for labels in pool.map(payloads()):
        if isinstance(labels, ItemError):
            written.write(waiting.popleft(), None, labels.message)
        else:
            written.write(waiting.popleft(), labels)
        watch.note(pool)


def sum_up(
    world: World, folder: Path, final: Path, written: PartFile, seconds: float, probabilities: bool = True
) -> None:
    """Put the ranks' parts together, and print the result. Raises PredictionError."""
    parts = world.broadcast_object(world.gather({**written.counts, "seen": written.seen}))
    counts = {key: sum(part[key] for part in parts) for key in COUNTS}
    known = [part["seen"] for part in parts]  # a rank may not have what tells it
    seen = None if None in known else sum(known)
    rows.put_together(world, folder, final)
    if world.is_main:
        accuracy = counts["right"] / counts["labelled"] if counts["labelled"] else None
        result = {**counts, "top1": accuracy, "trained_on": seen, "seconds": seconds}
        write_atomically(folder / "predict.json", json.dumps(result, indent=2) + "\n")
        speed = counts["images"] / seconds if counts["images"] >= MANY else None
        if 0 < counts["images"] <= FEW:
            say("\n".join(rows.answers(final, written.kind, probabilities)))
        say(summary(counts, accuracy, seen, speed, final))
        if counts["images"] > FEW and (worst := rows.write_worst(final, written.kind)) is not None:
            say(f"  worst    {worst}: its first labels are the most likely to be wrong")
    world.barrier()
    world.close()
    _report_failures(counts, final)


def summary(
    counts: Mapping[str, int], accuracy: float | None, seen: int | None, speed: float | None, final: Path
) -> str:
    """The result in lines; `seen` of the images whose class is known were trained on."""
    labelled = counts["images"] - counts["unreadable"] - counts["failed"]
    text = f"{counted(labelled, 'image')} labelled" + (f", {speed:,.0f} images/s" if speed is not None else "")
    if counts["unreadable"]:
        rows = "its row says" if counts["unreadable"] == 1 else "their rows say"
        text += f"; {counts['unreadable']:,} could not be read, {rows} why"
    if accuracy is not None:
        text += f"\n  top-1    {accuracy:.2%} of {counted(counts['labelled'], 'image')} with known classes"
    if accuracy is not None and seen:
        some = "all" if seen == counts["labelled"] else f"{seen:,}"
        text += f"\n  note     {some} of these were used in training; leave out data.root= to label the held-out images"
    return text + f"\n  result   {final}"
