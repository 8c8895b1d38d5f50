"""`python -m trainer predict`: words -> predictions.csv."""

from __future__ import annotations

import datetime
import hashlib
import json
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import nn
from torchvision.models import get_model_weights

from trainer import recipe as recipes
from trainer.data import Datasets, open_datasets
from trainer.data.folders import IMAGENET
from trainer.devices.assignment import prediction_devices
from trainer.errors import (
    CheckpointError,
    FolderInUseError,
    Interrupted,
    PredictionError,
    Preempted,
    RecipeError,
    TrainerError,
)
from trainer.inference import rows, sources
from trainer.inference.labelling import Labeller, Preparation
from trainer.inference.rows import Rows
from trainer.inference.sources import Inputs, Item
from trainer.inference.watching import Watch
from trainer.launch import launching
from trainer.models.zoo import build, initialise
from trainer.pool import DevicePool, ItemError
from trainer.processes.rank import Place, place
from trainer.processes.world import World, cores, cuda_for
from trainer.recipe import Recipe
from trainer.recipe.words import split
from trainer.saving.checkpoint import read_weights
from trainer.saving.run_folder import write_atomically
from trainer.training.evaluation import recipe_of

PATIENCE = datetime.timedelta(days=7).total_seconds()  # a rank that is done waits for the others
DECODERS = 32  # threads that decode for one GPU, at most


@dataclass(frozen=True)
class Trained:
    """A model that can label, and what it was made of."""

    recipe: Recipe
    model: nn.Module
    classes: tuple[str, ...]
    preparation: Preparation
    data: Datasets | None  # where a split of the data set is labelled
    fingerprint: str


def command(words: Sequence[str]) -> int:
    """Label what the words name; 0, or an error's exit code by raising it."""
    own, rest = split(words, ("checkpoint", "plugin", "recipe", "nproc"))
    for key, instead in (("recipe", "checkpoint=RUN has its own"), ("nproc", "start several ranks with torchrun")):
        if key in own:
            raise RecipeError(f"{key}= is not for predict: {instead}")
    rest = ["data.root='-'" if word == "data.root=-" else word for word in rest]  # a lone dash is YAML's
    launching.load_plugin(own.get("plugin"))
    me = place()
    trained = (
        published(rest) if "checkpoint" not in own else from_checkpoint(Path(own["checkpoint"]).expanduser(), rest)
    )
    folder = output_folder(trained.recipe, own.get("checkpoint"))
    run(trained, folder, me)
    return 0


# ------------------------------------------------------------------------------------------------------- the model


def from_checkpoint(path: Path, words: Sequence[str]) -> Trained:
    """A run's last weights, or a checkpoint's, with the preparation that they were evaluated with."""
    weights, facts = read_weights(path)
    recipe = recipe_of(path, facts, tuple(words))
    data = open_datasets(recipe) if wants_split(recipe, words) else None
    if data is not None:
        classes, how = data.classes, Preparation.of(data)
    else:
        classes, how = _prepared(path, described(path, facts), recipe.data.image_size)
    model = build(recipe.model, len(classes), how.channels, how.image_size, starting=False)
    initialise(model, weights, str(path), whole=True)
    names = classes + tuple(f"class {n}" for n in range(len(classes), recipe.model.num_classes or 0))
    return Trained(recipe, model, names, how, data, _fingerprint(weights))


def _prepared(path: Path, facts: Mapping[str, str], image_size: int | None) -> tuple[tuple[str, ...], Preparation]:
    """The classes of weights and how their images were made ready, as their file tells it.

    Raises:
        CheckpointError: what it tells makes no sense.
    """
    try:
        told = _Told.model_validate_json("{" + ",".join(f'"{key}":{facts[key]}' for key in _Told.model_fields) + "}")
    except (KeyError, ValidationError):
        raise CheckpointError(f"{path} is damaged: what it tells of its images makes no sense") from None
    size = image_size or told.image_size
    return told.classes, Preparation(size, told.channels, told.mean, told.std)


