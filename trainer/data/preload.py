"""Loaded once into the process that loader workers are forked from, so that they start in milliseconds.

That process must outlive a SIGTERM to the whole group (torchrun sends one to each rank's): the rank still finishes its
step and saves. It is started with the signal blocked and ignores it from here on. It stays blocked for what is forked
from it until `workers._begin`, as torch gives a new worker a handler of its own.
"""

import signal

import torch
import torchvision

import trainer.data.photos

__all__ = ["torch", "torchvision", "trainer"]

signal.signal(signal.SIGTERM, signal.SIG_IGN)
