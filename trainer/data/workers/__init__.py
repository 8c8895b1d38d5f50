"""Loader workers: processes that read photos into shared memory.

Loaders use the classes of `worker_pool`.
"""