class _Told(BaseModel):
    """What last.safetensors tells of its classes and images."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: Annotated[int, Field(ge=1, le=2**16)]
    channels: Literal[1, 3]

    @model_validator(mode="after")
    def _one_a_channel(self) -> _Told:
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError("mean and std have other channels")
        return self


def described(path: Path, facts: dict[str, str]) -> dict[str, str]:
    """What weights were trained on: their file says, or for a checkpoint that of the run folder it lies in.

    Raises:
        CheckpointError: neither does.
    """
    for folder in (None, *path.absolute().parents[:2]):
        if folder is not None and (folder / "last.safetensors").is_file():
            facts = read_weights(folder)[1]
        if "classes" in facts:
            return facts
    raise CheckpointError(f"{path} does not tell its classes; give a run folder or its last.safetensors")


def wants_split(recipe: Recipe, words: Sequence[str]) -> bool:
    """Whether images come from the data set; else they are files that data.root names."""
    return recipe.predict.split is not None or not any(word.startswith("data.root=") for word in words)


def published(words: Sequence[str]) -> Trained:
    """One of torchvision's models with the weights that it publishes."""
    recipe = recipes.load(None, *words)
    if recipe.model.weights is None or recipe.data.root is None:
        raise RecipeError(
            "predict needs a model and images: checkpoint=RUN data.root=FOLDER, or without a checkpoint "
            "model.name=resnet50 model.weights=DEFAULT data.root=FOLDER"
        )
    if recipe.predict.split is not None:
        raise RecipeError("predict.split names a part of a run's data set, so it needs checkpoint=RUN")
    classes, preset, size = _published(recipe)
    model = build(recipe.model, len(classes), 3, size)
    return Trained(
        recipe, model, classes, Preparation(size, 3, *IMAGENET, preset), None, _fingerprint(model.state_dict())
    )


def _published(recipe: Recipe) -> tuple[tuple[str, ...], Any, int]:
    """Classes, transforms and image size that torchvision publishes with weights."""
    try:
        weights = get_model_weights(recipe.model.name)[recipe.model.weights]
    except (KeyError, ValueError):
        build(recipe.model, 1000, 3, 224)  # says what is wrong with the name
        raise RecipeError(
            f"model.weights={recipe.model.weights}: {recipe.model.name} has no published weights"
        ) from None
    preset = weights.transforms()
    if not hasattr(preset, "crop_size"):
        raise RecipeError(f"model.name={recipe.model.name} is no classifier of images: predict is for those")
    return tuple(weights.meta["categories"]), preset, preset.crop_size[0]


