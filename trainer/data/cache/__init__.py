"""Cache of photos: a packed copy of a data set, decoded and resized.

All ranks and later runs read the cache instead of the original photos. The order of samples and
their augmentation are the same with and without the cache.
"""

from trainer.data.cache.cached_set import as_stored, cached

__all__ = ["as_stored", "cached"]
