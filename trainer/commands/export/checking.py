"""Checks of an exported file before it is written: against the model, and against `predict`."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from trainer.commands.predict.labelling import Labeller
from trainer.commands.predict.sources import open_split
from trainer.data import PhotoSource, PictureSource, TensorSpec
from trainer.errors import RecipeError, read_text
from trainer.tasks import Task
from trainer.training.trained import Preparation, Trained

# Batch sizes of the check, each with the height and width of its random photos. The model is traced
# with 2 samples, and the file must work for any number and size.
BATCHES = {1: (97, 160), 2: (160, 97), 5: (31, 47)}
# Number of images on which the file is compared with `predict`.
IMAGES = 16
# Number of random photos for this comparison if the images of the run cannot be read.
RANDOM_PHOTOS = 4
Runner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExportSource:
    """Trained model to export.

    Attributes:
        trained: Weights and recipe.
        task: Task, without its loss.
        network: Network in evaluation mode, on the CPU, in float32.
        model: Module that the file will contain.
        reference: The same module in float32.
        inputs: Shape and type of one sample of the network, without the batch dimension.
        preparation: Preparation of photos within `model`; None if there is none.
        tolerance: Allowed difference of an output, relative to the largest output of the batch.
        facts: Metadata to store with the model, as JSON types: classes, mean, std, sizes, and
            descriptions of inputs and outputs.
    """

    trained: Trained
    task: Task
    network: nn.Module
    model: nn.Module
    reference: nn.Module
    inputs: TensorSpec
    preparation: Preparation | None
    tolerance: float
    facts: dict[str, Any]

    def sample(self, rows: int, seed: int = 0) -> Tensor:
        """Return random inputs of shape (rows, ...).

        Floating-point inputs are normally distributed. Photos are random bytes. Other integers are
        0 or 1, which are in every vocabulary.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.preparation is not None:
            photos = (rows, *BATCHES.get(rows, (64, 48)), self.preparation.channels)
            return torch.randint(0, 256, photos, generator=generator, dtype=torch.uint8)
        shape = (rows, *self.inputs.shape)
        dtype = self.inputs.dtype
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, 2, shape, generator=generator).to(dtype)


def compare_with_model(source: ExportSource, run: Runner) -> str:
    """Compare the outputs of a file with those of the model on random batches.

    Args:
        source: The model.
        run: Function that runs the file on a batch.

    Returns:
        A phrase with the largest output and the largest difference.

    Raises:
        ValueError: The outputs have another shape, or differ too much.
    """
    worst = 0.0
    largest = 0.0
    for rows in BATCHES:
        inputs = source.sample(rows, seed=rows)
        expected = source.reference(inputs)
        with quietly():
            outputs = run(inputs)
        if outputs.shape != expected.shape:
            raise ValueError(
                f"for {rows} samples it gives {tuple(outputs.shape)} instead of "
                f"{tuple(expected.shape)}"
            )
        difference = (outputs.double() - expected.double()).abs().max().item()
        peak = expected.abs().max().item()
        worst = max(worst, difference)
        largest = max(largest, peak)
        allowed = source.tolerance * (peak or 1.0)
        # A comparison with NaN is false, so `not <=` refuses NaN as well, and `>` would not.
        if not difference <= allowed:
            raise ValueError(
                f"for {rows} samples its outputs differ by {difference:.2g}, allowed is "
                f"{allowed:.2g}"
            )
    return (
        f"on random batches of {', '.join(map(str, BATCHES))}: outputs of up to {largest:.3g} "
        f"differ by at most {worst:.2g}, allowed is {source.tolerance * largest:.2g}"
    )


