"""Trained runs as Python objects: `trainer.load("runs/first").predict(["photo.jpg"])`."""

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.predict.features import Array
from trainer.commands.predict.labelling import Labeller, LabelModel, Labels
from trainer.commands.predict.python_api import Devices, choose_devices
from trainer.commands.predict.sources import find_images
from trainer.data.items import as_input
from trainer.data.photos.decoding import decode_item, describe_failure
from trainer.data.photos.pixel_range import recipe_pixel_range
from trainer.errors import PredictionError, RecipeError
from trainer.pool import DevicePool, ItemError
from trainer.processes.torch_context import plain_context
from trainer.saving.run_names import find_run, newest_run, split_choice

# Batch size if this process labels the images itself.
AT_ONCE = 64
FORMS = "paths, Pillow images, uint8 arrays (H, W, C) and tensors (C, H, W), or a list of them"
# A path, a Pillow image, an array, a tensor, or a sequence of these.
Images = Any


@dataclass(frozen=True)
class Prediction:
    """Prediction of a model for one image.

    Attributes:
        labels: At most five classes, the most probable one first; names of the values for a
            regression.
        probabilities: Probability of each class, from 0 to 1; the values for a regression.
        features: Input of the last layer (D,), with predict.features; None without.
    """

    labels: tuple[str, ...]
    probabilities: tuple[float, ...]
    features: Array | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Most probable class."""
        return self.labels[0]

    @property
    def probability(self) -> float:
        """Probability of `label`."""
        return self.probabilities[0]


class LoadedModel:
    """Trained model that labels images. It prepares the images as in the evaluation of its run.

    Attributes:
        path: Path of the run or the weights.
        model: Model in evaluation mode, on the CPU until `predict` moves it to a GPU. Its input is
            normalized float32 of shape (N, channels, height, width).
        classes: Name of each output.
    """

    @plain_context()
    def __init__(self, path: Path, words: Sequence[str]) -> None:
        self.path = path
        self._words = tuple(words)
        trained = LabelModel.read(path, self._words, split=False)
        self._trained = trained
        self.model = trained.model
        self.classes = trained.classes
        # The number of threads and the other keys of `predict` were chosen for the processes of
        # commands. They do not apply to the caller's process, so they get their defaults.
        options = trained.recipe.predict
        chosen = {"tta": options.tta, "features": options.features}
        self._recipe = trained.recipe.replace(threads=None, predict=chosen)
        if options.features:
            trained.count_features()

    @plain_context()
    def predict(
        self,
        images: Images,
        devices: Devices | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> Any:
        """Label images.

        Args:
            images: Path of an image or a directory, Pillow image, array of shape (H, W, C) or
                (H, W), tensor of shape (C, H, W) or (N, C, H, W), or a sequence of these. Arrays
                and tensors are uint8, not normalized.
            devices: None uses the first GPU, or the CPU without one, in this process. A list, as in
                ["cuda:0", "cuda:1"], or "auto" starts a worker for each device, which pays off for
                many images.
            on_error: "raise" raises the error of the first image that cannot be labeled, such as a
                damaged file. "skip" returns a PredictionError instead of the Prediction of each
                such image.

        Returns:
            A `Prediction` for a single image. For a directory, a batch or a sequence, a list with
            one prediction for each image, in the order of the images.

        Raises:
            PredictionError: An image cannot be labeled; the message names the image.
            RecipeError: An argument has another type, or there is no such device.
            SetupError: A directory has no images.
        """
        if on_error not in ("raise", "skip"):
            raise RecipeError(f"predict(): on_error={on_error!r} must be 'raise' or 'skip'")
        items, is_several = self._list_items(images)
        answers: list[Prediction | PredictionError] = []
        with closing(self._label(items, devices)) as results:
            for number, (labels, item) in enumerate(zip(results, items, strict=True)):
                if isinstance(labels, Labels) and not labels.error:
                    names = tuple(self.classes[n] for n in labels.classes)
                    answers.append(Prediction(names, labels.probabilities, labels.features))
                    continue
                reason = labels.message if isinstance(labels, ItemError) else labels.error
                name = item if isinstance(item, str) else f"image {number}"
                message = f"{name}: {reason}"
                if on_error == "skip":
                    answers.append(PredictionError(message))
                    continue
                if is_several:
                    message += "; on_error='skip' answers for the others"
                raise PredictionError(message)
        if is_several:
            return answers
        return answers[0]

    def _label(
        self, items: Sequence[Any], devices: Any
    ) -> Generator[Labels | ItemError, None, None]:
        if devices is None:
            for start in range(0, len(items), AT_ONCE):
                batch = [self._decode(item) for item in items[start : start + AT_ONCE]]
                yield from self._labeller.batch(batch)
            return
        trained = self._trained
        outputs = len(self.classes)
        arguments = (self.model, trained.preparation, self._recipe, trained.task, None, 0, outputs)
        with DevicePool(
            choose_devices(devices), Labeller, arguments=arguments, on_error="skip"
        ) as pool:
            yield from pool.map(map(self._decode, items))

    @cached_property
    def _labeller(self) -> Labeller:
        """Labeller of this process.

        It uses no CUDA graphs, because the caller may use several threads or change the model.
        """
        trained = self._trained
        recipe = self._recipe.replace(graphs=False)
        labeller = Labeller(
            self.model,
            trained.preparation,
            recipe,
            trained.task,
            outputs=len(self.classes),
        )
        labeller.setup(torch.device(choose_devices("auto")[0]))
        return labeller

    def evaluate(self, *words: str) -> dict[str, float]:
        """Evaluate the run again, by default on its validation split; see `trainer.evaluate`."""
        return evaluate_run(self.path, *self._words, *words)

    @plain_context()
    def export(
        self,
        format: str,
        output: str | Path | None = None,
        preprocess: bool = True,
        precision: str = "fp32",
    ) -> Path:
        """Write a file for other programs, checked against this model, and return its path.

        Args:
            format: "onnx" or "exported_program".
            output: Path of the file; None puts it next to the run's weights.
            preprocess: Whether the file accepts decoded photos, and returns probabilities. False
                exports the network alone.
            precision: "fp32" or "fp16", the type in which the network computes.

        Raises:
            RecipeError: There is no such format, or the file exists.
            SetupError: A library is missing, or the file cannot be written.
        """
        return export_run(self.path, format, output, self._words, preprocess, precision)[0]

    def _list_items(self, images: Images) -> tuple[list[Any], bool]:
        """Convert what the caller passed to `predict` into one item per image.

        Returns:
            (items, is_several): each item is a path, a Pillow image, or a uint8 tensor of shape
            (C, H, W). `is_several` is False if the caller passed one image by itself.
        """
        if isinstance(images, str | os.PathLike):
            path = str(Path(images).expanduser())
            if os.path.isdir(path):
                return [item.path for item in find_images([path]).items], True
            return [path], False
        if isinstance(images, Image.Image):
            return [images], False
        if isinstance(images, Tensor | np.ndarray):
            if images.ndim == 4:
                return [self._as_tensor(image) for image in images], True
            return [self._as_tensor(images)], False
        if isinstance(images, Sequence) and not isinstance(images, bytes):
            items = []
            for image in images:
                items += self._list_items(image)[0]
            return items, True
        raise RecipeError(f"predict() accepts {FORMS}, not {type(images).__name__}")

    def _as_tensor(self, image: Tensor | np.ndarray[Any, Any]) -> Tensor:
        try:
            array = as_input(image) if isinstance(image, np.ndarray) else image
            if array.dtype != torch.uint8:
                raise TypeError(
                    f"this one is {str(array.dtype).removeprefix('torch.')}: give its file's path, "
                    "which is read as data.pixel_range says"
                )
            channels = self._trained.preparation.channels
            # `as_input` moves the channels of an array to the front only if there are 1 or 3 of
            # them. Other numbers of channels are moved here.
            is_numpy = isinstance(image, np.ndarray)
            if is_numpy and channels not in (1, 3) and image.shape[2:] == (channels,):
                array = array.movedim(-1, 0)
            return decode_item(array, channels)
        except TypeError as error:
            raise RecipeError(f"predict() accepts {FORMS}: {error}") from None

    def _decode(self, item: Any) -> Any:
        """Return an item that can be sent to a worker.

        A Pillow image becomes a tensor or, if it cannot be decoded, a PredictionError.
        """
        if not isinstance(item, Image.Image):
            return item
        try:
            trained = self._trained
            return decode_item(
                item, trained.preparation.channels, recipe_pixel_range(trained.recipe.data)
            )
        # Decoders raise exceptions of any type for a damaged image.
        except Exception as error:
            return PredictionError(describe_failure(error))


def load(run: str | Path | None = None, *words: str) -> LoadedModel:
    """Load a trained run to label images.

    Args:
        run: Run folder (for its best weights, or else its last), name of a run below runs,
            checkpoint of a run, or .safetensors file; None is the newest run below runs.
        words: `key=value` overrides of the run's recipe, as in "precision=bf16". "checkpoint=last"
            reads the last weights.

    Raises:
        CheckpointError: There is no such run, or it has no weights.
        RecipeError: An override is wrong, or the run was trained on inputs other than images.
    """
    if not isinstance(run, str | Path | None):
        raise RecipeError(
            f"load() accepts the path of a run, as in load('runs/x'), not {type(run).__name__}"
        )
    choice, rest = split_choice(words)
    name = newest_run() if run is None else run
    return LoadedModel(find_run(f"{name}{choice}"), rest)
