"""The cache of photos: a packed copy of a set, decoded and small, that all ranks and later runs read in its place.

Not the order of samples, nor how they are varied: those are the data set's own, with the cache as without it.
Imports: data, errors, models, processes, recipe, saving, telemetry.
"""

from trainer.data.cache.cached_set import as_stored, cached

__all__ = ["as_stored", "cached"]
