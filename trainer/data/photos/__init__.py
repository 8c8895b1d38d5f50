"""Photos: decoding and augmentation, from a file to pixels of the size that the model needs.

Loader workers use this package, and so does the build of a cache (`data.cache`).
"""
