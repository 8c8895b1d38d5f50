"""A prediction worker: decodes, prepares as in evaluation, classifies. Lives in the pool's processes."""

from __future__ import annotations

import math
import pickle
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.commands.trained import Preparation
from trainer.data import PhotoSource, PictureSource
from trainer.data.augment import DeviceTransform
from trainer.data.encoded import EncodedPhotos
from trainer.data.photos.decoding import open_image, reason, with_channels
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import held_out
from trainer.data.photos.pixel_range import wanted_of
from trainer.devices import cards, health
from trainer.devices.precision import AUTOCAST, set_precision
from trainer.models.replayed_forward import ReplayedForward
from trainer.processes.resources import keep_freed_memory
from trainer.recipe import Recipe
from trainer.tasks import Task

NOT_FINITE = "gave up: the model's outputs are not finite: try precision=fp32, or weights of an earlier step"
WARM = 12  # batches of a size in a row before their pass is recorded: how many follow is not known
COMPILED = {"cuda": 64, "cpu": 16}  # images of a compiled pass, where predict.batch_size is left out


class Labels(NamedTuple):
    """The most probable classes of an image, at most five, with their probabilities; or why there are none.

    Of a regression they are its values. `label_probability` is that of the class which the image is known to have.
    """

    classes: tuple[int, ...]
    probabilities: tuple[float, ...]
    error: str = ""
    label_probability: float | None = None


Known = tuple[Tensor, int | None]  # a prepared image, and its class where that is known


class Classified(NamedTuple):
    """A pass: the best classes of N images and their probabilities, (N, 5), and the (N,) probabilities of their labels,
    which are 0 where they are not known."""

    classes: Tensor
    probabilities: Tensor
    of_labels: Tensor | None
    labels: list[int | None]


class Labeller:
    """A worker of the pool. An item is a path, an image in memory (C, H, W) uint8, why there is none, or an index into
    `source`; or one of these and its class."""

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
        self._forward = ReplayedForward(self._launched, [self.model], device, recipe.graphs is not False, _tell, WARM)
        self._compiled = 0  # images of each compiled pass: of all sizes, or every new one would be compiled again
        if recipe.compile:
            self._compiled = recipe.predict.batch_size or COMPILED[device.type]
            self.model.compile(dynamic=False)
            blank = torch.zeros(how.channels, how.image_size, how.image_size, dtype=torch.uint8)
            self._labels(
                self._classified([(self._prepared(blank), None)])
            )  # compiles here, where no image's time is counted

    def prepare(self, items: Sequence[Any]) -> Sequence[Any]:
        """Begin to read them; the pool calls this as soon as a batch arrives, while the one before is labelled."""
        return [self._decoders.submit(self._tried, item) for item in items] if self._decoders else items

    def batch(self, items: Sequence[Any]) -> list[Labels]:
        """The labels of each item, or of what `prepare` made of it; one that cannot be read has its reason instead."""
        ready = (item.result() if isinstance(item, Future) else self._tried(item) for item in items)
        rows = self._compiled or len(items)
        results: list[Labels | None] = []
        images: list[Known] = []
        pieces = []
        for image in ready:
            results.append(image if isinstance(image, Labels) else None)
            if not isinstance(image, Labels):
                images.append(image)
            if len(images) == rows:
                pieces.append(self._classified(images))  # the device begins, and nobody waits for it
                images = []
        if images:
            pieces.append(self._classified(images))
        good = (labels for piece in pieces for labels in self._labels(piece))
        return [labels if labels is not None else next(good) for labels in results]

    def _tried(self, item: Any) -> Known | Labels:
        item, label = item if isinstance(item, tuple) else (item, None)
        try:
            return self._prepared(item), label
        except Exception as error:  # decoders raise anything at all
            return Labels((), (), reason(error))

    def _prepared(self, item: Any) -> Tensor:
        how, picture = self.preparation, self._picture(item)
        if how.published is not None:
            whole = picture.whole(max(picture.height, picture.width))
            return how.published(whole)
        return held_out(picture, how.image_size, how.shorter_side)

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

    def _classified(self, known: list[Known]) -> Classified:
        """On the device, which may still be computing them."""
        images, labels = [image for image, _ in known], [label for _, label in known]
        count, first = len(images), images[0]
        pinned = self.device.type == "cuda"
        batch = torch.empty(self._compiled or count, *first.shape, dtype=first.dtype, pin_memory=pinned)
        torch.stack(images, out=batch[:count])
        batch[count:] = 0
        batch = batch.to(self.device, non_blocking=True)
        with torch.inference_mode():
            if self.preparation.published is None:
                batch = self._transform.inputs(batch.permute(0, 2, 3, 1).contiguous())
            elif self.recipe.channels_last:
                batch = batch.contiguous(memory_format=torch.channels_last)
            whole = self._forward(batch)
            assert whole is not None
            outputs = whole[:count].float()
            of_labels = None
            if any(label is not None for label in labels):
                targets = torch.tensor([label or 0 for label in labels], device=self.device)
                of_labels = self.task.label_probabilities(outputs, targets)
            return Classified(*self.task.ranked(outputs), of_labels, labels)

    def _launched(self, batch: Tensor) -> Tensor:
        precision = AUTOCAST.get(self.recipe.precision)
        with torch.autocast(self.device.type, precision, enabled=precision is not None):
            outputs: Tensor = self.model(batch)
        return outputs

    @staticmethod
    def _labels(done: Classified) -> list[Labels]:
        of_labels = done.labels if done.of_labels is None else done.of_labels.tolist()
        rows = zip(done.classes.tolist(), done.probabilities.tolist(), done.labels, of_labels, strict=True)
        return [
            Labels(tuple(classes), tuple(numbers), "", None if label is None or done.of_labels is None else of_label)
            if all(map(math.isfinite, numbers))
            else Labels((), (), NOT_FINITE)
            for classes, numbers, label, of_label in rows
        ]


def _tell(line: str) -> None:
    """Beside the results, which may go to stdout."""
    print(line, file=sys.stderr, flush=True)


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
