"""Data: sets of images, their order, and the batches that a rank reads of them."""

from trainer.data.datasets import open_datasets, register_dataset
from trainer.data.loaders import Loader, full_batches
from trainer.data.sets import Batch, Datasets, ImageSet, PhotoSource, Shard

__all__ = [
    "Batch",
    "Datasets",
    "ImageSet",
    "Loader",
    "PhotoSource",
    "Shard",
    "full_batches",
    "open_datasets",
    "register_dataset",
]
