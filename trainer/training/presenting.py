"""Pictures of a run in TensorBoard: images with predictions, and a confusion matrix.

Rank 0 draws its first batch at the start, the same few validation images at each evaluation, and at
the end the confusion matrix and the worst mistakes over the samples of all ranks.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data import Batch, Datasets, as_pictures
from trainer.data.feeds import find_labels, read_pictures
from trainer.errors import TrainerError, describe
from trainer.saving.files import escape_non_utf8, format_csv
from trainer.tasks import Task
from trainer.tasks.task import figure
from trainer.telemetry.events import image_summary
from trainer.telemetry.tracking import NullTracker
from trainer.training import drawing
from trainer.training.evaluation import WORST, Mistakes
from trainer.training.state import Resolved

# Maximum number of samples of the first batch that are shown, and maximum number of their pixels
# together. One sample is shown even if it has more pixels.
SEEN = 32
PIXELS = 2**22
# Maximum number of validation images that are shown at each evaluation, and of mistakes that are
# shown at the end.
EXAMPLES = 8
MISTAKES = 16
# Number of these images in a row of a picture.
COLUMNS = 4
# Maximum fraction of a run's time for drawing the images at evaluations. If evaluations follow each
# other within about 0.3 s, some of them have no picture.
MAX_COST = 0.01


def show_first_batch(tracker: NullTracker, datasets: Datasets, task: Task, batch: Batch) -> None:
    """Show the first batch as the model sees it: augmented, with labels if this rank reads them.

    Only the first step waits for the drawing. With logging.warmup_steps > 0, no reported speed
    includes that step.
    """
    if not tracker.shows:
        return
    with skip_on_error(tracker):
        pixels = max(1, batch.inputs.shape[2:].numel())
        count = min(SEEN, max(1, PIXELS // pixels))
        images = as_pictures(datasets, batch.inputs[:count])
        if images is not None and len(images):
            targets = batch.targets[:count].cpu()
            captions = [[format_caption(task, datasets.classes, target)] for target in targets]
            channels = batch.inputs.shape[1]
            if (shown := images.shape[-1]) < channels:
                tracker.say(f"  pictures show {shown} of the {channels} channels, the first")
            picture = drawing.draw_grid(images.numpy(), captions)
            tracker.show(image_summary("batch as the model sees it", picture), 0)


class Examples:
    """A picture of the same few validation images at each evaluation, with current predictions."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._samples: list[int] = []
        # Output and target in the current evaluation of each sample that this rank evaluates.
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        # Images of the samples on rank 0, (n, H, W, C) uint8; None before the first evaluation.
        self._images: Any = None
        self._spent = 0.0
        self._start = time.perf_counter()
        # A task that does not override `ranked` does not define the meaning of its outputs.
        has_ranked = type(resolved.task).ranked is not Task.ranked
        are_images = resolved.datasets.plain is None
        if resolved.recipe.logging.tensorboard and has_ranked and are_images:
            self._samples = choose_examples(resolved.datasets)

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Keep outputs and targets of the examples in a batch, without waiting for the device."""
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or batch.samples is None:
            return
        for sample in self._samples:
            if sample in batch.samples:
                row = batch.samples.index(sample)
                # The next batch may overwrite outputs of a CUDA graph.
                self._rows[sample] = outputs[row].detach().clone(), batch.targets[row].clone()

    def show(self, step: int, is_last: bool) -> None:
        """Show the examples of the evaluation after `step`. Collective.

        Args:
            step: Number of steps done.
            is_last: Whether this may be the last evaluation, which is shown even if drawing has
                taken more than MAX_COST of the time.
        """
        if not self._samples:
            return
        resolved = self._resolved
        local = {
            sample: (outputs.float().cpu(), target.cpu())
            for sample, (outputs, target) in self._rows.items()
        }
        self._rows = {}
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for rank_rows in resolved.world.gather(local):
            rows |= rank_rows
        start = time.perf_counter()
        spent = self._spent
        is_affordable = spent <= MAX_COST * (start - self._start)
        if not resolved.tracker.shows or not rows or not (is_affordable or is_last):
            return
        # If drawing fails, this value remains, so only the last evaluation tries again.
        self._spent = math.inf
        with skip_on_error(resolved.tracker):
            samples = [sample for sample in self._samples if sample in rows]
            if self._images is None:
                self._images = read_pictures(resolved.datasets, resolved.recipe, samples).numpy()
            outputs = torch.stack([rows[sample][0] for sample in samples])
            targets = torch.stack([rows[sample][1] for sample in samples])
            classes = resolved.datasets.classes
            captions, frames = describe_predictions(resolved.task, classes, outputs, targets)
            picture = drawing.draw_grid(self._images, captions, COLUMNS, frames)
            resolved.tracker.show(image_summary("validation images", picture), step)
            self._spent = spent + time.perf_counter() - start


def choose_examples(datasets: Datasets) -> list[int]:
    """Return the indices of at most EXAMPLES validation samples.

    If the class of each sample is known, they include the first sample of as many classes as
    possible. The others are evenly spaced in the validation set.
    """
    labels = find_labels(datasets.val, skip=False)
    first = np.empty(0, dtype=int)
    if labels is not None and labels.dim() == 1:
        _, first = np.unique(labels.numpy(), return_index=True)
        first = _space_out(first, EXAMPLES)
    others = np.delete(np.arange(len(datasets.val)), first)
    return [*first.tolist(), *_space_out(others, EXAMPLES - len(first)).tolist()]


def _space_out(indices: drawing.Numbers, count: int) -> drawing.Numbers:
    """Return at most `count` evenly spaced elements of `indices`."""
    places = np.linspace(0, len(indices) - 1, min(count, len(indices)))
    spaced: drawing.Numbers = indices[places.round().astype(int)]
    return spaced


def describe_predictions(
    task: Task, classes: Sequence[str], outputs: Tensor, targets: Tensor
) -> tuple[list[list[str]], list[drawing.Colour]]:
    """Compare predictions with targets, for a picture of the samples.

    Args:
        task: The task.
        classes: Names of the classes.
        outputs: Outputs of the model, (n, outputs).
        targets: Targets, (n, ...).

    Returns:
        (captions, frames): the lines of text for each sample, and the color of its frame. There are
        no frames around predicted numbers, which hardly ever equal their targets.
    """
    predicted = outputs
    probabilities: list[float] = []
    if task.reads == "class":
        ranked, numbers = task.ranked(outputs)
        predicted = ranked[:, 0]
        probabilities = numbers[:, 0].tolist()
    elif task.reads == "classes":
        is_predicted = task.to_probabilities(outputs) > 0.5
        predicted = is_predicted[:, : targets.shape[1]].float()
    captions = []
    frames = []
    for row, target in enumerate(targets):
        lines = [
            f"{title} {format_caption(task, classes, value) or '-'}"
            for title, value in (("true", target), ("pred.", predicted[row]))
        ]
        if probabilities:
            lines.append(f"probability {probabilities[row]:.0%}")
        captions.append(lines)
        if task.reads != "values":
            is_right = torch.equal(predicted[row], target)
            frames.append(drawing.RIGHT if is_right else drawing.WRONG)
    return captions, frames


def report_mistakes(resolved: Resolved, collected: Mistakes, step: int) -> None:
    """Write worst.csv, and show the confusion matrix and the worst mistakes. Collective.

    Args:
        resolved: The configuration of the run.
        collected: The predictions of the evaluation after `step`.
        step: Number of steps done.
    """
    datasets = resolved.datasets
    tracker = resolved.tracker
    classes = datasets.classes
    address = getattr(datasets.val, "where", None) or f"{datasets.name}/val/{{}}".format
    worst = collected.gathered(resolved.world)
    rows = [
        (
            escape_non_utf8(str(address(mistake.place))),
            format_class(classes, mistake.target),
            format_class(classes, mistake.predicted),
            f"{mistake.label_probability:.4g}",
            f"{mistake.predicted_probability:.4g}",
        )
        for mistake in worst
    ]
    if tracker.path and not datasets.synthetic and rows:
        head = ("path", "label", "predicted", "label_probability", "predicted_probability")
        tracker.replace(WORST, format_csv([head, *rows]))
    if not tracker.shows or collected.pairs is None:
        return
    with skip_on_error(tracker):
        names = [format_class(classes, index) for index in range(len(collected.pairs))]
        matrix = drawing.draw_confusion(collected.pairs.numpy(), names)
        tracker.show(image_summary("confusion matrix", matrix), step)
        wrong = [mistake for mistake in worst if mistake.predicted != mistake.target][:MISTAKES]
        if wrong and datasets.plain is None:
            images = read_pictures(datasets, resolved.recipe, [mistake.place for mistake in wrong])
            captions = []
            for mistake in wrong:
                # The smallest positive float64 replaces a probability that was rounded to 0.
                loss = -math.log(max(mistake.label_probability, 5e-324))
                captions.append(
                    [
                        f"true {format_class(classes, mistake.target)}",
                        f"pred. {format_class(classes, mistake.predicted)}",
                        f"loss {figure(loss)}",
                    ]
                )
            picture = drawing.draw_grid(
                images.numpy(), captions, COLUMNS, [drawing.WRONG] * len(wrong)
            )
            tracker.show(image_summary("worst mistakes", picture), step)


@contextmanager
def skip_on_error(tracker: NullTracker) -> Iterator[None]:
    """Print an error of this block instead of raising it, because a picture must not end a run.

    A TrainerError is raised all the same.
    """
    try:
        yield
    # An error of the run folder concerns more than the picture, so it must end the run.
    except TrainerError:
        raise
    except Exception as error:
        tracker.say(f"  a picture is left out: {describe(error)}")


def format_class(names: Sequence[str], index: int) -> str:
    """Return the name of a class, or its index if it has no name.

    A model may have more outputs than there are names.
    """
    return names[index] if 0 <= index < len(names) else str(index)


def format_caption(task: Task, classes: Sequence[str], target: Tensor) -> str:
    """Return the caption of a sample with this target; empty for targets such as masks."""
    if target.dim() == 0 and not target.is_floating_point():
        return format_class(classes, int(target))
    if target.dim() > 1 or not target.is_floating_point():
        return ""
    if task.reads == "values" or target.dim() == 0:
        values = target.flatten().tolist()
        return ", ".join(f"{value:.4g}" for value in values[:3])
    # The target is a mixture of classes, such as mixup makes.
    values = target.tolist()
    shares = [(share, index) for index, share in enumerate(values) if share > 0]
    texts = []
    for share, index in sorted(shares, reverse=True)[:3]:
        text = format_class(classes, index)
        if share != 1:
            text += f" {share:.0%}"
        texts.append(text)
    return ", ".join(texts)