def compare_with_predict(source: ExportSource, run: Runner) -> dict[str, str]:
    """Compare a file that prepares photos with the command `predict`, on images of the run.

    Both get the same pixels, decoded in full. `predict` itself decodes large JPEGs at a reduced
    size, so the difference from its answers for the files is reported as well.

    Args:
        source: The model, with a preparation of photos.
        run: Function that runs the file on a batch.

    Returns:
        Phrases with the number of images and the largest differences, by their titles.

    Raises:
        RecipeError: An answer differs by more than the tolerance.
    """
    assert source.preparation is not None
    if type(source.task).ranked is Task.ranked:
        return {"predict": f"not compared: it cannot label with {source.facts['task']}"}
    recipe = source.trained.recipe.replace(threads=None, predict={}, graphs=False, precision="fp32")
    labeller = Labeller(source.network, source.preparation, recipe, source.task)
    labeller.setup(torch.device("cpu"))
    where = "of the run"
    phrases = {}
    try:
        images, labeller.source = _read_images(source.trained, source.preparation.channels)
    # A user's own data set can raise any exception.
    except Exception as error:
        images = []
        phrases["images"] = f"not read: {read_text(error)[:90]}"
    if not images:
        where = "of random pixels"
        photos = [source.sample(1, seed)[0].permute(2, 0, 1) for seed in range(RANDOM_PHOTOS)]
        images = [(photo, photo) for photo in photos]
    has_classes = source.task.reads != "values"
    count = 0
    same = 0
    worst = 0.0
    worst_file = 0.0
    for pixels, item in images:
        expected, expected_file = labeller.batch([pixels, item])
        if expected.error:
            continue
        with quietly():
            outputs = run(pixels.permute(1, 2, 0)[None].contiguous())[0]
        answers = outputs[list(expected.classes)].double()
        difference = (answers - torch.tensor(expected.probabilities)).abs().max().item()
        allowed = source.tolerance
        if has_classes:
            # The file's own first class must be as probable as that of `predict`.
            lead = outputs[: len(source.task.names)].max().double() - answers[0]
            same += lead.item() <= 0
            difference = max(difference, lead.item())
        else:
            allowed *= max(map(abs, expected.probabilities)) or 1.0
        if not difference <= allowed:
            remedy = "preprocess=false"
            if source.facts["precision"] == "fp16":
                remedy = "precision=fp32"
            raise RecipeError(
                f"for image {count} {where}, the file differs from predict by {difference:.2g}, "
                f"allowed is {allowed:.2g}: type {remedy}"
            )
        count += 1
        worst = max(worst, difference)
        if not expected_file.error:
            given = torch.tensor(expected_file.probabilities)
            values = outputs[list(expected_file.classes)].double()
            worst_file = max(worst_file, (values - given).abs().max().item())
    classes = f", {same} of {count} classes equal" if has_classes else ""
    limit = f"allowed is {source.tolerance:.2g}"
    phrases["predict"] = f"on {count} images {where}: by at most {worst:.2g}, {limit}{classes}"
    if worst_file > worst:
        phrases["files"] = f"by {worst_file:.2g}: predict reads large JPEGs at a reduced size"
    return phrases


def _read_images(
    trained: Trained, channels: int
) -> tuple[list[tuple[Tensor, Any]], PhotoSource | None]:
    """Read images of the run's validation split, evenly spaced. Damaged files are left out.

    Returns:
        (images, source): the pixels (C, H, W) uint8 of each image together with its item for a
        `Labeller` of `source`.

    Raises:
        Exception: The data set cannot be opened.
    """
    data = trained.data(trained.recipe.replace(data__download=False))
    # Small photos are in memory, resized. The original ones also check the resizing.
    original: Any = data.sources[1] if data.sources else None
    has_original = isinstance(original, PictureSource)
    if has_original:
        data = replace(data, val=original)
    split = open_split(data, "val")
    source = split.source
    step = max(1, (split.count or 0) // IMAGES)
    images = []
    for item in islice(split.items, 0, step * IMAGES, step):
        pixels = item.payload
        try:
            if isinstance(pixels, int) and isinstance(source, PictureSource):
                pixels = source.open(pixels, channels)[0].decode(1)
            elif isinstance(pixels, int):
                assert source is not None
                pixels = source.read(pixels, channels)[0]
        # Decoders raise exceptions of any type for a damaged image.
        except Exception:
            continue
        images.append((pixels, item.payload))
    return images, source


@contextmanager
def quietly() -> Iterator[None]:
    """Silence Python warnings, and log lines up to level ERROR, within the `with` block."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
