"""Models that label images, and the pool workers that decode, prepare and classify them."""

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

from trainer.commands.predict.features import Array, count_features
from trainer.data import Datasets, PhotoSource, PictureSource
from trainer.data.augment import DeviceTransform
from trainer.data.encoded import EncodedPhotos
from trainer.data.gpu_decoding import JpegDecoder, is_of_device
from trainer.data.photos.decoding import convert_channels, describe_failure, open_image
from trainer.data.photos.lazy_images import Picture
from trainer.data.photos.photo_reader import prepare_for_evaluation
from trainer.data.photos.pixel_range import recipe_pixel_range
from trainer.devices import cards, health
from trainer.devices.precision import autocast, set_precision
from trainer.errors import RecipeError
from trainer.models.features import record_features
from trainer.models.replayed_forward import ReplayedForward
from trainer.processes.resources import keep_freed_memory
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import sides
from trainer.tasks import Task
from trainer.training.trained import Preparation, Trained, create_task_without_loss

NOT_FINITE = (
    "gave up: the model's outputs are not finite: try precision=fp32, or weights of an earlier step"
)
# Number of consecutive batches of one size after which the forward pass is captured as a CUDA
# graph. A capture pays off only for many batches, and their number is not known in advance, so a
# few images are labeled without a graph.
WARM = 12


@dataclass(frozen=True)
class LabelModel:
    """Trained model with everything that is needed to label images.

    Attributes:
        recipe: Recipe of the run with the overrides of the command.
        task: Task, without its loss.
        model: Model in evaluation mode, on the CPU.
        classes: Name of each output.
        preparation: Preparation of images as in evaluation.
        data: Data set with a split to label; None if `photos` are labeled.
        photos: Paths of the images, directories and lists of paths to label if `data` is None.
    """

    recipe: Recipe
    task: Task
    model: nn.Module
    classes: tuple[str, ...]
    preparation: Preparation
    data: Datasets | None
    photos: Sequence[str]

    @classmethod
    def read(
        cls, path: Path, words: Sequence[str], photos: Sequence[str] = (), split: bool | None = None
    ) -> LabelModel:
        """Read the weights of a run or a checkpoint.

        Args:
            path: Run folder, checkpoint or weights file.
            words: Overrides of the run's recipe.
            photos: Paths to label in addition to a data.root= among `words`.
            split: Whether to label a split of the run's data set. None: only if there are no paths.

        Raises:
            CheckpointError: There are no such weights.
            RecipeError: An override is wrong, or the model does not label images.
        """
        trained = Trained.read(path, words)
        trained.say_choice()
        recipe = trained.recipe
        split_name = recipe.predict.split
        if split_name is not None and photos:
            raise RecipeError(
                f"predict.split={split_name} labels the run's own data set: leave it out, or "
                f"{photos[0]}"
            )
        # The data.root= of the run's recipe names the training images. Only a data.root= among
        # `words` names images to label.
        has_root = any(word.startswith("data.root=") for word in words)
        if split_name is None and has_root and recipe.data.root is not None:
            photos = (recipe.data.root, *photos)
        if split is None:
            split = not photos
        data = trained.data(recipe) if split else None
        is_plain = trained.facts.classes is not None and not trained.facts.mean
        if is_plain or (data is not None and data.plain):
            raise RecipeError(
                f"{path} was trained on inputs other than images, but predict labels images"
            )
        if data is None:
            classes, preparation = trained.preparation()
        else:
            classes = data.classes
            preparation = Preparation.of(data)
        task = create_task_without_loss(recipe, classes)
        if type(task).ranked is Task.ranked:
            # This task cannot rank classes. Call its method now, so that its error is raised here
            # and not in a worker.
            task.ranked(torch.zeros(0))
        if recipe.predict.tta and type(task).average is Task.average:
            # The method raises the error that says so.
            task.average(torch.zeros(0))
        model = trained.model(task, preparation.channels, preparation.image_size)
        outputs = recipe.model.num_classes or 0
        unnamed = tuple(f"class {n}" for n in range(len(classes), outputs))
        return cls(recipe, task, model, classes + unnamed, preparation, data, photos)

    def count_features(self) -> int:
        """Return the number of features of an image.

        Raises:
            RecipeError: The model has no features.
        """
        size = sides(self.preparation.image_size)
        image = torch.zeros(self.preparation.channels, *size)
        return count_features(self.model, len(self.classes), image)


