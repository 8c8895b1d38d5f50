"""A model that labels images, and a worker of the pool that has one: decodes, prepares as in evaluation, classifies."""

from __future__ import annotations

import math
import pickle
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data import Datasets, PhotoSource, PictureSource
from trainer.data.augment import DeviceTransform
from trainer.data.encoded import EncodedPhotos
from trainer.data.photos.decoding import open_image, reason, with_channels
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import held_out
from trainer.data.photos.pixel_range import wanted_of
from trainer.devices import cards, health
from trainer.devices.precision import AUTOCAST, set_precision
from trainer.errors import RecipeError
from trainer.models.replayed_forward import ReplayedForward
from trainer.processes.resources import keep_freed_memory
from trainer.recipe import Recipe
from trainer.tasks import Task
from trainer.training.trained import Preparation, Trained, task_without_loss

NOT_FINITE = "gave up: the model's outputs are not finite: try precision=fp32, or weights of an earlier step"
WARM = 12  # batches of a size in a row before their pass is recorded: how many follow is not known


@dataclass(frozen=True)
class LabelModel:
    """A model that can label, and what it was made of."""

    recipe: Recipe
    task: Task
    model: nn.Module
    classes: tuple[str, ...]
    preparation: Preparation
    data: Datasets | None  # where a part of the data set is labelled
    photos: tuple[str, ...]  # else: files, folders, lists of paths

    @classmethod
    def read(
        cls, path: Path, words: Sequence[str], photos: Sequence[str] = (), split: bool | None = None
    ) -> LabelModel:
        """The weights of a run or a checkpoint, with the preparation that they were evaluated with.

        `photos` are to be labelled beside those of data.root=, or a `split` of the run's data set; None: as the words
        say. Raises CheckpointError, RecipeError.
        """
        trained = Trained.read(path, words)
        recipe = trained.recipe
        if (part := recipe.predict.split) is not None and photos:
            raise RecipeError(f"predict.split={part} labels the run's own data set: leave it out, or {photos[0]}")
        if part is None and any(word.startswith("data.root=") for word in words) and recipe.data.root is not None:
            photos = (recipe.data.root, *photos)
        data = trained.data(recipe) if (not photos if split is None else split) else None
        if (trained.facts.classes is not None and not trained.facts.mean) or (data is not None and data.plain):
            raise RecipeError(f"{path} was trained on inputs other than images, but predict labels images")
        classes, how = trained.preparation() if data is None else (data.classes, Preparation.of(data))
        task = task_without_loss(recipe, classes)
        if type(task).ranked is Task.ranked:
            task.ranked(torch.zeros(0))  # says so
        model = trained.model(task, len(classes), how.channels, how.image_size)
        names = classes + tuple(f"class {n}" for n in range(len(classes), recipe.model.num_classes or 0))
        return cls(recipe, task, model, names, how, data, tuple(photos))


class Labels(NamedTuple):
    """The most probable classes of an image, at most five, with their probabilities; or why there are none.

    Of a regression they are its values.
    """

    classes: tuple[int, ...]
    probabilities: tuple[float, ...]
    error: str = ""


