"""Data sets, the order of their samples, and the batches that each rank reads.

The training mode does not matter here: a `DataShare` says what a rank reads.
Imports: errors, recipe, devices, tasks, memory, processes, distributed, saving, models, telemetry.
"""

from trainer.data.datasets import open_datasets
from trainer.data.loaders import Loader, count_steps_per_epoch
from trainer.data.photos.photo_reader import as_pictures
from trainer.data.registered import register_dataset
from trainer.data.sets import (
    Batch,
    Datasets,
    DataShare,
    Example,
    ImageSet,
    LabelledSource,
    PhotoSource,
    PictureSource,
    TensorSet,
    TensorSpec,
)

__all__ = [
    "Batch",
    "DataShare",
    "Datasets",
    "Example",
    "ImageSet",
    "LabelledSource",
    "Loader",
    "PhotoSource",
    "PictureSource",
    "TensorSet",
    "TensorSpec",
    "as_pictures",
    "count_steps_per_epoch",
    "open_datasets",
    "register_dataset",
]