class Labels(NamedTuple):
    """Prediction for one image, or the reason why there is none.

    Attributes:
        classes: Indices of at most five classes, the most probable one first; for a regression, the
            indices of all outputs. Empty if the image could not be labeled.
        probabilities: Probability of each class in `classes`, from 0 to 1; for a regression, the
            value of each output. Empty if the image could not be labeled.
        error: Why the image could not be labeled; empty if it was labeled.
        features: Input of the last layer (D,), with predict.features; None without.
    """

    classes: tuple[int, ...]
    probabilities: tuple[float, ...]
    error: str = ""
    features: Array | None = None


@dataclass
class Labeller:
    """Pool worker that labels images.

    An item is a path, an image in memory (uint8 of shape (C, H, W)), an exception that says why
    there is no image, or an index into `source`.

    Attributes:
        model: Model, which `setup` moves to the device.
        preparation: Preparation of images as in evaluation.
        recipe: Recipe with the options of prediction.
        task: Task that ranks the outputs.
        source: Data set of the items that are indices; None if no item is an index.
        threads: Threads that read the next images while the model computes; 0 reads and computes in
            turn.
        outputs: Number of the model's outputs; only features and views need it.
        gpu_decoding: Whether the device decodes JPEG files, for data.decode=gpu.
    """

    model: nn.Module
    preparation: Preparation
    recipe: Recipe
    task: Task
    source: PhotoSource | None = None
    threads: int = 0
    outputs: int = 0
    gpu_decoding: bool = False

    def setup(self, device: torch.device) -> None:
        recipe = self.recipe
        keep_freed_memory()
        if device.type == "cpu" and (recipe.threads or recipe.predict.batch_size):
            # If predict.batch_size is set, output files must be identical on every machine. The
            # number of threads changes the order in which kernels sum, so it must not depend on the
            # number of cores.
            torch.set_num_threads(recipe.threads or 1)
        if device.type == "cuda":
            health.check_card(device, cards.detect().count)
        set_precision(recipe.precision)
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.device = device
        self.model = self.model.to(device, memory_format=layout).eval()  # type: ignore[call-overload]
        self._transform = DeviceTransform(
            self.preparation.mean,
            self.preparation.std,
            self.preparation.image_size,
            recipe.channels_last,
            device,
        )
        self._jpeg_decoder: JpegDecoder | None = None
        # The device decodes the same photos as in an evaluation, so that their pixels are equal.
        self._most_bytes = 0
        if self.gpu_decoding:
            channels = self.preparation.channels
            self._jpeg_decoder = JpegDecoder(device, channels)
            self._most_bytes = channels * math.prod(sides(self.preparation.image_size))
        self._readers: ThreadPoolExecutor | None = None
        if self.threads:
            if device.type == "cuda":
                # Otherwise, torch would start one thread per core for each decoding thread.
                torch.set_num_threads(1)
            # Readers silence warnings themselves, but several threads undo each other's filters. So
            # warnings are silenced for the whole process.
            warnings.simplefilter("ignore")
            # A user's own data set may not be thread-safe, so one thread reads its items.
            is_thread_safe = self.source is None or isinstance(self.source, EncodedPhotos)
            threads = self.threads if is_thread_safe else 1
            self._readers = ThreadPoolExecutor(threads, "reading")
        # Notices go to stderr, because stdout may hold the results.
        say = partial(print, file=sys.stderr, flush=True)
        self._forward = ReplayedForward(
            self._run_model, [self.model], device, recipe.graphs is not False, say, WARM
        )

    def prepare(self, items: Sequence[Any]) -> Sequence[Any]:
        """Start reading a batch, and return futures of its images.

        Without decoding threads, `items` are returned as they are. The pool calls this when a batch
        arrives, while the previous batch is labeled.
        """
        if self._readers:
            return [self._readers.submit(self._read, item) for item in items]
        return items

    def batch(self, items: Sequence[Any]) -> list[Labels]:
        """Return the labels of items, or of the futures that `prepare` returned for them.

        An item that cannot be read gets the reason in `Labels.error`.
        """
        images: list[Any] = [
            item.result() if isinstance(item, Future) else self._read(item) for item in items
        ]
        if self._jpeg_decoder:
            encoded = [row for row, image in enumerate(images) if isinstance(image, Picture)]
            pictures = self._jpeg_decoder.open(images[row].jpeg for row in encoded)
            for row, picture in zip(encoded, pictures, strict=True):
                try:
                    # A copy, because a crop keeps the memory of the whole image.
                    images[row] = self._prepare_picture(picture).clone()
                except Exception as error:
                    if is_of_device(error):
                        raise
                    images[row] = Labels((), (), describe_failure(error))
        readable = [image for image in images if not isinstance(image, Labels)]
        labels = iter(self._label(readable))
        return [image if isinstance(image, Labels) else next(labels) for image in images]

    def _read(self, item: Any) -> Tensor | Picture | Labels:
        """Return the image of an item, a `Picture` to decode on the device, or `Labels`."""
        try:
            picture = self._open(item)
            if picture.jpeg is not None and len(picture.jpeg) <= self._most_bytes:
                return picture
            return self._prepare_picture(picture)
        # Decoders raise exceptions of any type for a damaged image, which must not stop the worker.
        except Exception as error:
            return Labels((), (), describe_failure(error))

    def _prepare_picture(self, picture: Picture) -> Tensor:
        preparation = self.preparation
        return prepare_for_evaluation(
            picture,
            preparation.image_size,
            preparation.shorter_side,
            preparation.interpolation,
        )

    def _open(self, item: Any) -> Picture:
        channels = self.preparation.channels
        if isinstance(item, Exception):
            raise item
        if isinstance(item, str):
            return open_image(item, channels, recipe_pixel_range(self.recipe.data))
        if isinstance(item, int) and isinstance(self.source, PictureSource):
            return self.source.open(item, channels)[0]
        if isinstance(item, int):
            assert self.source is not None
            item = self.source.read(item, channels)[0]
        return Picture.of(convert_channels(item, channels))

    def _label(self, images: list[Tensor]) -> list[Labels]:
        """Label prepared images as one batch."""
        if not images:
            return []
        if self._jpeg_decoder:
            batch = torch.stack([image.to(self.device) for image in images])
        else:
            batch = torch.empty(
                len(images),
                *images[0].shape,
                dtype=images[0].dtype,
                pin_memory=self.device.type == "cuda",
            )
            torch.stack(images, out=batch)
        with torch.inference_mode():
            rows = batch.to(self.device, non_blocking=True).permute(0, 2, 3, 1).contiguous()
            outputs = self._forward(self._transform.inputs(rows))
            assert outputs is not None
            outputs = outputs.float()
            features: Sequence[Array | None] = [None] * len(images)
            if self.recipe.predict.features:
                features = [*outputs[:, self.outputs :].cpu().numpy()]
                outputs = outputs[:, : self.outputs]
            classes, values = self.task.ranked(outputs)
            ranked = zip(classes.tolist(), values.tolist(), features, strict=True)
        labels = []
        for best, row, vector in ranked:
            if all(map(math.isfinite, row)):
                labels.append(Labels(tuple(best), tuple(row), features=vector))
            else:
                labels.append(Labels((), (), NOT_FINITE))
        return labels

    def _run_model(self, batch: Tensor) -> Tensor:
        """Return the outputs of a batch, followed by the features if they are asked for."""
        options = self.recipe.predict
        if options.tta is None:
            return self._run_view(batch)
        views = torch.stack([self._run_view(batch), self._run_view(batch.flip(-1))]).float()
        averaged = self.task.average(views[..., : self.outputs])
        return torch.cat([averaged, views[..., self.outputs :].mean(0)], 1)

    def _run_view(self, batch: Tensor) -> Tensor:
        with autocast(self.device, self.recipe.precision):
            if not self.recipe.predict.features:
                outputs: Tensor = self.model(batch)
                return outputs
            with record_features(self.model, self.outputs) as features:
                outputs = self.model(batch)
        return torch.cat([outputs.float(), features[0].float()], 1)


class Forward:
    """Pool worker that runs any model.

    Items are inputs without the batch dimension, and results are the outputs of the model.
    """

    def __init__(self, model: nn.Module | bytes) -> None:
        """Accept a model, or the bytes that `pickling.pickle_by_value` returned for a model."""
        self.model: nn.Module = pickle.loads(model) if isinstance(model, bytes) else model

    def setup(self, device: torch.device) -> None:
        self.device = device
        self.model = self.model.to(device).eval()

    def batch(self, items: Sequence[Tensor]) -> Any:
        with torch.inference_mode():
            outputs = self.model(torch.stack(list(items)).to(self.device))
        if isinstance(outputs, Tensor):
            return outputs
        tree_map = torch.utils._pytree.tree_map
        return [tree_map(lambda leaf, n=n: leaf[n], outputs) for n in range(len(items))]
