"""Processes that read photos: how many, what one does, and where it puts what it read.

`worker_pool` is what a loader uses.
"""
