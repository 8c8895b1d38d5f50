"""The cache of photos: a packed copy of a set, decoded and resized, that all ranks and later runs read in its place.

The order of samples and their augmentation are the same with the cache as without it.
"""

from trainer.data.cache.cached_set import as_stored, cached

__all__ = ["as_stored", "cached"]
