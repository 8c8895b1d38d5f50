"""A trained run as an object, for programs: `trainer.load("runs/first").predict(["photo.jpg"])`."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.predict.labelling import Labeller, LabelModel, Labels
from trainer.commands.predict.python_api import chosen_devices
from trainer.commands.predict.sources import image_files
from trainer.data.items import as_input
from trainer.data.photos.decoding import from_item, reason
from trainer.data.photos.pixel_range import wanted_of
from trainer.errors import PredictionError, RecipeError
from trainer.pool import DevicePool, ItemError
from trainer.saving.run_names import newest_run, run_named

AT_ONCE = 64  # images
FORMS = "paths, Pillow images, uint8 arrays (H, W, C) and tensors (C, H, W), or a list of them"
Images = Any  # a path, a Pillow image, an array, a tensor, or a sequence of these


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image.

    Attributes:
        labels: the most probable classes, at most five, the most probable first; of a regression its values' names.
        probabilities: theirs, from 0 to 1; of a regression the values.
    """

    labels: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.labels[0]

    @property
    def probability(self) -> float:
        """Of `label`."""
        return self.probabilities[0]


class LoadedModel:
    """A trained model that labels images as the run that trained it evaluated them.

    Attributes:
        path: of the run, or of the weights.
        model: in evaluation mode, on the CPU until `predict` takes it to a GPU. Its input is float32 (N, channels,
            height, width), normalised.
        classes: names of the outputs, in their order.
    """

    def __init__(self, path: Path, words: Sequence[str] = ()) -> None:
        self.path = path
        self._words = tuple(words)
        self._trained = LabelModel.read(path, self._words, split=False)
        self.model: nn.Module = self._trained.model
        self.classes: tuple[str, ...] = self._trained.classes
        # What a run says of its processes is not for a program's.
        self._recipe = self._trained.recipe.replace(threads=None, predict={})

    def predict(
        self,
        images: Images,
        devices: Sequence[str | torch.device] | str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> Any:
        """Label images.

        Args:
            images: a path of an image or a folder, a Pillow image, an array (H, W, C) or (H, W), a tensor (C, H, W) or
                several (N, C, H, W), or a sequence of these. Arrays and tensors are uint8, not normalised.
            devices: None is the first GPU, or else the CPU, in this process. A list, as in ["cuda:0", "cuda:1"], or
                "auto" starts a worker for each, which pays for many images.
            on_error: "skip" puts a PredictionError in place of the answer to an image that cannot be read, as
                `DevicePool.map` does; "raise" raises the first.

        Returns:
            A `Prediction`; a list of them for a folder, a batch or a sequence, in order.

        Raises:
            PredictionError: an image cannot be read; says which.
            RecipeError: something else in place of images or devices.
            SetupError: a folder without images.
        """
        if on_error not in ("raise", "skip"):
            raise RecipeError(f"predict(): on_error={on_error!r} must be 'raise' or 'skip'")
        items, several = self._items(images)
        answers: list[Prediction | PredictionError] = []
        with closing(self._labelled(items, devices)) as labelled:
            for number, (labels, item) in enumerate(zip(labelled, items, strict=True)):
                if isinstance(labels, Labels) and not labels.error:
                    names = tuple(self.classes[place] for place in labels.classes)
                    answers.append(Prediction(names, labels.probabilities))
                    continue
                error = labels.message if isinstance(labels, ItemError) else labels.error
                answer = PredictionError(f"{item if isinstance(item, str) else f'image {number}'}: {error}")
                if on_error == "raise":
                    raise PredictionError(f"{answer}; on_error='skip' answers for the others") if several else answer
                answers.append(answer)
        return answers if several else answers[0]

    def _labelled(self, items: Sequence[Any], devices: Any) -> Generator[Labels | ItemError, None, None]:
        if devices is None:
            for start in range(0, len(items), AT_ONCE):
                yield from self._labeller.batch([self._decoded(item) for item in items[start : start + AT_ONCE]])
            return
        made = self._trained
        arguments = self.model, made.preparation, self._recipe, made.task, None
        with DevicePool(chosen_devices(devices), Labeller, arguments=arguments, on_error="skip") as pool:
            yield from pool.map(map(self._decoded, items))

    @cached_property
    def _labeller(self) -> Labeller:
        """This process's own. Launched: its program may call it from several threads, and change the model."""
        made = self._trained
        labeller = Labeller(self.model, made.preparation, self._recipe.replace(graphs=False), made.task, None)
        labeller.setup(torch.device(chosen_devices("auto")[0]))
        return labeller

    def evaluate(self, *words: str) -> dict[str, float]:
        """Evaluate on the run's held-out images again; see `trainer.evaluate`."""
        return evaluate_run(self.path, *self._words, *words)

    def export(self, format: str, output: str | Path | None = None) -> Path:
        """Write a file for other programs, checked against this model; returns its path.

        Args:
            format: onnx or exported_program.
            output: the file; None: beside the run's weights.

        Raises:
            RecipeError: no such format, or the file is there.
            SetupError: a library is missing, or the file cannot be written.
        """
        return export_run(self.path, format, output, self._words)[0]

    def _items(self, images: Images) -> tuple[list[Any], bool]:
        """A path, a Pillow image or a tensor (C, H, W) uint8 for each image, and whether these are several."""
        if isinstance(images, str | os.PathLike):
            path = str(Path(images).expanduser())
            several = os.path.isdir(path)
            return [item.path for item in image_files([path]).items] if several else [path], several
        if isinstance(images, Image.Image):
            return [images], False
        if isinstance(images, Tensor | np.ndarray):
            several = images.ndim == 4
            return [self._item(image) for image in (images if several else [images])], several
        if isinstance(images, Sequence) and not isinstance(images, bytes):
            return [item for image in images for item in self._items(image)[0]], True
        raise RecipeError(f"predict() takes {FORMS}, not {type(images).__name__}")

    def _item(self, image: Tensor | np.ndarray[Any, Any]) -> Tensor:
        try:
            array = as_input(image) if isinstance(image, np.ndarray) else image
            if array.dtype != torch.uint8:
                kind = str(array.dtype).removeprefix("torch.")
                raise TypeError(f"this one is {kind}: give its file's path, which is read as data.pixel_range says")
            channels = self._trained.preparation.channels
            if isinstance(image, np.ndarray) and channels not in (1, 3) and image.shape[2:] == (channels,):
                array = array.movedim(-1, 0)
            return from_item(array, channels)
        except TypeError as error:
            raise RecipeError(f"predict() takes {FORMS}: {error}") from None

    def _decoded(self, item: Any) -> Any:
        """What a worker takes: Pillow images as tensors, or why they are none."""
        if not isinstance(item, Image.Image):
            return item
        try:
            return from_item(item, self._trained.preparation.channels, wanted_of(self._trained.recipe.data))
        except Exception as error:  # decoders raise anything at all
            return PredictionError(reason(error))


def load(run: str | Path | None = None, *words: str) -> LoadedModel:
    """A trained run, ready to label images.

    Args:
        run: a run folder (its last weights) or its name below runs, one of its checkpoints, or a .safetensors file;
            None: the newest run below runs.
        words: `key=value` on top of the run's own recipe, as in "precision=bf16".

    Raises:
        CheckpointError: there is no such run, or none with weights.
        RecipeError: the words mean nothing, or the run was trained on something else than images.
    """
    if not isinstance(run, str | Path | None):
        raise RecipeError(f"load() takes a run's path, as in load('runs/x'), not {type(run).__name__}")
    return LoadedModel(newest_run() if run is None else run_named(str(run)), words)
