"""A run in TensorBoard beside its curves: the images as its model sees them, and its mistakes.

Drawn once at the start and once at the end, on rank 0; what other ranks have comes to it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from trainer.data import Batch, as_pictures
from trainer.errors import TrainerError, text_of
from trainer.saving.files import csv_text, portable
from trainer.telemetry import events, gallery
from trainer.telemetry.tracking import NullTracker
from trainer.training.evaluation import WORST, Mistakes
from trainer.training.run import Run

SEEN, PIXELS = 32, 2**22  # samples of the first batch that are shown, and their pixels: of large images fewer


def first_batch(run: Run, batch: Batch) -> None:
    """The first batch as the model sees it, augmented, with its labels where this rank has them.

    Only the first step waits for it, which counts for no speed.
    """
    if not run.tracker.shows:
        return
    with dispensable(run.tracker):
        some = min(SEEN, max(1, PIXELS // max(1, batch.inputs.shape[2:].numel())))
        images = as_pictures(run.datasets, batch.inputs[:some])
        if images is not None and len(images):
            captions = [named(run, target) for target in batch.targets[:some].cpu()]
            if (shown := images.shape[-1]) < batch.inputs.shape[1]:
                run.tracker.say(f"  pictures show {shown} of the {batch.inputs.shape[1]} channels, the first")
            _picture(run, "batch as the model sees it", gallery.grid(images.numpy(), captions), 0)


def mistakes(run: Run, collected: Mistakes) -> None:
    """Of the last evaluation worst.csv, and which class is taken for which. Collective."""
    where = getattr(run.datasets.val, "where", None) or f"{run.datasets.name}/val/{{}}".format
    rows = [
        (
            " ".join(portable(str(where(mistake.place))).splitlines()),  # each takes one line
            *(name(run, mistake.target), name(run, mistake.predicted)),
            *(f"{share:.4g}" for share in (mistake.label_probability, mistake.predicted_probability)),
        )
        for mistake in collected.gathered(run.world)
    ]
    if run.tracker.path is not None and not run.datasets.synthetic and rows:
        head = ("path", "label", "predicted", "label_probability", "predicted_probability")
        run.tracker.replace(WORST, csv_text([head, *rows]))
    if run.tracker.shows and collected.pairs is not None:
        with dispensable(run.tracker):
            names = [name(run, place) for place in range(len(collected.pairs))]
            matrix = gallery.confusion(collected.pairs.numpy(), names)
            _picture(run, "confusion matrix", matrix, run.state.position.step)


@contextmanager
def dispensable(tracker: NullTracker) -> Iterator[None]:
    """A picture that cannot be drawn ends no run."""
    try:
        yield
    except TrainerError:  # of the folder that it is written to
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"
        tracker.say(f"  a picture is left out: {reason}")


def _picture(run: Run, tag: str, picture: gallery.EncodedImage, step: int) -> None:
    run.tracker.show(events.image(tag, picture.encoded, picture.size), step)


def name(run: Run, place: int) -> str:
    """Of a class; a model may have more outputs than there are names."""
    names = run.datasets.classes
    return names[place] if 0 <= place < len(names) else str(place)


def named(run: Run, target: Tensor) -> str:
    """One sample's target in words; empty where words cannot say it."""
    if target.dim() == 0 and not target.is_floating_point():
        return name(run, int(target))
    if target.dim() > 1 or not target.is_floating_point():
        return ""
    if run.task.reads == "values" or target.dim() == 0:
        return ", ".join(f"{value:.4g}" for value in target.flatten().tolist()[:3])
    shares = sorted(((share, place) for place, share in enumerate(target.tolist()) if share > 0), reverse=True)
    return ", ".join(f"{name(run, place)}{'' if share == 1 else f' {share:.0%}'}" for share, place in shares[:3])