class Labeller:
    """A worker of the pool. An item is a path, an image in memory (C, H, W) uint8, why there is none, or an index into
    `source`."""

    def __init__(
        self,
        model: nn.Module,
        preparation: Preparation,
        recipe: Recipe,
        task: Task,
        source: PhotoSource | None,
        threads: int = 0,
    ) -> None:
        """`threads` read images while the model has those before; 0: the model waits while one reads them."""
        self.model, self.preparation, self.recipe, self.task, self.source = model, preparation, recipe, task, source
        self.threads = threads

    def setup(self, device: torch.device) -> None:
        recipe, how = self.recipe, self.preparation
        keep_freed_memory()
        if device.type == "cpu" and (recipe.threads or recipe.predict.batch_size):
            # Kernels add up in another order on another number of threads, and a fixed batch promises the same bytes.
            torch.set_num_threads(recipe.threads or 1)
        if device.type == "cuda":
            health.check_card(device, cards.detect().count)
        set_precision(recipe.precision)
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.device = device
        self.model = self.model.to(device, memory_format=layout).eval()  # type: ignore[call-overload]
        self._transform = DeviceTransform(how.mean, how.std, how.image_size, recipe.channels_last, device)
        self._decoders: ThreadPoolExecutor | None = None
        if self.threads:
            if device.type == "cuda":
                torch.set_num_threads(1)  # in each thread that decodes
            warnings.simplefilter("ignore")  # reading does so for itself, and in several threads at once undoes it
            # Items of a user's own data set are read one after the other: nothing says that they may be read at once.
            several = self.source is None or isinstance(self.source, EncodedPhotos)
            self._decoders = ThreadPoolExecutor(self.threads if several else 1, "decoding")
        tell = partial(print, file=sys.stderr, flush=True)  # results may go to stdout
        self._forward = ReplayedForward(self._launched, [self.model], device, recipe.graphs is not False, tell, WARM)

    def prepare(self, items: Sequence[Any]) -> Sequence[Any]:
        """Begin to read them; the pool calls this as soon as a batch arrives, while the one before is labelled."""
        return [self._decoders.submit(self._tried, item) for item in items] if self._decoders else items

    def batch(self, items: Sequence[Any]) -> list[Labels]:
        """The labels of each item, or of what `prepare` made of it; one that cannot be read has its reason instead."""
        ready = [item.result() if isinstance(item, Future) else self._tried(item) for item in items]
        labelled = iter(self._labels([image for image in ready if not isinstance(image, Labels)]))
        return [image if isinstance(image, Labels) else next(labelled) for image in ready]

    def _tried(self, item: Any) -> Tensor | Labels:
        try:
            return held_out(self._picture(item), self.preparation.image_size, self.preparation.shorter_side)
        except Exception as error:  # decoders raise anything at all
            return Labels((), (), reason(error))

    def _picture(self, item: Any) -> Picture:
        channels = self.preparation.channels
        if isinstance(item, Exception):
            raise item
        if isinstance(item, str):
            return open_image(item, channels, wanted_of(self.recipe.data))
        if isinstance(item, int) and isinstance(self.source, PictureSource):
            return self.source.open(item, channels)[0]
        if isinstance(item, int):
            assert self.source is not None
            item = self.source.read(item, channels)[0]
        return Picture.of(with_channels(item, channels))

    def _labels(self, images: list[Tensor]) -> list[Labels]:
        """The labels of prepared images, computed at once."""
        if not images:
            return []
        batch = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype, pin_memory=self.device.type == "cuda")
        torch.stack(images, out=batch)
        with torch.inference_mode():
            rows = batch.to(self.device, non_blocking=True).permute(0, 2, 3, 1).contiguous()
            outputs = self._forward(self._transform.inputs(rows))
            assert outputs is not None
            classes, numbers = (best.tolist() for best in self.task.ranked(outputs.float()))
        return [
            Labels(tuple(best), tuple(row)) if all(map(math.isfinite, row)) else Labels((), (), NOT_FINITE)
            for best, row in zip(classes, numbers, strict=True)
        ]

    def _launched(self, batch: Tensor) -> Tensor:
        precision = AUTOCAST.get(self.recipe.precision)
        with torch.autocast(self.device.type, precision, enabled=precision is not None):
            outputs: Tensor = self.model(batch)
        return outputs


class Forward:
    """A worker that is a model: items are inputs without the batch dimension, results the model's outputs."""

    def __init__(self, model: nn.Module | bytes) -> None:
        """`model` may be what `pickling.packed` made of it."""
        self.model: nn.Module = pickle.loads(model) if isinstance(model, bytes) else model

    def setup(self, device: torch.device) -> None:
        self.device = device
        self.model = self.model.to(device).eval()

    def batch(self, items: Sequence[Tensor]) -> Any:
        with torch.inference_mode():
            outputs = self.model(torch.stack(list(items)).to(self.device))
        if isinstance(outputs, Tensor):
            return outputs
        return [torch.utils._pytree.tree_map(lambda part, row=row: part[row], outputs) for row in range(len(items))]