def _fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        found.update(name.encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------- the run


def output_folder(recipe: Recipe, checkpoint: str | None) -> Path:
    """The folder that `output=` names, or runs/predict-<run or model>-<time>."""
    if recipe.output:
        return Path(recipe.output).expanduser()
    name = Path(checkpoint).absolute().name.removesuffix(".safetensors") if checkpoint else recipe.model.name
    return Path("runs") / f"predict-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def run(trained: Trained, folder: Path, me: Place) -> None:
    """Label this rank's part; rank 0 puts all parts together."""
    recipe, inputs = trained.recipe, _inputs(trained, me)
    how = trained.preparation
    settings = {
        "weights": trained.fingerprint,
        "images": inputs.name,
        "data.root": recipe.data.root,
        "number": inputs.total,
        "image_size": how.image_size,
        "normalisation": [list(how.mean), list(how.std)],
        "ranks": me.size,
        "format": recipe.predict.format,
        "batch_size": recipe.predict.batch_size,
        "precision": recipe.precision,
    }
    devices = prediction_devices(recipe.devices, cuda_for(recipe.devices), cores(), me.local_rank, me.local_size)
    world = World(me, torch.device("cpu"), 1, ())
    world.connect(PATIENCE)
    folder = Path(world.share(str(folder)))  # its name may hold the time
    final = folder / f"predictions.{recipe.predict.format}"
    rows.claim(folder)
    before = world.share(rows.complete(folder, final, settings) if me.is_main else None)
    if before is not None:
        world.barrier()
        world.close()
        _complete(before, final, inputs)
        return
    written = Rows(folder, me.rank, recipe.predict.format, trained.classes, settings)
    if written.done:
        inputs = sources.skip(inputs, (row["path"] for row in written.read()), folder)
    beside = any(name != "cpu" for name in devices)  # CPU workers have a core each, for decoding and for the model
    threads = max(1, min(DECODERS, cores() // (len(devices) * me.local_size))) if beside else 1
    labeller = Labeller(trained.model, trained.preparation, recipe, inputs.source, threads)
    watch = Watch(folder, inputs.count, recipe.logging, devices, me.is_main, written.done)
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with DevicePool(
            devices,
            Labeller,
            arguments=(labeller.model, labeller.preparation, recipe, inputs.source, threads),
            batch_size=recipe.predict.batch_size,
            item_timeout=recipe.predict.timeout,
            on_error="skip",
        ) as pool:
            label(pool, inputs, written, watch)
    except (KeyboardInterrupt, Preempted) as stop:
        kind: type[TrainerError] = Preempted if isinstance(stop, Preempted) else Interrupted
        name = "SIGTERM" if kind is Preempted else "Ctrl-C"
        raise kind(f"stopped by {name}; the same words with output={folder} go on from here") from None
    finally:
        written.close()
        watch.close()
    finish(world, folder, final, written, settings, time.perf_counter() - begun)


def _complete(before: Mapping[str, Any], final: Path, inputs: Inputs) -> None:
    """There is nothing to do, or so it seems.

    Raises:
        FolderInUseError: what stdin brings now is not known.
        PredictionError: images were given up then.
    """
    if inputs.total is None:
        raise FolderInUseError(f"{final} is complete, maybe of other {inputs.name}: choose another output=")
    print(f"{final} is complete already; another output= labels them again", flush=True)
    _report_failures(before, final)


def _report_failures(counts: Mapping[str, int], final: Path) -> None:
    if counts["failed"]:
        raise PredictionError(
            f"{counts['failed']} of {counts['images']} images were given up after several tries; "
            f"the error column of {final} says why"
        )


def _terminated(*_: object) -> None:
    raise Preempted("SIGTERM")


def _inputs(trained: Trained, me: Place) -> Inputs:
    recipe = trained.recipe
    if trained.data is not None:
        return sources.split(trained.data, recipe.predict.split or "val", me.rank, me.size)
    assert recipe.data.root is not None
    return sources.files(recipe.data.root, trained.classes, me.rank, me.size)


def label(pool: DevicePool, inputs: Inputs, written: Rows, watch: Watch) -> None:
    """Every image through the pool, its row written, in order."""
    waiting: deque[Item] = deque()

    def payloads() -> Iterator[Any]:
        for item in inputs.items:
            waiting.append(item)
            yield item.payload

    for found in pool.map(payloads()):
        if isinstance(found, ItemError):
            written.write(waiting.popleft(), None, found.message)
        else:
            written.write(waiting.popleft(), found)
        watch.note(pool)


def finish(world: World, folder: Path, final: Path, written: Rows, settings: Mapping[str, Any], seconds: float) -> None:
    """Put the ranks' parts together, say what came of it.

    Raises:
        PredictionError: some images were given up.
    """
    parts = world.share(world.gather({**written.counts, "before": written.done}))
    counts = {key: sum(part[key] for part in parts) for key in written.counts}
    new = counts["images"] - sum(part["before"] for part in parts)
    rows.put_together(world, folder, final)
    if world.is_main:
        accuracy = counts["right"] / counts["labelled"] if counts["labelled"] else None
        write_atomically(
            folder / "predict.json",
            json.dumps({"settings": dict(settings), **counts, "top1": accuracy, "seconds": seconds}, indent=2) + "\n",
        )
        print(_summary(counts, accuracy, new / seconds, final), flush=True)
    world.barrier()
    world.close()
    _report_failures(counts, final)


def _summary(counts: Mapping[str, int], accuracy: float | None, speed: float, final: Path) -> str:
    text = f"{counts['images']:,} images labelled, {speed:,.0f} images/s"
    if counts["unreadable"]:
        text += f"; {counts['unreadable']:,} could not be read, their rows say why"
    if accuracy is not None:
        text += f"\n  top-1    {accuracy:.2%} of {counts['labelled']:,} images whose class is known"
    return text + f"\n  result   {final}"
