"""Data: sets of images, their order, and the batches that a rank reads of them.

No model and no mode: what a rank reads is told by a `Shard`.
Imports: errors, recipe, processes, saving.
"""

from trainer.data.datasets import open_datasets, register_dataset
from trainer.data.loaders import Loader, steps_per_epoch
from trainer.data.sets import Batch, Datasets, ImageSet, LabelledSource, PhotoSource, Shard

__all__ = [
    "Batch",
    "Datasets",
    "ImageSet",
    "LabelledSource",
    "Loader",
    "PhotoSource",
    "Shard",
    "open_datasets",
    "register_dataset",
    "steps_per_epoch",
]
