"""Loaded once into the process that loader workers are forked from, so that they start in milliseconds.

That process must outlive a SIGTERM to the whole group (torchrun sends one to each rank's): the rank still finishes its
step and saves. What is forked from it gets the default back; loader workers then decide for themselves.
"""

import os
import signal

import torch
import torchvision

import trainer.data.photos

__all__ = ["torch", "torchvision", "trainer"]

signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
