"""Loader workers: processes that read photos into shared memory.

`worker_pool` is what a loader uses.
"""
